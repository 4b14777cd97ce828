"""The tensors of a batch: each of them changed, or the batch split by rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torchs

from ...errors import SpecError


def collate_by_default(samples: list[Any]) -> Any:
    """Return what torch's `default_collate` does in the trainer.

    In a worker process, torch stacks tensors into shared memory. That refuses those of
    a graph, and rounds a batch of several types to the first one's.
    """
    known = torchs.default_collate_fn_map
    if get_worker_info() is None or known[torch.Tensor] is not torchs.collate_tensor_fn:
        return torchs.default_collate(samples)  # type: ignore[no-untyped-call]
    return torchs.collate(samples, collate_fn_map={**known, torch.Tensor: _stacked})


def is_default_unchanged() -> bool:
    """Whether nobody has registered other functions for `default_collate` to call."""
    functions = torchs.default_collate_fn_map.values()
    return all(each.__module__ == torchs.__name__ for each in functions)


def _stacked(tensors: Sequence[torch.Tensor], **how: Any) -> torch.Tensor:
    if tensors[0].is_nested or tensors[0].layout is not torch.strided:
        refused: torch.Tensor = torchs.collate_tensor_fn(tensors, **how)
        return refused
    return torch.stack(list(tensors))


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
