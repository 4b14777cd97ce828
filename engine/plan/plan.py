"""The plan: every batch of every epoch as a pure function of its number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import numpy as np

from ...errors import SpecError, StateError, check
from .batch_plan import BatchPlan
from .buckets import Buckets, BudgetTimeline
from .cursor import STATE_VERSION, Cursor, read_state
from .order import Numbers, Order, PlannedBatch, Rows
from .part_shuffle import PartShuffle, check_parts
from .shard import Shard
from .timeline import ConstantSchedule, Place, Schedule, Setting, Timeline

Tail = Literal["pad_mask", "pad_repeat"]
"""What several ranks do with an epoch's short last batch, unless it is dropped. Each
delivers its regular share; rows beyond the true ones repeat the batch from its start.
With `pad_mask` they do not count, with `pad_repeat` they count like any other."""

# About this many rows are looked up at a time. The fixed cost of 90 array operations is
# then a quarter of the total, and a jump elsewhere still costs well under 1 ms.
WINDOW_ROWS = 16384
WINDOW_BATCHES = 64
# Increased when the same facts come to mean another sequence of batches.
PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is loaded and when: immutable, O(1) in the dataset, safe in any thread.

    The global batches (except for padding), the hash and the state are the same on
    every rank and for every number of ranks. Only what depends on `shard` is not.

    Raises:
        SpecError: a global size is below the number of ranks, an epoch has no batch,
            the tail is unknown, or a schedule contradicts itself.
    """

    order: Order
    schedule: Schedule
    shard: Shard
    drop_last: bool = False
    tail: Tail = "pad_mask"
    timeline: Timeline | BudgetTimeline = field(init=False, repr=False, compare=False)
    hash: str = field(init=False, compare=False)
    """32 hex digits that identify everything that decides the global batches."""
    _parts: PartShuffle | None = field(init=False, repr=False, compare=False)
    _windows: list[IndexWindow] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The last window read. It is never changed, only replaced by another in one
    assignment, so at worst a race computes a window twice."""

    def __post_init__(self) -> None:
        check(
            self.tail in get_args(Tail),
            f"`tail` must be one of {get_args(Tail)}, got {self.tail!r}"
            "; 'pad_mask' is the default",
        )
        length, ranks = self.order.epoch_length, self.shard.size
        last = self.order.steps[-1] if self.order.steps else None
        timeline: Timeline | BudgetTimeline
        if isinstance(last, Buckets) and last.tokens is not None:
            timeline = BudgetTimeline(last)
        else:
            timeline = Timeline(self.schedule, length, drop_last=self.drop_last)
        for run in timeline.runs:
            check(
                run.size >= ranks,
                f"the global batch must be >= {ranks}, one sample per rank, got "
                f"{run.size} (in force from epoch {run.epoch}); raise the batch size",
            )
        check_parts(self.order, [run.size for run in timeline.runs])
        parts = last if isinstance(last, PartShuffle) else None
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "timeline", timeline)
        object.__setattr__(self, "hash", fingerprint(self.facts()))

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches in `epoch`, the same on every rank."""
        return self.timeline.steps_in(epoch)

    def first_step(self, epoch: int) -> int:
        """Return the global step of the first batch of `epoch`."""
        return self.timeline.place(epoch, 0).step

    def batch(self, step: int) -> BatchPlan:
        """Return the batch of the global `step`, counted over epochs from 0.

        Raises:
            IndexError: `step` is below 0.
            SpecError: the schedule contradicts itself there.
            Exception: whatever a function of the schedule raises.
        """
        if step < 0:
            raise IndexError(f"`step` must be >= 0, got {step}")
        span, batch = self.timeline.find(step)
        place, size, n_global = span.place, span.size, span.n_true
        setting = self._setting(place, size)
        ranks = self.shard.size
        n_local = n_rows = n_global
        if ranks > 1:
            size = max(size, ranks)  # with long samples, there may be fewer than ranks
            first, n_rows = self.shard.share(size)
            n_local = min(max(n_global - first, 0), n_rows)
            if self.tail == "pad_repeat":
                n_global, n_local = size, n_rows
        return BatchPlan(
            place.epoch,
            place.step,
            batch,
            place.position,
            batch == self.timeline.steps_in(place.epoch) - 1,
            n_global,
            n_rows,
            n_local,
            n_local * ranks / n_global,
            setting.image_size,
            setting.lr_mult,
            setting.momentum,
            strength=setting.strength,
        )

    def batches(self, start: int, stop: int) -> Iterator[BatchPlan]:
        """Yield the batches of the global steps `start` to before `stop`.

        Under a constant schedule, all batches of an epoch except the last differ only
        in their place, so each costs a fifth of what `batch` takes.

        Raises:
            Exception: as `batch`.
        """
        while start < stop:
            plan = self.batch(start)
            yield plan
            alike = self._alike_after(plan, stop - start - 1)
            start += alike + 1
            (epoch, step, batch, position, *_), shared = plan, plan[4:]
            for ahead in range(1, alike + 1):
                place = step + ahead, batch + ahead, position + ahead * plan.n_global
                yield BatchPlan._make((epoch, *place, *shared))

    def _alike_after(self, plan: BatchPlan, most: int) -> int:
        """Return how many batches after one surely differ from it only in place."""
        constant = isinstance(self.schedule, ConstantSchedule)
        if plan.last or not constant or isinstance(self.timeline, BudgetTimeline):
            return 0
        return min(most, self.timeline.steps_in(plan.epoch) - plan.batch - 2)

    def regime(self, step: int) -> str:
        """Return what loading the batch of a global step is like.

        An epoch's short last batch is like those before it. Batches with a token
        budget are all alike. Where a function of the schedule raises, nothing is known:
        the batch, if it comes to it, raises that, too.
        """
        if isinstance(self.timeline, BudgetTimeline):
            return ""
        with suppress(Exception):
            batch = self.batch(step)
            before = batch.last and batch.batch
            return (self.batch(step - 1) if before else batch).regime
        return ""

    def rows(self, plan: BatchPlan) -> Rows:
        """Return this rank's samples of a batch, `[n_rows]`, as read-only views."""
        for window in self._windows:
            if (found := window.find(plan)) is not None:
                return found
        window = self._window(plan)
        self._windows[:] = [window]
        return window.rows.part(0, plan.n_rows)

    def planned(self, number: int) -> PlannedBatch:
        """Return the batch of a global step with its samples.

        Raises:
            Exception: as `batch`.
        """
        plan = self.batch(number)
        return PlannedBatch(plan, self.rows(plan))

    def start(self, epoch: int) -> Cursor:
        """Return the cursor before the first batch of `epoch`."""
        return self._cursor(epoch, 0)

    def cursor_after(self, plan: BatchPlan) -> Cursor:
        """Return the cursor after this batch, within the same epoch."""
        return self._cursor(plan.epoch, plan.batch + 1)

    def facts(self) -> dict[str, int | str]:
        """Return the facts behind the hash, in words for an error message."""
        return {
            "length": self.order.epoch_length,
            "order": str(self.order),
            "schedule": canonical(self.schedule.describe()),
            "drop_last": int(self.drop_last),
            "tail": self.tail,
        }

    def state(self, cursor: Cursor) -> dict[str, object]:
        """Return `cursor` as O(1) JSON, the same on every rank."""
        known = {"version": STATE_VERSION, "plan": self.hash, "facts": self.facts()}
        return {**known, **asdict(cursor)}

    def restore(self, state: Mapping[str, object], *, override: bool = False) -> Cursor:
        """Return the cursor in `state`, on any number of ranks, in O(1).

        Args:
            state: a result of `state`.
            override: accept one of another plan, too, and continue at this plan's batch
                that holds the next sample: a few samples may repeat, none is lost.

        Raises:
            StateError: it is not a state, is of another version or plan, or damaged.
        """
        cursor = read_state(state, self.hash, self.facts(), override=override)
        if override and state.get("plan") != self.hash:
            batch = self.timeline.batch_of(cursor.epoch, cursor.position)
            return self._cursor(cursor.epoch, batch)
        known = cursor.step >= cursor.batch
        if isinstance(self.timeline, BudgetTimeline) and known:
            self.timeline.begin(cursor.epoch, cursor.step - cursor.batch)
        steps = self.timeline.steps_in(cursor.epoch)
        if cursor.batch > steps or cursor != self._cursor(cursor.epoch, cursor.batch):
            raise StateError(
                f"the state is damaged: no batch of this plan starts at {cursor}; "
                "load an earlier state"
            )
        return cursor

    def _cursor(self, epoch: int, batch: int) -> Cursor:
        place = self.timeline.place(epoch, batch)
        return Cursor(epoch, batch, place.step, place.position)

    def _setting(self, place: Place, size: int) -> Setting:
        setting = self.schedule.at(place)
        has_budget = isinstance(self.timeline, BudgetTimeline)
        if setting.global_size != size and not has_budget:
            raise SpecError(
                f"the schedule's at() gives a global batch size of"
                f" {setting.global_size} at {place}, but its next_change() said that"
                f" the size is still {size} there; next_change() must return every"
                " place where at() changes the size"
            )
        return setting

    def _window(self, plan: BatchPlan) -> IndexWindow:
        """Read the rows of `plan` and the batches after it: cheapest in bulk."""
        positions, ends = self._ahead(plan)
        rows = self.order.at(plan.epoch, positions)
        rows.indices.flags.writeable = False
        rows.rounds.flags.writeable = False
        return IndexWindow(plan.epoch, plan.batch, (0, *ends), rows)

    def _ahead(self, plan: BatchPlan) -> tuple[Numbers, list[int]]:
        """Return the positions of `plan` and the batches after it, and their ends."""
        count = min(max(WINDOW_ROWS // plan.n_rows, 1), WINDOW_BATCHES)
        timeline, epoch = self.timeline, plan.epoch
        stop = min(plan.batch + count, timeline.steps_in(epoch))
        alone = self.shard.size == 1 and self._parts is None
        if (
            alone
            and isinstance(timeline, Timeline)
            and timeline.run_at(epoch, plan.batch) is timeline.run_at(epoch, stop - 1)
        ):
            # One rank's batches of one size leave no gap.
            end = timeline.span(epoch, stop - 1).stop - plan.start
            positions = np.arange(plan.start, plan.start + end, dtype=np.int64)
            return positions, [*range(plan.n_rows, end, plan.n_rows), end]
        parts = [self._positions(epoch, batch) for batch in range(plan.batch, stop)]
        return np.concatenate(parts), list(accumulate(part.size for part in parts))

    def _positions(self, epoch: int, batch: int) -> Numbers:
        span = self.timeline.span(epoch, batch)
        ranks = self.shard.size
        # A single rank does not pad.
        dealt = span.n_true if ranks == 1 else max(span.size, ranks)
        first, n_rows = self.shard.share(dealt)
        start = span.place.position
        rows = np.arange(first, first + n_rows, dtype=np.int64)
        if first + n_rows > span.n_true:
            rows %= span.n_true
        if self._parts is not None:
            return self._parts.positions(start, span.size, rows)
        return start + rows


def canonical(value: object) -> str:
    """Return the unique JSON text of `value`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def fingerprint(facts: Mapping[str, int | str]) -> str:
    """Return 32 hex digits that identify `facts`."""
    text = canonical({"plan_version": PLAN_VERSION, **facts})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class IndexWindow(NamedTuple):
    """The rows of a few consecutive batches of one epoch."""

    epoch: int
    first_batch: int
    bounds: tuple[int, ...]
    """Batch `first_batch + i` has rows `bounds[i]` to `bounds[i + 1]`."""
    rows: Rows

    def find(self, plan: BatchPlan) -> Rows | None:
        """Return the rows of a batch, or None if it is not in the window."""
        place = plan.batch - self.first_batch
        if plan.epoch != self.epoch or not 0 <= place < len(self.bounds) - 1:
            return None
        return self.rows.part(self.bounds[place], self.bounds[place + 1])
