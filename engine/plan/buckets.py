"""Batches by cost: samples of similar length together, up to a number of tokens.

An epoch's order is divided into windows of consecutive positions. Within a window the
samples are sorted by length and cut into batches, and the batches are shuffled. All of
this depends only on the order, the lengths and the number of the window: ranks need not
communicate, and a state needs no more than the number of samples consumed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ...errors import SpecError, check
from .order import (
    Numbers,
    Order,
    Place,
    Recent,
    Rows,
    Shuffle,
    Span,
    by_key,
    drawn_order,
    sealed,
)
from .shuffles import GroupShuffle


@dataclass(frozen=True, slots=True)
class Lengths:
    """The length of each sample of the dataset; compared and printed by its digest."""

    values: Numbers = field(compare=False)
    """`int64 [N]`, each >= 1, read-only."""
    digest: str

    @classmethod
    def of(cls, lengths: Any) -> Lengths:
        """Copy `lengths`, `int [N]`; a length of 0 counts as 1.

        Raises:
            SpecError: they are not integers in one dimension, or one is below 0.
        """
        array = np.asarray(lengths)
        check(
            array.ndim == 1 and array.size and array.dtype.kind in "iu",
            f"`lengths` must be integers [N], one per sample of the dataset, got"
            f" {array.dtype} {list(array.shape)}; count the tokens of each sample once,"
            " and keep the array beside the data",
        )
        check(
            int(array.min()) >= 0,
            f"`lengths` must be >= 0, got {array.min()} for sample {array.argmin()}"
            "; count the tokens of each sample",
        )
        values = np.maximum(array, 1).astype(np.int64)
        return cls(values, sealed(values))

    def __len__(self) -> int:
        return self.values.size

    def __repr__(self) -> str:
        return f"<{len(self)} lengths>"


class PlannedWindow(NamedTuple):
    """The arrangement of a window's samples."""

    places: Numbers
    """The position within the window at each place, `int64 [n]`."""
    ends: Numbers
    """Where each batch ends within the window, `int64 [batches]`."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The last step of an order: samples of a window sorted into batches.

    Args:
        before: the order so far.
        lengths: lengths of the dataset's samples.
        size: samples of a global batch; None means as many as `tokens` allows.
        tokens: limit for one part of a global batch, padded to its longest sample.
        parts: separately padded parts of a global batch: the number of ranks, or 1.
        window: roughly how many global batches are sorted together.

    Raises:
        SpecError: there is not one length per sample, or a sample is too long.
    """

    before: Order
    lengths: Lengths
    size: int | None
    tokens: int | None
    parts: int
    window: int
    span: int = field(init=False, compare=False)
    """Number of positions in a window."""
    # A prefetching engine moves between a few windows.
    _windows: Recent[PlannedWindow] = field(
        default_factory=lambda: Recent(4),
        init=False,
        repr=False,
        compare=False,
    )

    def __post_init__(self) -> None:
        check(
            len(self.lengths) == self.before.length,
            f"`lengths` must have one number per sample, got {len(self.lengths)} for"
            f" {self.before.length} samples; pass those of the dataset as it is read,"
            " before any select() or take()",
        )
        values = self.lengths.values
        if self.tokens is not None and int(values.max()) > self.tokens:
            raise SpecError(
                f"a batch may have {self.tokens} tokens, but sample {values.argmax()}"
                f" alone has {values.max()}; raise the number, shorten the sample, or"
                " leave it out with select()"
            )
        usual = self.size  # about as many samples as a global batch has
        if usual is None:
            assert self.tokens is not None
            usual = self.parts * max(1, int(self.tokens / float(values.mean())))
        object.__setattr__(self, "span", max(1, self.window * usual))

    @property
    def length(self) -> int:
        return self.before.epoch_length

    def trace(self, rows: Rows) -> Rows:
        """Return the positions in the previous order of those at `rows`."""

        def at(window: int, positions: Numbers) -> Numbers:
            start = window * self.span
            arrangement = self.planned(int(rows.rounds[0]), window)
            return start + arrangement.places[positions - start]

        return Rows(by_key(rows.indices // self.span, rows.indices, at), rows.rounds)

    def planned(self, epoch: int, window: int) -> PlannedWindow:
        """Return the batches of a window; safe in any thread."""
        return self._windows.get((epoch, window), lambda: self._plan(epoch, window))

    def _plan(self, epoch: int, window: int) -> PlannedWindow:
        start = window * self.span
        stop = min(start + self.span, self.length)
        lengths = self.lengths.values[self.before.rows(epoch, start, stop).indices]
        places = np.argsort(-lengths, kind="stable")
        ends = self._cut(lengths[places])
        seeds = [
            step.seed
            for step in self.before.steps
            if isinstance(step, Shuffle | GroupShuffle)
        ]
        if not seeds:
            return PlannedWindow(places, ends)
        # The batches in another order; a short last one stays where it is.
        count = ends.size if self.size is None else ends.size - 1
        key = f"penstock buckets, seed {seeds[-1]}, epoch {epoch}, window {window}"
        order = np.append(drawn_order(key, count), np.arange(count, ends.size))
        starts = np.append(0, ends[:-1])
        batches = [places[starts[batch] : ends[batch]] for batch in order]
        return PlannedWindow(np.concatenate(batches), np.cumsum((ends - starts)[order]))

    def _cut(self, lengths: Numbers) -> Numbers:
        """Return where the batches end; `lengths` descend, so its first counts."""
        n = lengths.size
        if self.size is not None:
            return np.append(np.arange(self.size, n, self.size), n)
        assert self.tokens is not None
        ends = [0]
        while ends[-1] < n:
            count = self.parts * (self.tokens // int(lengths[ends[-1]]))
            ends.append(min(ends[-1] + count, n))
        return np.array(ends[1:], np.int64)

    def __str__(self) -> str:
        size = f"size={self.size}" if self.tokens is None else f"tokens={self.tokens}"
        parts = f", parts={self.parts}" if self.parts > 1 else ""
        return (
            f"buckets({size}{parts}, window={self.window}, {len(self.lengths)} lengths,"
            f" blake2b {self.lengths.digest})"
        )


class BudgetTimeline:
    """All batches of all epochs if each has as many samples as its tokens allow.

    An epoch's batches are counted window by window when the epoch is first asked for.
    Any thread may ask: at worst, two threads count the same.
    """

    # No batch's size is known in advance.
    runs: tuple[Any, ...] = ()

    def __init__(self, buckets: Buckets) -> None:
        self.epoch_length, self._buckets = buckets.length, buckets
        self._counts: Recent[tuple[int, ...]] = Recent(3)
        # By epoch: batches before it.
        self._first: dict[int, int] = {0: 0}

    def find(self, step: int) -> tuple[Span, int]:
        """Return the positions of the global `step`, and its number in its epoch."""
        epoch = max(e for e, first in [*self._first.items()] if first <= step)
        while self.first_step(epoch + 1) <= step:
            epoch += 1
        batch = step - self.first_step(epoch)
        return self.span(epoch, batch), batch

    def first_step(self, epoch: int) -> int:
        """Return the number of batches before `epoch`."""
        first_steps = self._first  # a state may replace them meanwhile
        known_epoch = max(number for number in [*first_steps] if number <= epoch)
        for number in range(known_epoch, epoch):
            first_steps[number + 1] = first_steps[number] + self.steps_in(number)
        return first_steps[epoch]

    def begin(self, epoch: int, first_step: int) -> None:
        """Accept a state's number of batches before its epoch, in place of another's.

        Counting them would take as long as planning all those epochs.
        """
        self._first = {epoch: first_step, 0: 0}

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches in `epoch`."""
        return self._before(epoch)[-1]

    def place(self, epoch: int, batch: int) -> Place:
        """Return where `batch` of `epoch` starts, or where the last one ends."""
        if batch < self.steps_in(epoch):
            return self.span(epoch, batch).place
        step, end = self.first_step(epoch) + batch, self.epoch_length
        return Place(epoch, end, step, end)

    def span(self, epoch: int, batch: int) -> Span:
        """Return the positions of `batch`, one that `epoch` has."""
        before = self._before(epoch)
        window = bisect_right(before, batch) - 1
        number, begin = batch - before[window], window * self._buckets.span
        ends = self._buckets.planned(epoch, window).ends
        start = begin + int(ends[number - 1]) if number else begin
        stop = begin + int(ends[number])
        place = Place(epoch, start, self.first_step(epoch) + batch, self.epoch_length)
        return Span(place, stop, stop - start)

    def batch_of(self, epoch: int, position: int) -> int:
        """Return the batch of `epoch` that holds `position`, or the epoch's end."""
        if position >= self.epoch_length:
            return self.steps_in(epoch)
        window, offset = divmod(position, self._buckets.span)
        ends = self._buckets.planned(epoch, window).ends
        return self._before(epoch)[window] + int(np.searchsorted(ends, offset, "right"))

    def _before(self, epoch: int) -> tuple[int, ...]:
        """Return the batches before each window of `epoch`, and after the last one."""

        def count() -> tuple[int, ...]:
            plan = self._buckets.planned
            windows = range(-(-self.epoch_length // self._buckets.span))
            sizes = (plan(epoch, window).ends.size for window in windows)
            return tuple(accumulate(sizes, initial=0))

        return self._counts.get(epoch, count)
