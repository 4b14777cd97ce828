"""Rows of named columns: what values they are made of, and functions that change them.

Inside a pipeline a row is a tuple. A column is an array, or a list of text: torch's
collate stacks arrays, and leaves text alone. As a list it collates an array of text,
too, with the axis of the batch behind all others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import PenstockError, SampleError
from ..pipeline.stages import wanted_by

# A sample or a batch: a value for each column.
Row = tuple[Any, ...]
Array = NDArray[Any]
# What reading a damaged file raises.
DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)


@contextmanager
def reads(path: Any, kind: type[PenstockError]) -> Iterator[None]:
    """Raise an error of this kind that names the file if the body finds it damaged."""
    try:
        yield
    except DAMAGE as error:
        own = isinstance(error, PenstockError)
        why = error if own else f"{error!r}; it is damaged, or of another kind"
        raise kind(f"{str(path)!r} cannot be read: {why}") from error


def as_row(sample: Any, columns: Sequence[str]) -> Row:
    """Return a sample of the user's as a row.

    Raises:
        SampleError: it has not one value for each column.
    """
    values = sample if isinstance(sample, (tuple, list)) else (sample,)
    if len(values) != len(columns):
        raise SampleError(
            f"a sample has {len(values)} values, but there are {len(columns)} columns,"
            f" {', '.join(columns)}; name as many columns as the source yields values"
        )
    return tuple(map(as_leaf, values))


def as_leaf(value: Any, *, copies: bool = True) -> Any:
    """Return a value as a row holds it: functions may change a copy in place."""
    if isinstance(value, dict):
        return value
    array = np.array(value) if copies else np.asarray(value)
    return array.tolist() if array.dtype.kind in "SU" else array


def as_array(value: Any, *, batched: bool = False) -> Any:
    """Return a value of a row, or of a batch of rows, as an array."""
    if isinstance(value, dict):
        return value
    if batched and isinstance(value, (list, tuple)):
        return np.moveaxis(np.array(value), -1, 0)
    return np.asarray(value)


def as_samples(batch: Row) -> Row:
    """Return a batch as a row of a larger batch."""
    return tuple(as_leaf(as_array(value, batched=True)) for value in batch)


def as_column(values: Array | Sequence[Any]) -> Any:
    """Return the values of a batch's column as a tensor; text as an array."""
    array = (
        values if isinstance(values, np.ndarray) else np.stack([*map(as_array, values)])
    )
    if array.dtype.kind in "SU":
        return array
    # Views may be read-only, or run backwards: torch takes neither.
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def placed(row: Row, places: Sequence[int], values: Row) -> Row:
    """Return a row, or its names, with results in place of the columns they come from.

    If there are as many results as such columns, each takes the place of one. Otherwise
    the results come first, followed by the other columns.
    """
    if len(values) == len(places):
        results = dict(zip(places, values, strict=True))
        return tuple(results.get(at, value) for at, value in enumerate(row))
    return (*values, *(value for at, value in enumerate(row) if at not in places))


class Columns:
    """Calls operations on some columns of a row. It can be sent to worker processes.

    Args:
        operations: each takes the results of the one before.
        places: numbers of the columns that the first one takes.
        count: number of columns that the last one makes.
        batched: whether a row is a batch.
    """

    def __init__(
        self,
        operations: Sequence[Callable[..., Any]],
        places: Sequence[int],
        count: int,
        *,
        batched: bool,
    ) -> None:
        self._calls = [
            (operation, "rng" in wanted_by(operation)) for operation in operations
        ]
        self._places, self._count, self._batched = tuple(places), count, batched
        self.__name__ = getattr(operations[0], "__name__", type(operations[0]).__name__)

    @classmethod
    def of(
        cls, operations: Sequence[Callable[..., Any]], *where: Any, batched: bool
    ) -> Columns:
        """Return one that asks for `rng` if an operation does."""
        draws = any("rng" in wanted_by(operation) for operation in operations)
        return (Drawn if draws else cls)(operations, *where, batched=batched)

    def __call__(self, row: Row) -> Row:
        return self.applied(row, None)

    def applied(self, row: Row, rng: np.random.Generator | None) -> Row:
        """Return the row with the results.

        Raises:
            SampleError: the last operation made more or fewer columns than have names.
        """
        values = tuple(as_array(row[at], batched=self._batched) for at in self._places)
        for operation, draws in self._calls:
            result = operation(*values, rng=rng) if draws else operation(*values)
            values = result if isinstance(result, tuple) else (result,)
        if len(values) != self._count:
            raise SampleError(
                f"{self.__name__} returned {len(values)} columns, but {self._count}"
                " have names; name each of them in `output_columns`"
            )
        if not self._batched:
            values = tuple(as_leaf(value, copies=False) for value in values)
        return placed(row, self._places, values)


class Drawn(Columns):
    """The same with operations that draw from the sample's own generator."""

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:  # type: ignore[override]
        return self.applied(row, rng)


class Picked:
    """Picks columns of a row."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = tuple(places)

    def __call__(self, row: Row) -> Row:
        return tuple(row[at] for at in self._places)


class Kept:
    """Asks a predicate about some columns of a row."""

    def __init__(
        self, predicate: Callable[..., Any], places: Sequence[int], *, batched: bool
    ) -> None:
        self._predicate, self._places = predicate, tuple(places)
        self._batched = batched

    def __call__(self, row: Row) -> bool:
        values = (as_array(row[at], batched=self._batched) for at in self._places)
        return bool(self._predicate(*values))
