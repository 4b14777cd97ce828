"""The frameworks are real ones, which `make test-all` installs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import penstock as ps


@pytest.fixture(autouse=True)
def _tuned() -> Iterator[None]:
    ps.set_enable_autotune(True)
    yield
    ps.set_enable_autotune(False)
