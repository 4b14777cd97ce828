"""Stamped batches: the result of collating, with its `.plan` attached.

A tensor gets an attribute (lost after `.to()`). Lists, tuples, dicts and namedtuples
become subclasses of their type that have one. Any other object is the user's own, and
is left unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ...errors import SpecError
from ..plan import BatchPlan


class StampedList(list[Any]):
    """A list with a `.plan`."""

    __slots__ = ("plan",)


class StampedDict(dict[Any, Any]):
    """A dict with a `.plan`."""

    __slots__ = ("plan",)


class StampedTuple(tuple[Any, ...]):  # noqa: SLOT001 a tuple's cannot hold any
    """A tuple with a `.plan`."""


_types: dict[type, type] = {}


def _with_plan(kind: type) -> type:
    """Return a subclass of a namedtuple whose instances can have a `.plan`."""
    if kind not in _types:
        names = {"__module__": kind.__module__, "__reduce__": _without_plan}
        _types[kind] = type(kind.__name__, (kind,), names)
    return _types[kind]


def _without_plan(batch: Any) -> tuple[type, tuple[Any, ...]]:
    """Pickle an instance of the subclass, which cannot be imported, as its base."""
    return type(batch).__bases__[0], tuple(batch)


def stamped(data: Any, plan: BatchPlan) -> Any:
    """Return the batch with its plan attached, if possible."""
    kind = type(data)
    if kind is list:
        data = StampedList(data)
    elif kind is dict:
        data = StampedDict(data)
    elif kind is tuple:
        data = StampedTuple(data)
    elif isinstance(data, tuple) and hasattr(kind, "_fields"):
        data = tuple.__new__(_with_plan(kind), data)
    elif not isinstance(data, torch.Tensor):
        return data
    if not hasattr(kind, "plan"):  # a field, or an attribute of a tensor subclass
        data.plan = plan
    return data


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
