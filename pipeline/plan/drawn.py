"""A plan that is drawn, not computed: batches as torch's samplers give them.

Who draws is the trainer's thread, as in torch, and a bounded number of batches ahead of
what is consumed; workers look up what is drawn. The order is that of one epoch alone:
a sampler may say anything in the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ..errors import SpecError
from .batch_plan import BatchPlan
from .cursor import Cursor
from .order import Rows

__all__ = ["DrawnPlan"]

AHEAD = 128
"""Batches drawn ahead of the one the trainer takes next."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class DrawnPlan:
    """The batches of the epoch under way.

    `begin` and `draw` belong to the trainer's thread, `batch` and `rows` to any. Steps
    go on over all epochs, as workers do.
    """

    def __init__(self) -> None:
        self._drawn: dict[int, tuple[BatchPlan, Rows]] = {}
        """By step; an entry is made once, and taken out when nobody asks any more."""
        self._kept = 0
        """The first step that is in `_drawn`, if any is."""
        self._batches: Iterator[Iterable[int]] = iter(())
        self._epoch = self._first = self._position = self._seed = 0
        self.exhausted = True
        """Whether the samplers have no more for this epoch."""
        self.stop = 0
        """The first step that is not drawn yet."""

    def begin(
        self, epoch: int, batches: Iterator[Iterable[int]], seed: int, skip: int = 0
    ) -> Cursor:
        """Draw another epoch from here on; return where its first batch starts.

        Args:
            epoch: its number.
            batches: indices into the data set, a batch each.
            seed: of the epoch: keys the random streams of its samples.
            skip: batches that are consumed already.
        """
        self._drawn.clear()
        self._batches, self._epoch, self._seed = batches, epoch, seed
        self._position = sum(len(list(each)) for each in islice(batches, skip))
        self._first, self._kept = self.stop - skip, self.stop
        self.exhausted = False
        cursor = Cursor(epoch, skip, self.stop, self._position)
        self.draw(self.stop)
        return cursor

    def draw(self, head: int) -> bool:
        """Draw what may be wanted while the trainer is at step `head`; True if any."""
        before = self.stop
        while not self.exhausted and self.stop < head + AHEAD:
            indices = next(self._batches, None)
            if indices is None:
                self.exhausted = True
            else:
                self._add(_numbers(indices))
        while self._kept < head - 1:
            self._drawn.pop(self._kept, None)
            self._kept += 1
        return self.stop > before

    def regime(self, step: int) -> str:
        """Return that of a batch; empty where it is not drawn."""
        found = self._drawn.get(step)
        return found[0].regime if found is not None else ""

    def _add(self, indices: NDArray[np.int64]) -> None:
        count = len(indices)
        if count == 0:
            text = (
                f"batch {self.stop - self._first} of the batch sampler is empty; it"
                " must name at least one sample"
            )
            raise SpecError(text)
        plan = BatchPlan(
            epoch=self._epoch,
            step=self.stop,
            batch=self.stop - self._first,
            start=self._position,
            last=False,
            n_global=count,
            n_rows=count,
            n_local=count,
            loss_weight=1.0,
            image_size=None,
            lr_mult=1.0,
            momentum=None,
        )
        positions = np.arange(self._position, self._position + count)
        self._drawn[self.stop] = plan, Rows(indices, seeds(self._seed, positions))
        self._position += count
        self.stop += 1

    # What an engine asks of any plan

    def batch(self, step: int) -> BatchPlan:
        """Return the batch of a step that is drawn."""
        return self._drawn[step][0]

    def rows(self, plan: BatchPlan) -> Rows:
        """Return its samples; `rounds` are the seeds of their random streams."""
        return self._drawn[plan.step][1]

    def first_step(self, epoch: int) -> int:
        """Return where the epoch now drawn ends, as far as is known."""
        assert epoch == self._epoch + 1
        return self.stop

    def cursor_after(self, plan: BatchPlan) -> Cursor:
        """Return the cursor once this batch is consumed."""
        end = plan.start + plan.n_rows
        return Cursor(plan.epoch, plan.batch + 1, plan.step + 1, end)


def _numbers(indices: Iterable[int]) -> NDArray[np.int64]:
    """Return the indices of a batch, `int64 [N]`."""
    try:
        return np.fromiter(map(operator.index, indices), np.int64)
    except TypeError as error:
        raise SpecError(
            f"a sampler must draw ints for penstock to load them ({error}); with"
            " DataLoader(sample_seeding=False) torch's own workers load anything"
        ) from error


def seeds(seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a seed, >= 0, for each position of an epoch, `int64 [N]`.

    The mixer of SplitMix64 (G. Steele, D. Lea, C. Flood: "Fast splittable pseudorandom
    number generators", OOPSLA 2014): neighbours have nothing in common.
    """
    mixed = (
        np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(1)).astype(np.int64)
