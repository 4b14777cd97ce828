"""Default collate is known until somebody registers a function for its kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

import penstock as ps
from penstock.engine.batch.buffer import is_default_unchanged


class Apart:
    """Samples of a library, which registers a function for them."""


class Pair(NamedTuple):
    """Samples that have a layout."""

    left: int
    right: int


class Rows(list[int]):
    """Samples of a library that have a layout."""


def of_library(batch: list[Any], **_: Any) -> Any:
    """Stand for what a library makes of its samples."""
    return batch


@pytest.mark.parametrize("kind", [Apart, Pair, Rows, Sequence, object, torch.Tensor])
def test_a_function_for_a_class_without_a_layout_changes_nothing(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_default_unchanged()
    monkeypatch.setitem(default_collate_fn_map, kind, of_library)
    assert is_default_unchanged() == (kind is Apart)


def test_samples_of_that_class_are_collated_by_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(default_collate_fn_map, Apart, of_library)
    data = [{"at": at, "apart": Apart()} for at in range(8)]
    for batch in ps.DataLoader(data, 4):  # type: ignore[arg-type]
        assert [type(sample) for sample in batch["apart"]] == [Apart] * 4
        assert isinstance(batch["at"], torch.Tensor)
