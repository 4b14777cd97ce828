"""A shuffle within parts, so that a reader needs only one part of the data each epoch.

The dataset is dealt into equal parts, once for all epochs. Each epoch shuffles within
them, and each global batch has equally many rows of each part, one part after another.
A rank's rows are adjacent in the batch, so it reads only its own parts, the same ones
in each epoch: a cache beside it holds just these, and no two ranks read a shard. The
parts are counted, not the ranks, so the batches are the same for any number of ranks.
MosaicML Streaming's canonical nodes are the same idea.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...errors import check, checked_seed
from .group_shuffle import Groups, GroupShuffle
from .order import Numbers, Order, Rows, Shuffle, by_key
from .shard import Shard

DEALING = -1
"""The round whose permutation deals the data into parts."""


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
            start = self._starts[part]
            found: Numbers = start + self._shuffles[part].at(key, positions - start)
            return found

        found = by_key(rows.rounds * self.count + parts, rows.indices, at)
        return Rows(self._dealt(found), rows.rounds)

    def positions(self, start: int, size: int, rows: Numbers) -> Numbers:
        """Return the positions of some rows of a batch.

        Args:
            start: samples of the epoch before the batch.
            size: planned size of the global batch, a multiple of the number of parts;
                an epoch's last one may have fewer samples.
            rows: numbers of rows, `int64 [N]`.
        """
        lengths = np.diff(self._starts, append=self.length)
        done = start // self.count
        taken = np.minimum(size // self.count, lengths - done)
        ends = np.cumsum(taken)
        part = np.searchsorted(ends, rows, side="right")
        found: Numbers = self._starts[part] + done + rows - (ends - taken)[part]
        return found

    def _dealt(self, positions: Numbers) -> Numbers:
        """Return the samples at positions of the parts, unshuffled."""
        if self.within is None:
            return Shuffle(self.length, self.seed).at(DEALING, positions)
        return self.within.samples(self.within.shuffled(DEALING), positions)

    def __str__(self) -> str:
        said = self.within or f"shuffle(seed={self.seed})"
        return f"{said} in {self.count} parts"


def check_parts(order: Order, sizes: Sequence[int]) -> None:
    """Check that batches of these sizes can be made of parts.

    Raises:
        SpecError: they cannot.
    """
    for step in order.steps:
        if not isinstance(step, PartShuffle):
            continue
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
