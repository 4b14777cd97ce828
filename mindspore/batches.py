"""Batches made of lists of rows: by a function of the user's, padded, by length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..engine.plan import Context
from ..errors import SampleError, check
from .columns import Array, Row, as_array, as_column, placed

# Shape and filling of columns, as in MindSpore's `pad_info`.
Pads = dict[str, tuple[Sequence[int | None] | None, Any]]


class BatchInfo(NamedTuple):
    """What a function of whole batches receives last."""

    epoch: int
    batch: int

    def get_epoch_num(self) -> int:
        """Return the number of the epoch, from 0."""
        return self.epoch

    def get_batch_num(self) -> int:
        """Return the number of the batch in its epoch, from 0."""
        return self.batch


class Batches:
    """Makes a batch of a list of rows.

    Args:
        function: takes a list of arrays for each of some columns, and a `BatchInfo`;
            None: columns stay as they are.
        places: numbers of those columns.
        names: names of the columns that come out.
        pads: as `padded`; None: nothing is padded.
        steps: batches in an epoch.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        places: Sequence[int],
        names: Sequence[str],
        pads: Pads | None,
        steps: int = 0,
    ) -> None:
        self._function, self._places, self._names = function, tuple(places), [*names]
        self._pads, self._steps = pads, steps

    def __call__(self, rows: Sequence[Row], ctx: Context) -> Row:
        columns: Row = tuple(
            [*map(as_array, values)] for values in zip(*rows, strict=True)
        )
        if self._function is not None:
            info = BatchInfo(ctx.epoch, ctx.step - self.first_step(ctx))
            results = self._function(*(columns[at] for at in self._places), info)
            results = results if isinstance(results, tuple) else (results,)
            columns = placed(columns, self._places, results)
        if len(columns) != len(self._names):
            raise SampleError(
                f"`per_batch_map` made {len(columns)} columns, but {len(self._names)}"
                " have names; name each of them in `output_columns`"
            )
        return tuple(map(as_column, padded(columns, self._names, self._pads)))

    def first_step(self, ctx: Context) -> int:
        """Return the first step of the epoch."""
        return ctx.epoch * self._steps


class DealtBatches(Batches):
    """The same for epochs of unknown length, whose batches come in order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first: dict[int, int] = {}

    def first_step(self, ctx: Context) -> int:
        """Return the first step of the epoch, seen now or before."""
        return self._first.setdefault(ctx.epoch, ctx.step)


def padded(columns: Row, names: Sequence[str], pads: Pads | None) -> Row:
    """Return columns with the arrays of each brought to one shape.

    Args:
        columns: a list of arrays for each column.
        names: their names.
        pads: shape and filling by name. The shape may be None, or have None in it: the
            largest of the batch. An empty one pads all columns with zeros.
    """
    if pads is None:
        return columns
    pads_by_name: Pads = pads or dict.fromkeys(names, (None, 0))
    return tuple(
        filled(values, *pads_by_name[name]) if name in pads_by_name else values
        for name, values in zip(names, columns, strict=True)
    )


def filled(
    arrays: Sequence[Array], shape: Sequence[int | None] | None, filling: Any
) -> list[Array]:
    """Return arrays cut or filled to a shape, as in `padded`.

    Raises:
        SpecError: the shape has another number of dimensions.
    """
    shapes = (array.shape for array in arrays)
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    open_sizes = [None] * len(largest) if shape is None else shape
    check(
        len(open_sizes) == len(largest),
        f"`pad_info` has the shape {shape!r}, and the column has {len(largest)}"
        " dimensions; give a size, or None, for each",
    )
    sizes = [
        most if size is None else size
        for size, most in zip(open_sizes, largest, strict=True)
    ]
    rooms = []
    for array in arrays:
        room = np.full(sizes, 0 if filling is None else filling, array.dtype)
        part = tuple(slice(0, size) for size in sizes)
        inside = array[part]
        room[tuple(slice(0, size) for size in inside.shape)] = inside
        rooms.append(room)
    return rooms


class Sized:
    """Makes batches whose sizes a function decides, in the trainer."""

    def __init__(self, size: Callable[[BatchInfo], int], *, drop: bool) -> None:
        self._size, self._drop = size, drop

    def __call__(self, rows: Iterator[Row], epoch: int) -> Iterator[Row]:
        for number in itertools.count():
            size = self._size(BatchInfo(epoch, number))
            check(
                isinstance(size, (int, np.integer)) and size > 0,
                f"the function of `batch_size` returned {size!r} for batch {number};"
                " return a whole number > 0",
            )
            group = list(itertools.islice(rows, size))
            if len(group) == size or (group and not self._drop):
                yield tuple(map(as_column, zip(*group, strict=True)))
            if len(group) < size:
                return


@dataclass(frozen=True)
class ByLength:
    """Makes batches of rows that are about equally long, in the trainer."""

    names: Sequence[str]
    """The names of all columns."""
    places: Sequence[int]
    """The numbers of the columns that the length depends on."""
    length: Callable[..., int]
    boundaries: Sequence[int]
    """The length from which on a row belongs to the next bucket."""
    sizes: Sequence[int]
    """Rows in the batches of each bucket."""
    pads: Pads | None
    to_boundary: bool
    """Whether sizes that `pads` leaves open become the boundary minus 1."""
    drop: bool
    """Whether to leave out short last batches."""

    def __call__(self, rows: Iterator[Row]) -> Iterator[Row]:
        buckets: list[list[Row]] = [[] for _ in self.sizes]
        for row in rows:
            length = self.length(*(as_array(row[at]) for at in self.places))
            bucket = int(np.searchsorted(self.boundaries, length, "right"))
            buckets[bucket].append(row)
            if len(buckets[bucket]) == self.sizes[bucket]:
                yield self.batch(buckets[bucket], bucket)
                buckets[bucket] = []
        for bucket, rest in enumerate(buckets):
            if rest and not self.drop:
                yield self.batch(rest, bucket)

    def batch(self, rows: Sequence[Row], bucket: int) -> Row:
        """Return the batch of rows of a bucket.

        Raises:
            SpecError: it has no boundary to fill up to.
        """
        pads = self.pads
        if pads and self.to_boundary:
            check(
                bucket < len(self.boundaries),
                "with `pad_to_bucket_boundary` no row may be as long as the last"
                f" boundary, {self.boundaries[-1]}; add a boundary",
            )
            end = self.boundaries[bucket] - 1
            pads = {
                name: ([end if size is None else size for size in shape or [None]], by)
                for name, (shape, by) in pads.items()
            }
        columns: Row = tuple(
            [*map(as_array, values)] for values in zip(*rows, strict=True)
        )
        return tuple(map(as_column, padded(columns, self.names, pads)))
