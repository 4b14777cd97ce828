"""Samplers: which rows of a dataset an epoch has, and in which order.

Those that give a fixed or shuffled order change the order of a pipeline. All others
yield indices, and rows are read as these come.
"""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import config
from ..engine.plan import Shard
from ..errors import SpecError, check
from ..pipeline.pipeline import Pipeline
from .loops import Stream


class Sampler(ABC):  # noqa: B024 scripts use it as it is, too
    """The base of samplers. A class of your own yields indices in `__iter__`.

    Args:
        num_samples: indices in an epoch; None: all.
    """

    # Whether the order is another one in each epoch.
    shuffle = False

    def __init__(self, num_samples: int | None = None) -> None:
        self.num_samples = num_samples
        # The rows of the dataset, once it is known.
        self.dataset_size = 0
        # The epoch that the next loop over it draws.
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError

    def ordered(self, pipeline: Pipeline, rows: int) -> Pipeline | None:
        """Return a pipeline of `rows` rows in this order; None: indices are drawn."""
        return None


class SequentialSampler(Sampler):
    """Rows in order, from `start_index` on."""

    def __init__(
        self, start_index: int | None = None, num_samples: int | None = None
    ) -> None:
        super().__init__(num_samples)
        self.start_index = start_index or 0

    def ordered(self, pipeline: Pipeline, rows: int) -> Pipeline | None:
        return (
            pipeline.select(range(self.start_index, rows))
            if self.start_index
            else pipeline
        )


class RandomSampler(Sampler):
    """Rows in another order each epoch, each once unless `replacement`."""

    shuffle = True

    def __init__(
        self,
        replacement: bool = False,
        num_samples: int | None = None,
        shuffle: Any = None,
    ) -> None:
        super().__init__(num_samples)
        self.replacement = replacement

    def ordered(self, pipeline: Pipeline, rows: int) -> Pipeline | None:
        return None if self.replacement else pipeline.shuffle()

    def __iter__(self) -> Iterator[int]:
        most = self.dataset_size
        count = min(self.num_samples or most, most)
        yield from drawn(self).integers(most, size=count).tolist()


class DistributedSampler(Sampler):
    """The rows of one of `num_shards` shards: every `num_shards`-th one.

    Args:
        num_shards: number of shards.
        shard_id: number of this one.
        shuffle: whether to shuffle all rows first, in each epoch.
        num_samples: rows in an epoch; None: all of the shard.
        offset: the shard that gets the first row; with -1 that is shard 0, and shards
            that lack a row at the end get one from the beginning.
    """

    def __init__(
        self,
        num_shards: int,
        shard_id: int,
        shuffle: bool = True,
        num_samples: int | None = None,
        offset: int = -1,
    ) -> None:
        super().__init__(num_samples)
        check(
            isinstance(num_shards, int)
            and isinstance(shard_id, int)
            and 0 <= shard_id < num_shards,
            f"`shard_id` must be >= 0 and < num_shards, got {shard_id!r} of"
            f" {num_shards!r}; the first shard is 0",
        )
        self.num_shards, self.shard_id = num_shards, shard_id
        self.shuffle, self.offset = shuffle, offset

    def ordered(self, pipeline: Pipeline, rows: int) -> Pipeline | None:
        every = self.num_shards
        source = pipeline.shuffle() if self.shuffle else pipeline
        if self.offset >= 0:
            return source.select(
                range((self.shard_id - self.offset) % every, rows, every)
            )
        places = self.shard_id + every * np.arange(-(-rows // every))
        return source.select((places % rows).tolist())


class SubsetSampler(Sampler):
    """The rows with these indices, in this order."""

    def __init__(self, indices: Iterable[int], num_samples: int | None = None) -> None:
        super().__init__(num_samples)
        self.indices = [int(index) for index in indices]

    def ordered(self, pipeline: Pipeline, rows: int) -> Pipeline | None:
        return pipeline.select(self.indices)


class SubsetRandomSampler(SubsetSampler):
    """The rows with these indices, in another order each epoch."""

    shuffle = True

    def ordered(self, pipeline: Pipeline, rows: int) -> Pipeline | None:
        return pipeline.select(self.indices).shuffle()


class WeightedRandomSampler(Sampler):
    """Rows drawn with these weights."""

    shuffle = True

    def __init__(
        self,
        weights: Sequence[float],
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        super().__init__(num_samples)
        self.weights = np.asarray(weights, np.float64)
        self.replacement = replacement

    def __iter__(self) -> Iterator[int]:
        share = self.weights / self.weights.sum()
        count = self.num_samples or len(share)
        rng = drawn(self)
        yield from rng.choice(len(share), count, self.replacement, share).tolist()


class PKSampler(Sampler):
    """`num_val` rows of each class, for data that has labels.

    Args:
        num_val: rows of each class.
        num_class: number of classes, the first ones; None: all.
        shuffle: whether to mix the classes.
        class_column: ignored: the column is `label`.
        num_samples: rows in an epoch; None: all of these.
    """

    def __init__(
        self,
        num_val: int,
        num_class: int | None = None,
        shuffle: bool = False,
        class_column: str = "label",
        num_samples: int | None = None,
    ) -> None:
        super().__init__(num_samples)
        self.num_val, self.num_class, self.shuffle = num_val, num_class, shuffle
        # The label of each row, once the dataset is known.
        self.labels: Sequence[int] = ()

    def __iter__(self) -> Iterator[int]:
        rng, labels = drawn(self), np.asarray(self.labels)
        indices: list[int] = []
        for label in np.unique(labels)[: self.num_class]:
            rows = np.flatnonzero(labels == label)
            indices += rng.choice(rows, self.num_val, self.num_val > len(rows)).tolist()
        if self.shuffle:
            rng.shuffle(indices)
        yield from indices[: self.num_samples]


def drawn(sampler: Sampler) -> np.random.Generator:
    """Return the generator of a sampler's next epoch."""
    sampler.epoch += 1
    return np.random.default_rng([config.get_seed(), sampler.epoch - 1])


class Reads:
    """Reads the row of an index."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __call__(self, row: tuple[int]) -> Any:
        return self._rows[row[0]]


class Chosen(NamedTuple):
    """Rows in the order of a sampler."""

    pipeline: Pipeline
    size: Callable[[], int] | None
    """Counts the rows of an epoch, if their indices are drawn as they are read."""


def chosen(sampler: Any, rows: Any, workers: int | None = None) -> Chosen:
    """Return the rows that a sampler chooses.

    Args:
        sampler: one of these, or anything that yields indices: a list, torch's.
        rows: rows by their index.
        workers: workers to start with.

    Raises:
        SpecError: it is nothing of the kind, or needs labels that the rows lack.
    """
    check(
        isinstance(sampler, Iterable),
        f"`sampler` must yield indices, got {sampler!r}; give one of the samplers, a"
        " list of indices, or an object with __iter__",
    )
    name = name_of(rows)
    ours = type(sampler).__module__ == __name__
    if ours:
        sampler = copy.copy(sampler)  # it may choose from other datasets, too
    if isinstance(sampler, Sampler):
        source = Pipeline.from_dataset(
            rows, num_parallel_workers=workers, name=name, shard=Shard.single()
        )
        sampler.dataset_size = len(rows)
        ordered = sampler.ordered(source, len(rows))
        if ordered is not None:
            count = sampler.num_samples
            return Chosen(ordered if count is None else ordered.take(count), None)
    if isinstance(sampler, PKSampler):
        check(
            hasattr(rows, "labels"), "PKSampler needs data with labels, such as folders"
        )
        sampler.labels = rows.labels

    def indices(epoch: int) -> Iterator[tuple[int]]:
        if ours:
            sampler.epoch = epoch
        return ((int(index),) for index in sampler)

    stream = Pipeline.from_dataset(Stream(indices), shard=Shard.single())
    pipeline = stream.map(Reads(rows), num_parallel_workers=workers, name=name)
    return Chosen(pipeline, lambda: _size(sampler))


def sampler_of(
    sampler: Any,
    *,
    shuffle: bool,
    num_samples: int | None,
    num_shards: int | None,
    shard_id: int | None,
) -> Any:
    """Return the sampler that these arguments of a dataset stand for.

    Raises:
        SpecError: one of `num_shards` and `shard_id` is missing, or there is no such
            shard.
    """
    if sampler is not None:
        return sampler
    if num_shards is None and shard_id is None:
        kind = RandomSampler if shuffle else SequentialSampler
        return kind(num_samples=num_samples)
    if num_shards is None or shard_id is None:
        raise SpecError(
            "`num_shards` and `shard_id` go together, got"
            f" {num_shards!r} and {shard_id!r}; pass both, or neither"
        )
    return DistributedSampler(num_shards, shard_id, shuffle, num_samples)


def name_of(rows: Any) -> str:
    """Return the name of a source in the log."""
    return str(getattr(rows, "name", type(rows).__name__))


def _size(sampler: Any) -> int:
    """Return how many indices an epoch has."""
    if hasattr(sampler, "__len__"):
        return len(sampler)
    return sum(1 for _ in copy.copy(sampler))
