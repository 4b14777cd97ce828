"""A witness tells objects that change as they are used from those that do not."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.witness.witness import Witness


@lru_cache
def of_few(kind: int) -> int:
    return kind


class Helped:
    """Uses a function that keeps the few results it can have."""

    def __getitem__(self, index: int) -> int:
        return of_few(index % 2)


class Kept:
    """Keeps all that it has read, as the decorator does."""

    @cache  # noqa: B019
    def read(self, index: int) -> int:
        return index

    def __getitem__(self, index: int) -> int:
        return self.read(index)


@pytest.mark.parametrize(("data", "path"), [(Helped(), None), (Kept(), ".read")])
def test_a_cache_of_results_counts_if_it_grows_with_the_samples(
    data: Any, path: str | None
) -> None:
    witness = Witness([data])
    assert len([data[index] for index in range(8)]) == 8
    assert witness.changed() == path


def test_a_file_that_others_have_read_and_closed_is_not_the_datas(
    tmp_path: Path,
) -> None:
    for name in ("others", "own"):
        (tmp_path / name).write_bytes(bytes(1000))
    witness = Witness([object()])
    with witness:
        others = (tmp_path / "others").open("rb", buffering=0)
        own = (tmp_path / "own").open("rb", buffering=0)
        others.read(10)
        own.read(10)
    others.close()
    assert "own" in witness.verdict("thread")
    own.close()
    assert not witness.verdict("thread")
    assert witness.finding() is None
