"""What several tests of pipes need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.engine.far.child import Pipe


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    """Return two connected ends of a pipe."""
    ours, theirs = Pipe.pair()
    yield ours, theirs
    ours.close()
    theirs.close()
