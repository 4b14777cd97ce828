"""Shuffles for readers that need only a part of the data at a time.

Reading a row of a compressed file means reading everything compressed with it. An order
that mixes the whole dataset thus reads a whole block for each sample. `GroupShuffle`
shuffles the groups (shards, row groups), and mixes the samples of `window` of them at a
time. Each group is needed once an epoch, for as long as its window lasts.

`PartShuffle` lets each rank read its own part of the data. The dataset is dealt into
equal parts, once for all epochs. Each epoch shuffles within them, and each global batch
has equally many rows of each part, one part after another. A rank's rows are adjacent
in the batch, so it reads only its own parts, the same ones in each epoch: a cache
beside it holds just these, and no two ranks read a shard. The parts are counted, not
the ranks, so the batches are the same for any number of ranks. MosaicML Streaming's
canonical nodes are the same idea.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import check, checked_seed
from .order import (
    Numbers,
    Order,
    Recent,
    Rows,
    Shard,
    Shuffle,
    by_key,
    drawn_order,
    sealed,
)

# The round whose permutation deals the data into parts.
DEALING = -1


@dataclass(frozen=True, slots=True)
class Groups:
    """The samples of each group of a dataset, in order; compared by the digest."""

    sizes: Numbers = field(repr=False, compare=False)
    """`int64 [G]`, each >= 1, read-only."""
    starts: Numbers = field(repr=False, compare=False)
    """Where each group begins in the dataset, `int64 [G]`."""
    digest: str

    @classmethod
    def of(cls, sizes: Any, length: int) -> Groups:
        """Copy `sizes`, `int [G]`, leaving out groups without samples.

        Raises:
            SpecError: they do not add up to `length` samples.
        """
        array = np.asarray(sizes, dtype=np.int64)
        array = array[array != 0]
        check(
            array.ndim == 1 and (array > 0).all() and int(array.sum()) == length,
            f"`group_sizes` must list the number of samples in each group and add up"
            f" to {length}, got {array.size} groups that add up to {int(array.sum())};"
            " return the size of each shard, in order",
        )
        return cls(array, np.cumsum(array) - array, sealed(array))


class ShuffledGroups(NamedTuple):
    """The groups of a round in their order, `[G]`."""

    order: Numbers
    ends: Numbers
    """Where each group ends, in positions of the round."""


@dataclass(frozen=True, slots=True)
class GroupShuffle:
    """The groups in a pseudo-random order, with the samples of a few mixed at a time.

    Args:
        groups: the groups of the dataset, in its own order.
        seed: each round has another order.
        window: groups that are mixed, >= 1.
    """

    groups: Groups
    seed: int
    window: int
    # The end of a round is loaded while the next one begins.
    _recent: Recent[ShuffledGroups] = field(
        default_factory=lambda: Recent(2),
        init=False,
        repr=False,
        compare=False,
    )

    @property
    def length(self) -> int:
        return int(self.groups.sizes.sum())

    def trace(self, rows: Rows) -> Rows:
        """Return the positions of each round at `rows`; O(G) once for a round."""
        return Rows(by_key(rows.rounds, rows.indices, self.at), rows.rounds)

    def at(self, round_: int, positions: Numbers) -> Numbers:
        """Return the samples at positions of a round, `[N]`."""
        groups = self.shuffled(round_)
        ends = groups.ends

        def mixed(number: int, positions: Numbers) -> Numbers:
            first = number * self.window
            start = int(ends[first - 1]) if first else 0
            length = int(ends[min(first + self.window, ends.size) - 1]) - start
            key = round_ * ends.size + number
            inside = Shuffle(length, self.seed).at(key, positions - start)
            return self.samples(groups, start + inside)

        numbers = np.searchsorted(ends, positions, side="right") // self.window
        return by_key(numbers, positions, mixed)

    def samples(self, shuffled: ShuffledGroups, positions: Numbers) -> Numbers:
        """Return the samples at positions of the ordered groups, unmixed."""
        places = np.searchsorted(shuffled.ends, positions, side="right")
        group = shuffled.order[places]
        inside = positions - (shuffled.ends[places] - self.groups.sizes[group])
        return self.groups.starts[group] + inside

    def shuffled(self, round_: int) -> ShuffledGroups:
        """Return the groups in the order of a round."""

        def shuffle() -> ShuffledGroups:
            text = f"penstock groups, seed {self.seed}, round {round_}"
            order = drawn_order(text, self.groups.sizes.size)
            return ShuffledGroups(order, np.cumsum(self.groups.sizes[order]))

        return self._recent.get(round_, shuffle)

    def __str__(self) -> str:
        return (
            f"shuffle(seed={self.seed}, window={self.window} of"
            f" {self.groups.sizes.size} groups, blake2b {self.groups.digest})"
        )


def group_shuffle(order: Order, sizes: Any, seed: int, window: int) -> GroupShuffle:
    """Return a shuffle of a dataset by groups of these sizes.

    Raises:
        SpecError: the order was changed before; `window` is below 1; `sizes` do not add
            up to the dataset.
    """
    check(
        not order.steps,
        f"shuffle(window=...) mixes the shards of the dataset as it is, got {order};"
        " put it directly after the source",
    )
    check(
        type(window) is int and window >= 1,
        f"`window` must be an int >= 1, the shards mixed at once, got {window!r}",
    )
    return GroupShuffle(Groups.of(sizes, order.length), checked_seed(seed), window)


@dataclass(frozen=True, slots=True)
class PartShuffle:
    """The previous sequence, dealt into parts, each shuffled differently each round.

    Positions count one part after another; `positions` returns those of a batch.

    Args:
        length: number of samples, at least one per part.
        seed: decides the dealing and all rounds.
        count: number of parts.
        within: None mixes all samples of a part. Otherwise whole groups are dealt,
            except those at a border, and mixed a few at a time.
    """

    length: int
    seed: int
    count: int
    within: GroupShuffle | None = None
    _starts: Numbers = field(init=False, repr=False, compare=False)
    _shuffles: tuple[Shuffle | GroupShuffle, ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        shares = [Shard(k, self.count).share(self.length) for k in range(self.count)]
        object.__setattr__(self, "_starts", np.array([start for start, _ in shares]))
        shuffles = tuple(self._shuffle(start, length) for start, length in shares)
        object.__setattr__(self, "_shuffles", shuffles)

    def _shuffle(self, start: int, length: int) -> Shuffle | GroupShuffle:
        """Return the shuffle of the part that begins at `start`."""
        if self.within is None:
            return Shuffle(length, self.seed)
        ends = self.within.shuffled(DEALING).ends
        borders = np.unique(np.clip([0, *ends], start, start + length))
        return replace(self.within, groups=Groups.of(np.diff(borders), length))

    def trace(self, rows: Rows) -> Rows:
        """Return the positions of each round at `rows`."""
        parts = np.searchsorted(self._starts, rows.indices, side="right") - 1

        def at(key: int, positions: Numbers) -> Numbers:
            part = key % self.count
            start = int(self._starts[part])
            return start + self._shuffles[part].at(key, positions - start)

        places = by_key(rows.rounds * self.count + parts, rows.indices, at)
        if self.within is None:
            samples = Shuffle(self.length, self.seed).at(DEALING, places)
        else:
            samples = self.within.samples(self.within.shuffled(DEALING), places)
        return Rows(samples, rows.rounds)

    def positions(self, start: int, size: int, rows: Numbers) -> Numbers:
        """Return the positions of some rows of a batch.

        Args:
            start: samples of the epoch before the batch.
            size: planned size of the global batch, a multiple of the number of parts;
                an epoch's last one may have fewer samples.
            rows: numbers of rows, `int64 [N]`.
        """
        lengths = np.diff(self._starts, append=self.length)
        before = start // self.count
        counts = np.minimum(size // self.count, lengths - before)
        ends = np.cumsum(counts)
        part = np.searchsorted(ends, rows, side="right")
        positions: Numbers = self._starts[part] + before + rows - (ends - counts)[part]
        return positions

    def __str__(self) -> str:
        shuffle = self.within or f"shuffle(seed={self.seed})"
        return f"{shuffle} in {self.count} parts"


def check_parts(order: Order, sizes: Sequence[int]) -> None:
    """Check that batches of these sizes can be made of parts.

    Raises:
        SpecError: they cannot.
    """
    for step in (step for step in order.steps if isinstance(step, PartShuffle)):
        check(
            step is order.steps[-1],
            f"shuffle(parts={step.count}) decides which rank reads what, so nothing may"
            f" change the order after it, got {order}; put take(), select() and"
            " repeat() before it, and leave `lengths` out of batch()",
        )
        uneven = [size for size in sizes if size % step.count]
        check(
            not uneven,
            f"shuffle(parts={step.count}) takes equally many samples of each part into"
            f" a batch, so global batches must be a multiple of {step.count}, got"
            f" {uneven[:1]}; change one of the two",
        )


def shuffled_by_part(
    order: Order, seed: int, count: int, within: GroupShuffle | None = None
) -> Order:
    """Return the order shuffled within parts.

    Args:
        order: the order to shuffle.
        seed: see `PartShuffle`.
        count: see `PartShuffle`.
        within: see `PartShuffle`.

    Raises:
        SpecError: there are fewer parts than one, or more than samples.
    """
    length = order.epoch_length
    check(
        type(count) is int and 1 <= count <= length,
        f"`parts` must be an int from 1 to {length}, the number of samples, got"
        f" {count!r}; a multiple of the number of ranks is usual",
    )
    return order.then(PartShuffle(length, checked_seed(seed), count, within))
