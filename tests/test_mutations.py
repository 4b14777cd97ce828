"""Each breakage of the pure core is where the list says, and tests notice it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


def script() -> Any:
    """Import the script, which is not a module of the package."""
    path = Path(__file__).with_name("mutations.py")
    spec = importlib.util.spec_from_file_location("mutations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations = script()


def test_every_breakage_can_still_be_made(root: Path) -> None:
    for file, old, new in mutations.MUTATIONS:
        assert (root / file).read_text().count(old) == 1, old
        assert new != old
    assert set(mutations.EQUIVALENT) <= set(mutations.MUTATIONS)


def test_a_breakage_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\na = 1\n")
    mutation = mutations.Mutation("file.py", "a = 1", "a = 2")
    with pytest.raises(SystemExit, match="has 2 times 'a = 1'"):
        mutations.is_noticed(mutation, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("file", sorted({each.file for each in mutations.MUTATIONS}))
def test_every_breakage_is_noticed(file: str) -> None:
    assert mutations.main(file) == 0
