"""Batches by cost: samples of similar length together, up to a number of tokens.

An epoch's order is divided into windows of consecutive positions. Within a window the
samples are sorted by length and cut into batches, and the batches are shuffled. All of
this depends only on the order, the lengths and the number of the window: ranks need not
communicate, and a state needs no more than the number of samples consumed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import SpecError, check
from .group_shuffle import GroupShuffle
from .order import Order, Rows, Shuffle
from .timeline import Place, Span

KEPT_WINDOWS = 4
"""Recently planned windows that are kept: a prefetching engine moves between a few."""
KEPT_EPOCHS = 3
STRIDE = 8
"""Windows whose batches are counted at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The length of each sample of the dataset; compared and printed by its digest."""

    values: NDArray[np.int64] = field(repr=False)
    """`int64 [N]`, each >= 1, read-only."""
    digest: str

    @classmethod
    def of(cls, lengths: Any) -> Lengths:
        """Copy `lengths`, `int [N]`; a length of 0 counts as 1.

        Raises:
            SpecError: they are not integers in one dimension, or one is below 0.
        """
        given = np.asarray(lengths)
        check(
            given.ndim == 1 and given.size and given.dtype.kind in "iu",
            f"`lengths` must be integers [N], one per sample of the dataset, got"
            f" {given.dtype} {list(given.shape)}; count the tokens of each sample once,"
            " and keep the array beside the data",
        )
        check(
            int(given.min()) >= 0,
            f"`lengths` must be >= 0, got {given.min()} for sample {given.argmin()}"
            "; count the tokens of each sample",
        )
        values = np.maximum(given, 1).astype(np.int64)
        values.flags.writeable = False
        digest = hashlib.blake2b(values.astype("<i8").tobytes(), digest_size=8)
        return cls(values, digest.hexdigest())

    def __len__(self) -> int:
        return self.values.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<{len(self)} lengths>"


class PlannedWindow(NamedTuple):
    """The arrangement of a window's samples."""

    places: NDArray[np.int64]
    """The position within the window at each place, `int64 [n]`."""
    ends: NDArray[np.int64]
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
    _planned: list[dict[tuple[int, int], PlannedWindow]] = field(
        init=False, repr=False, compare=False
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
        object.__setattr__(self, "span", max(1, self.window * self._usual))
        object.__setattr__(self, "_planned", [{}])

    @property
    def _usual(self) -> int:
        """Approximate number of samples in a global batch."""
        if self.size is not None:
            return self.size
        assert self.tokens is not None
        mean = float(self.lengths.values.mean())
        return self.parts * max(1, int(self.tokens / mean))

    @property
    def length(self) -> int:
        return self.before.epoch_length

    @property
    def windows(self) -> int:
        """Number of windows in an epoch."""
        return -(-self.length // self.span)

    def trace(self, rows: Rows) -> Rows:
        """Return the positions in the previous order of those at `rows`."""
        found = np.empty_like(rows.indices)
        numbers = rows.indices // self.span
        for number in np.unique(numbers):
            here = numbers == number
            planned = self.planned(int(rows.rounds[0]), int(number))
            start = number * self.span
            found[here] = start + planned.places[rows.indices[here] - start]
        return Rows(found, rows.rounds)

    def planned(self, epoch: int, window: int) -> PlannedWindow:
        """Return the batches of a window; safe in any thread."""
        known = self._planned[0]
        found = known.get((epoch, window))
        if found is None:
            found = self._plan(epoch, window)
            kept = [*known.items()][1 - KEPT_WINDOWS :]
            self._planned[0] = dict(kept) | {(epoch, window): found}
        return found

    def _plan(self, epoch: int, window: int) -> PlannedWindow:
        start = window * self.span
        stop = min(start + self.span, self.length)
        rows = self.before.rows(epoch, start, stop)
        lengths = self.lengths.values[rows.indices]
        places = np.argsort(-lengths, kind="stable")
        ends = self._cut(lengths[places])
        steps = self.before.steps
        seeds = [s.seed for s in steps if isinstance(s, (Shuffle, GroupShuffle))]
        if not seeds:
            return PlannedWindow(places, ends)
        key = f"penstock buckets, seed {seeds[-1]}, epoch {epoch}, window {window}"
        return shuffled(places, ends, key, short_last=self.size is not None)

    def _cut(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
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


def bucketed(
    order: Order,
    lengths: Lengths,
    *,
    size: int | None,
    tokens: int | None,
    parts: int,
    window: int,
) -> Order:
    """Return an order with its samples sorted into batches: see `Buckets`.

    Raises:
        SpecError: there is not one length per sample, or a sample is too long.
    """
    step = Buckets(order, lengths, size, tokens, parts, window)
    return order.then(step)


def budget_of(order: Order) -> Buckets | None:
    """Return the step that cuts an order into batches by tokens, or None."""
    last = order.steps[-1] if order.steps else None
    found = isinstance(last, Buckets) and last.tokens is not None
    return cast("Buckets", last) if found else None


def shuffled(
    places: NDArray[np.int64], ends: NDArray[np.int64], key: str, *, short_last: bool
) -> PlannedWindow:
    """Return a window with its batches in another order.

    Args:
        places: places of its samples, batch by batch.
        ends: ends of its batches.
        key: determines the order.
        short_last: leave the last batch where it is.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    count = ends.size - 1 if short_last else ends.size
    words = np.random.Philox(key=np.frombuffer(digest, "<u8")).random_raw(count)
    order = np.append(np.argsort(words, kind="stable"), range(count, ends.size))
    order = order.astype(np.int64)
    starts = np.append(0, ends[:-1])
    moved = [places[starts[batch] : ends[batch]] for batch in order]
    return PlannedWindow(np.concatenate(moved), np.cumsum((ends - starts)[order]))


class BatchRun(NamedTuple):
    """One batch, as a run of its own."""

    at: Place
    size: int
    """Samples over all ranks."""

    def place(self, epoch: int, batch: int) -> Place:  # noqa: ARG002 it has but one
        """Return where it starts."""
        return self.at


class BudgetTimeline:
    """All batches of all epochs if each has as many samples as its tokens allow.

    Batches are counted window by window, up to the requested one, so requests near the
    previous one cost little. Any thread may ask: counts are replaced as a whole, and at
    worst counted twice.
    """

    drop_last = False
    runs: tuple[Any, ...] = ()
    """Empty: no batch's size is known in advance."""

    def __init__(self, buckets: Buckets) -> None:
        self.epoch_length = buckets.length
        self._buckets = buckets
        self._counted: dict[int, tuple[int, ...]] = {}
        """By epoch: batches before each window counted so far, and after the last."""
        self._first: dict[int, int] = {0: 0}
        """By epoch: batches before it."""

    def find(self, step: int) -> tuple[BatchRun, int, int]:
        """Return the batch, its epoch and its number there, of the global `step`."""
        epoch = max(e for e, first in [*self._first.items()] if first <= step)
        while not self._has(epoch, step - self._first[epoch]):
            epoch += 1
            self.first_step(epoch)
        batch = step - self._first[epoch]
        return self.run_at(epoch, batch), epoch, batch

    def first_step(self, epoch: int) -> int:
        """Return the number of batches before `epoch`."""
        known = max(each for each in [*self._first] if each <= epoch)
        for each in range(known, epoch):
            self._first[each + 1] = self._first[each] + self.steps_in(each)
        return self._first[epoch]

    def begin(self, epoch: int, first_step: int) -> None:
        """Accept a state's number of batches before its epoch.

        Counting them would take as long as planning all those epochs.
        """
        self._first.setdefault(epoch, first_step)

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches in `epoch`."""
        return self._count(epoch, self._buckets.windows)[-1]

    def place(self, epoch: int, batch: int) -> Place:
        """Return where `batch` of `epoch` starts, or where the last one ends."""
        step = self.first_step(epoch) + batch
        if not self._has(epoch, batch):
            return Place(epoch, self.epoch_length, step, self.epoch_length)
        window, number, ends = self._window_of(epoch, batch)
        start = window * self._buckets.span
        start += int(ends[number - 1]) if number else 0
        return Place(epoch, start, step, self.epoch_length)

    def span(self, epoch: int, batch: int) -> Span:
        """Return the positions of `batch`, one that `epoch` has."""
        place = self.place(epoch, batch)
        window, number, ends = self._window_of(epoch, batch)
        stop = window * self._buckets.span + int(ends[number])
        return Span(place, stop, stop - place.position)

    def run_at(self, epoch: int, batch: int) -> BatchRun:
        """Return `batch` of `epoch`."""
        span = self.span(epoch, batch)
        return BatchRun(span.place, span.n_true)

    def even(self, epoch: int, first: int, last: int) -> bool:  # noqa: ARG002 see Timeline
        """Whether two batches of an epoch, and all between, share a global size."""
        return first == last

    def batch_of(self, epoch: int, position: int) -> int:
        """Return the batch of `epoch` that holds `position`, or the epoch's end."""
        if position >= self.epoch_length:
            return self.steps_in(epoch)
        window, offset = divmod(position, self._buckets.span)
        before = self._count(epoch, window + 1)[window]
        ends = self._buckets.planned(epoch, window).ends
        return before + int(np.searchsorted(ends, offset, side="right"))

    def _has(self, epoch: int, batch: int) -> bool:
        """Whether `epoch` has this batch; counts no further than needed."""
        return batch < self._counted_to(epoch, batch)[-1]

    def _counted_to(self, epoch: int, batch: int) -> tuple[int, ...]:
        """Return the batches before each window, up to the one that has this batch."""
        counted = self._counted.get(epoch, (0,))
        while counted[-1] <= batch and len(counted) <= self._buckets.windows:
            counted = self._count(epoch, len(counted) - 1 + STRIDE)
        return counted

    def _window_of(self, epoch: int, batch: int) -> tuple[int, int, NDArray[np.int64]]:
        """Return the window of a batch, its number there, and the batches' ends."""
        counted = self._counted_to(epoch, batch)
        window = bisect_right(counted, batch) - 1
        ends = self._buckets.planned(epoch, window).ends
        return window, batch - counted[window], ends

    def _count(self, epoch: int, windows: int) -> tuple[int, ...]:
        """Return the batches before each window, at least up to that number of them."""
        counted = [*self._counted.get(epoch, (0,))]
        wanted = min(windows, self._buckets.windows)
        while len(counted) <= wanted:
            planned = self._buckets.planned(epoch, len(counted) - 1)
            counted.append(counted[-1] + planned.ends.size)
        kept = [*self._counted.items()][1 - KEPT_EPOCHS :]
        self._counted = {**dict(kept), epoch: tuple(counted)}
        return tuple(counted)
