"""The tensors of a batch: each of them changed, or the batch split by rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ...errors import SpecError


def in_parts(data: Any, count: int) -> list[Any]:
    """Return a batch as a list of `count` batches of equally many rows: views.

    Raises:
        SpecError: something in it is not a tensor.
    """

    def part(at: int) -> Any:
        return map_tensors(data, lambda tensor: tensor.chunk(count)[at], refuse)

    return [part(at) for at in range(count)]


def refuse(leaf: Any) -> Any:
    """Refuse a leaf that cannot be split by rows.

    Raises:
        SpecError: always.
    """
    raise SpecError(
        f"microbatches are made of tensors, but this batch has a {type(leaf).__name__};"
        " leave it out in a map(), or in a function given to batch(collate_fn=...)"
    )


def map_tensors(
    data: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Return `data` with each tensor in its lists, tuples and dicts changed.

    Other leaves go through `other`.
    """
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, dict):
        moved = copy.copy(data)  # keeps its type, as default_collate does
        moved.update({k: map_tensors(v, change, other) for k, v in data.items()})
        return moved
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, change, other) for value in data))
    if isinstance(data, list):
        items = copy.copy(data)  # keeps what else a list of the user's own holds
        items[:] = [map_tensors(value, change, other) for value in data]
        return items
    if isinstance(data, tuple):
        return type(data)(map_tensors(value, change, other) for value in data)
    return other(data)
