"""A witness tells objects that change as they are used from those that do not."""

from __future__ import annotations

from functools import cache, lru_cache
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
