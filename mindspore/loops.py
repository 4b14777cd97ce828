"""Loops over a dataset, and what is known of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch

from ..errors import check
from ..pipeline.pipeline import Pipeline
from .columns import Row, as_array, as_row

T = TypeVar("T")
# Rows that a loop without batches gets at once.
IN_CHUNK = 16


# What loops yield, and sequences of rows that no index reaches.


class Tensor(torch.Tensor):
    """A torch tensor that can also be asked for its array, as MindSpore's can.

    Whatever is computed from it is an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return an array on the same memory."""
        return self.detach().cpu().numpy()


class Text(np.ndarray[Any, Any]):
    """An array of text, which no tensor could store."""

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return an ordinary array on the same memory."""
        return self.view(np.ndarray)


def shown(value: Any, *, batched: bool, as_arrays: bool) -> Any:
    """Return a column as loops yield it.

    Args:
        value: of a row, or of a batch of rows.
        batched: which of the two.
        as_arrays: whether as an array; otherwise as a `Tensor` or `Text`.
    """
    if isinstance(value, torch.Tensor) and not as_arrays:
        return value.as_subclass(Tensor)
    array = as_array(value, batched=batched)
    if isinstance(array, dict):
        return array
    own = array if isinstance(value, torch.Tensor) else np.array(array)
    if as_arrays:
        return own
    return (
        own.view(Text)
        if own.dtype.kind in "SU"
        else torch.from_numpy(own).as_subclass(Tensor)
    )


class Epochs(Iterator[T]):
    """Goes on with the next epoch whenever it is looped over, like MindSpore's.

    Args:
        begin: begins an epoch.
        num_epochs: how many there are; -1: no limit.
    """

    def __init__(self, begin: Callable[[], Iterator[T]], num_epochs: int) -> None:
        self._begin, self._epochs_left = begin, num_epochs
        self._rows: Iterator[T] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if self._rows is None:
            if self._epochs_left == 0:
                raise RuntimeError(
                    "this iterator has yielded all its epochs; give `num_epochs`, the"
                    " number of your loops over it, or make an iterator for each loop"
                )
            self._rows = self._begin()
        try:
            return next(self._rows)
        except StopIteration:
            self._rows, self._epochs_left = None, self._epochs_left - 1
            raise
        except BaseException:
            self._rows = None  # the next loop is a whole epoch
            raise


class Stream(torch.utils.data.IterableDataset[Row]):
    """Rows that come in an order of their own.

    Args:
        begin: begins an epoch of samples, given its number.
        columns: names of their values; None: samples are rows already.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterable[Any]],
        columns: Sequence[str] | None = None,
    ) -> None:
        self._begin, self._columns = begin, columns

    def __iter__(self) -> Iterator[Row]:
        return self.__penstock_epoch__(0)

    def __penstock_epoch__(self, epoch: int) -> Iterator[Row]:
        for sample in self._begin(epoch):
            columns = self._columns
            yield sample if columns is None else as_row(sample, columns)


def mixed(rows: Iterable[T], size: int, rng: np.random.Generator) -> Iterator[T]:
    """Yield rows at random from a buffer of `size` rows."""
    buffer = list[T]()
    for row in rows:
        buffer.append(row)
        if len(buffer) == size:
            at = int(rng.integers(size))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()
    for at in rng.permutation(len(buffer)):
        yield buffer[at]


# A dataset, as loops see it.


@dataclass(frozen=True)
class Facts:
    """What is known of a dataset besides its pipeline and columns."""

    batched: bool = False
    """Whether rows are batches."""
    closed: bool = False
    """Whether the pipeline itself makes them, so that only `map` may follow."""
    dealt: bool = False
    """Whether rows come in an order of their own, which no index reaches."""
    shuffled: bool = False
    """Whether that order, or the one of the indices, is another one in each epoch."""
    begin: Callable[[int], Iterator[Row]] | None = None
    """Begins an epoch by its number, if the pipeline does nothing but read it."""
    size: Callable[[], int] | None = None
    """Returns the rows of an epoch, if the pipeline cannot."""
    source: Any = None
    """What is read, by its index, if nothing but an order was made of it."""
    first: Callable[[Any], Row] | None = None
    """Makes rows of what is read."""
    unbatched: tuple[Any, int, bool] | None = None
    """What the batches were made of, their size, and whether a short one is dropped."""
    parents: tuple[Loops, ...] = ()
    """Datasets that run while this one does."""
    batch_size: int = 1
    repeats: int = 1
    classes: dict[str, Any] | None = None
    """The label of each class, by name."""


class Loops:
    """A pipeline of rows that can be looped over as a dataset of MindSpore's.

    Args:
        pipeline: a pipeline whose samples are rows.
        columns: names of the columns.
        facts: what else is known.
    """

    def __init__(
        self, pipeline: Pipeline, columns: Sequence[str], facts: Facts | None = None
    ) -> None:
        # The `Pipeline` inside, for everything else that penstock can do.
        self.pipeline = pipeline
        # Names of the columns.
        self.columns = list(columns)
        # What else is known.
        self.facts = facts or Facts()
        self._looping, self._epochs = False, 0
        self._run_pipeline: Pipeline | None = None
        self._spare: list[tuple[int, Pipeline]] = []

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = False
    ) -> Epochs[dict[str, Any]]:
        """Return an iterator of dicts; each loop over it is an epoch.

        Args:
            num_epochs: the number of loops; -1: no limit.
            output_numpy: whether columns are arrays; otherwise they are torch tensors.
            do_copy: ignored, as what you get belongs to you.
        """
        names = self.columns

        def begin() -> Iterator[dict[str, Any]]:
            rows = self._values(names, as_arrays=output_numpy)
            return (dict(zip(names, values, strict=True)) for values in rows)

        return Epochs(begin, num_epochs)

    def create_tuple_iterator(
        self,
        columns: Sequence[str] | None = None,
        num_epochs: int = -1,
        output_numpy: bool = False,
        do_copy: bool = False,
    ) -> Epochs[list[Any]]:
        """Return an iterator of lists; each loop over it is an epoch.

        Args:
            columns: names of the columns, in this order (default: all).
            num_epochs: the number of loops; -1: no limit.
            output_numpy: whether columns are arrays; otherwise they are torch tensors.
            do_copy: ignored, as what you get belongs to you.

        Raises:
            SpecError: there is no such column.
        """
        names = list(columns or self.columns)
        self.places(names)
        return Epochs(lambda: self._values(names, as_arrays=output_numpy), num_epochs)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.create_tuple_iterator(num_epochs=1)

    def rows(self, epoch: int | None = None) -> Generator[Row, None, None]:
        """Run an epoch: the next one; or a certain one, which changes no other loop.

        While another loop runs, a copy of the pipeline does.
        """
        mine = epoch is None and not self._looping
        if epoch is None:
            epoch, self._epochs = self._epochs, self._epochs + 1
        if self.facts.begin is not None:
            yield from self.facts.begin(epoch)
        elif mine:
            self._looping = True
            try:
                yield from self._read(self._run)
            finally:
                self._looping = False
        else:
            yield from self._apart(epoch)

    def close(self) -> None:
        """Stop all workers."""
        for run in (self._run, *(run for _, run in self._spare)):
            run.close()
        for parent in self.facts.parents:
            parent.close()

    def places(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of columns.

        Raises:
            SpecError: there is no such column.
        """
        for name in names:
            check(
                name in self.columns,
                f"there is no column {name!r}; there are {', '.join(self.columns)}",
            )
        return [self.columns.index(name) for name in names]

    @property
    def _run(self) -> Pipeline:
        """What loops run."""
        if self._run_pipeline is None:
            self._run_pipeline = self.pipeline
            if not self.facts.closed:
                self._run_pipeline = self.pipeline.batch(IN_CHUNK, collate_fn=list)
        return self._run_pipeline

    def _read(self, run: Pipeline) -> Iterator[Row]:
        for batch in run:
            if self.facts.closed:
                yield tuple(batch)
            else:
                yield from batch

    def _apart(self, epoch: int) -> Iterator[Row]:
        """Run an epoch with a copy of the pipeline, which is kept for others."""
        at, run = self._spare.pop() if self._spare else (-1, copy.copy(self._run))
        if at != epoch:
            run.set_epoch(epoch)
        try:
            yield from self._read(run)
        except BaseException:
            run.close()
            raise
        self._spare.append((epoch + 1, run))

    def _values(self, names: Sequence[str], *, as_arrays: bool) -> Iterator[list[Any]]:
        batched, places = self.facts.batched, self.places(names)
        for row in self.rows():
            yield [
                shown(row[at], batched=batched, as_arrays=as_arrays) for at in places
            ]


class Known(Loops):
    """The same, with MindSpore's getters."""

    def get_dataset_size(self) -> int:
        """Return the rows of an epoch, or its batches; run it if nothing tells."""
        if self.facts.size is not None:
            return self.facts.size()
        one = self.pipeline if self.facts.closed else self.pipeline.batch(1)
        try:
            return len(one)
        except TypeError:
            return sum(1 for _ in self.rows(0))

    def __len__(self) -> int:
        return self.get_dataset_size()

    def get_batch_size(self) -> int:
        """Return the rows of a batch; 1 without batches."""
        return self.facts.batch_size

    def get_repeat_count(self) -> int:
        """Return the count of the last `repeat()`."""
        return self.facts.repeats

    def get_col_names(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.columns)

    def get_class_indexing(self) -> dict[str, Any]:
        """Return the label of each class, by name; empty if the data has no names."""
        return dict(self.facts.classes or {})

    def num_classes(self) -> int | None:
        """Return the number of classes; None if the data has no names for them."""
        return None if self.facts.classes is None else len(self.facts.classes)

    def output_shapes(self, estimate: bool = False) -> list[list[int]]:
        """Return the shapes of the first row or batch, by column."""
        return [list(value.shape) for value in self._first()]

    def output_types(self) -> list[np.dtype[Any]]:
        """Return numpy's types of the first row or batch, by column."""
        return [value.dtype for value in self._first()]

    def reset(self) -> Self:
        """Begin at the first epoch's order again."""
        self._run.set_epoch(0)
        self._epochs = 0
        return self

    def _first(self) -> list[Any]:
        batched = self.facts.batched
        with closing(self.rows(0)) as rows:
            row = next(rows)
        return [shown(value, batched=batched, as_arrays=True) for value in row]
