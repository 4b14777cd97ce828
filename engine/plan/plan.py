"""The plan: every batch of every epoch as a pure function of its number.

What a batch is like is a pure function of its place, never of a clock. A schedule
answers two questions. `at`: which setting applies to the batch that starts here?
`next_change`: until where, at least, does its global size hold? The second makes
lengths and random access exact without walking over the steps: a timeline has the
batches of all epochs as a few runs of equal size. Whatever does not change the number
of batches (image size, learning rate, momentum) may differ at every step without
announcing a change.

A place in the plan is saved as a state: O(1), plain JSON, and the same on every rank.

    {"version": 1, "plan": HASH, "facts": {NAME: int | str},
     "epoch": int, "batch": int, "step": int, "position": int}
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ...errors import SpecError, StateError, check
from .buckets import Buckets, BudgetTimeline
from .order import BatchPlan, Numbers, Order, Place, PlannedBatch, Rows, Shard, Span
from .shuffles import PartShuffle, check_parts

# Increased when states can no longer be read as before.
STATE_VERSION = 1

Facts = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch starts; after an epoch's last one, that epoch's end."""

    epoch: int
    batch: int
    """Batches of the epoch that are consumed."""
    step: int
    """Batches consumed over all epochs."""
    position: int
    """Positions of the epoch that are consumed."""


def read_state(
    state: Mapping[str, object], plan_hash: str, facts: Facts, *, override: bool = False
) -> Cursor:
    """Return the cursor in `state`; with `override`, whatever plan it belongs to.

    Raises:
        StateError: it is not a state, is damaged, or is of another version or plan.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be a dict, got {type(state).__name__}; {CURE}")
    version = state.get("version")
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"state `version` must be {STATE_VERSION}, got {version!r}; "
            "load it with the release of penstock that wrote it"
        )
    if state.get("plan") != plan_hash and not override:
        raise StateError(difference(state.get("facts"), facts))
    return Cursor(
        *(count(field.name, state.get(field.name)) for field in fields(Cursor))
    )


CURE = "pass what state_dict() returned, whole"


def count(name: str, value: object) -> int:
    """Return `value` if it is an int >= 0.

    Raises:
        StateError: it is not.
    """
    if type(value) is not int or value < 0:
        raise StateError(f"state `{name}` must be an int >= 0, got {value!r}; {CURE}")
    return value


def difference(saved: object, facts: Facts) -> str:
    """Describe how the plan of a state differs from this one."""
    differences = (
        [
            f"{name}: saved {saved.get(name)!r}, now {value!r}"
            for name, value in facts.items()
            if saved.get(name) != value
        ]
        if isinstance(saved, Mapping)
        else []
    )
    if not differences:
        return f"the state is damaged: its `plan` and `facts` do not agree; {CURE}"
    return (
        f"the state belongs to another plan ({'; '.join(differences)}); "
        "build the pipeline as it was when the state was saved, or continue this one "
        "from the same sample of the epoch with load_state_dict(state, override=True)"
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """What applies to one global batch.

    Raises:
        SpecError: a value is out of its range.
    """

    global_size: int
    """Samples over all ranks, >= 1."""
    image_size: int | None = None
    """Pixels per side, >= 1; None if the pipeline's own operators decide."""
    lr_mult: float = 1.0
    """Factor on the learning rate, >= 0."""
    momentum: float | None = None
    """0 to 1; None leaves the optimiser's own."""
    strength: float | None = None
    """Strength of augmentation, >= 0; None if nothing sets it."""

    def __post_init__(self) -> None:
        size, momentum, strength = self.image_size, self.momentum, self.strength
        for valid, rule in (
            (
                self.global_size >= 1,
                f"`global_size` must be >= 1, got {self.global_size}",
            ),
            (
                size is None or size >= 1,
                f"`image_size` must be >= 1 pixel or None, got {size}",
            ),
            (self.lr_mult >= 0, f"`lr_mult` must be >= 0, got {self.lr_mult}"),
            (
                momentum is None or 0 <= momentum <= 1,
                f"`momentum` must be 0 to 1 or None, got {momentum}",
            ),
            (
                strength is None or strength >= 0,
                f"`strength` must be >= 0 or None, got {strength}",
            ),
        ):
            check(valid, f"{rule}; correct the batch size or the schedule")


@dataclass(frozen=True, slots=True)
class Change:
    """The earliest place at which another global size may apply."""

    unit: Literal["samples", "steps"]
    """As `Place.samples` or `Place.step` counts. Epoch e is sample e * epoch_length."""
    value: int


class Schedule(Protocol):
    """Decides the setting of each batch.

    It is pure, the same on every rank, and changes the global size finitely many times.
    """

    def at(self, place: Place) -> Setting:
        """Return what applies to the batch that starts at `place`."""

    def next_change(self, place: Place) -> Change | None:
        """Return how far beyond `place` the global size holds; None: without end.

        The first batch at or after the change has the size that `at` returns there,
        even if it is the same. The next change is then requested from there.
        """

    def describe(self) -> Mapping[str, object]:
        """Return what identifies it: small, JSON, global sizes only."""


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """The same setting for every batch."""

    setting: Setting

    def at(self, place: Place) -> Setting:  # noqa: ARG002 - the same everywhere
        return self.setting

    def next_change(self, place: Place) -> Change | None:  # noqa: ARG002 - there is none
        return None

    def describe(self) -> Mapping[str, object]:
        setting = asdict(self.setting)
        if self.setting.strength is None:  # states from before it existed lack it
            del setting["strength"]
        return {"kind": "constant", **setting}


@dataclass(frozen=True, slots=True)
class SettingRun:
    """Batches of one global size: from one batch up to the next run, or without end.

    Attributes `epoch`, `batch`, `position` and `step` say where its first batch starts.
    """

    epoch: int
    batch: int
    position: int
    step: int
    size: int
    epoch_length: int
    here: int
    """Batches in its first epoch, from its first one to the epoch's end."""
    per_epoch: int
    """Batches in each later epoch."""

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, batch) of `step`."""
        beyond = step - self.step - self.here
        if beyond < 0:
            return self.epoch, self.batch + self.here + beyond
        epochs, batch = divmod(beyond, self.per_epoch)
        return self.epoch + 1 + epochs, batch

    def place(self, epoch: int, batch: int) -> Place:
        """Return where `batch` of `epoch` starts, or would start."""
        if epoch == self.epoch:
            ahead = batch - self.batch
            step, position = self.step + ahead, self.position + ahead * self.size
        else:
            before = self.here + (epoch - self.epoch - 1) * self.per_epoch
            step, position = self.step + before + batch, batch * self.size
        return Place(epoch, position, step, self.epoch_length)

    def span(self, epoch: int, batch: int) -> Span:
        """Return the positions of `batch` of `epoch`."""
        place = self.place(epoch, batch)
        return Span(
            place, min(place.position + self.size, self.epoch_length), self.size
        )

    def until(self, change: Change) -> tuple[int, int]:
        """Return (epoch, batch) of the first batch at or after `change`.

        The place after an epoch's last whole batch counts as well if samples are left
        there: they are dropped if this size stays, but a smaller batch may still fit.
        """
        if change.unit == "steps":
            # The batch after the last one before the change.
            epoch, batch = self.locate(change.value - 1)
            batch += 1
        else:
            epoch, position = divmod(change.value, self.epoch_length)
            first, start = (
                (self.batch, self.position) if epoch == self.epoch else (0, 0)
            )
            batch = first - (start - position) // self.size
        inside = self.place(epoch, batch).position < self.epoch_length
        return (epoch, batch) if inside else (epoch + 1, 0)


class Timeline:
    """All batches of all epochs under one schedule. Immutable; ignores ranks and tails.

    Args:
        schedule: provides sizes and where they change.
        epoch_length: positions in an epoch, >= 1.
        drop_last: whether an epoch ends with its last whole batch.

    Raises:
        SpecError: an epoch would have no batch, or the schedule contradicts itself.
    """

    def __init__(
        self, schedule: Schedule, epoch_length: int, *, drop_last: bool
    ) -> None:
        self.epoch_length = epoch_length
        self.drop_last = drop_last
        self.runs: list[SettingRun] = []
        place, batch = Place(0, 0, 0, epoch_length), 0
        while True:
            run = self._run(place, batch, schedule.at(place).global_size)
            self.runs.append(run)
            change = schedule.next_change(place)
            if change is None:
                break
            now = place.samples if change.unit == "samples" else place.step
            check(
                change.value > now,
                f"`next_change` must lie beyond {now} {change.unit}, got {change.value}"
                "; return the next change after `place`, or None if there is none",
            )
            epoch, batch = run.until(change)
            place = run.place(epoch, batch)
        self._steps = [run.step for run in self.runs]
        self._starts = [(run.epoch, run.batch) for run in self.runs]

    def find(self, step: int) -> tuple[Span, int]:
        """Return the positions of the global `step`, and its number in its epoch."""
        run = self.runs[bisect_right(self._steps, step) - 1]
        epoch, batch = run.locate(step)
        return run.span(epoch, batch), batch

    def place(self, epoch: int, batch: int) -> Place:
        """Return where `batch` of `epoch` starts, or where the last one ends."""
        place = self.run_at(epoch, batch).place(epoch, batch)
        return place._replace(position=min(place.position, self.epoch_length))

    def span(self, epoch: int, batch: int) -> Span:
        """Return the positions of `batch`, which `epoch` must have."""
        return self.run_at(epoch, batch).span(epoch, batch)

    def batch_of(self, epoch: int, position: int) -> int:
        """Return the batch of `epoch` that holds `position`, or the epoch's end."""
        steps = self.steps_in(epoch)
        after = bisect_right(
            range(steps), position, key=lambda b: self.span(epoch, b).place.position
        )
        batch = max(after - 1, 0)
        return batch if position < self.span(epoch, batch).stop else steps

    def run_at(self, epoch: int, batch: int) -> SettingRun:
        """Return the run, of batches of one global size, that holds this batch."""
        return self.runs[bisect_right(self._starts, (epoch, batch)) - 1]

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches in `epoch`."""
        last = self.runs[-1]
        if last.epoch > epoch:
            last = self.runs[bisect_right(self._starts, (epoch, math.inf)) - 1]
        return last.batch + last.here if last.epoch == epoch else last.per_epoch

    def _run(self, place: Place, batch: int, size: int) -> SettingRun:
        per_epoch = self._count(self.epoch_length, size)
        check(
            per_epoch,
            f"with drop_last=True an epoch of {self.epoch_length} samples has no batch"
            f" of {size} samples, the size from epoch {place.epoch} on; lower the batch"
            " size or pass drop_last=False",
        )
        return SettingRun(
            epoch=place.epoch,
            batch=batch,
            position=place.position,
            step=place.step,
            size=size,
            epoch_length=place.epoch_length,
            here=self._count(self.epoch_length - place.position, size),
            per_epoch=per_epoch,
        )

    def _count(self, samples: int, size: int) -> int:
        return samples // size if self.drop_last else -(-samples // size)


# What several ranks do with an epoch's short last batch, unless it is dropped. Each
# delivers its regular share; rows beyond the true ones repeat the batch from its start.
# With `pad_mask` they do not count, with `pad_repeat` they count like any other.
Tail = Literal["pad_mask", "pad_repeat"]

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
            or a schedule contradicts itself.
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
    # The last window read. It is never changed, only replaced by another in one
    # assignment, so at worst a race computes a window twice.
    _windows: list[IndexWindow] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        length, ranks = self.order.epoch_length, self.shard.size
        last = self.order.steps[-1] if self.order.steps else None
        timeline: Timeline | BudgetTimeline = (
            BudgetTimeline(last)
            if isinstance(last, Buckets) and last.tokens is not None
            else Timeline(self.schedule, length, drop_last=self.drop_last)
        )
        for run in timeline.runs:
            check(
                run.size >= ranks,
                f"the global batch must be >= {ranks}, one sample per rank, got "
                f"{run.size} (in force from epoch {run.epoch}); raise the batch size",
            )
        check_parts(self.order, [run.size for run in timeline.runs])
        facts = canonical({"plan_version": PLAN_VERSION, **self.facts()})
        digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        object.__setattr__(
            self, "_parts", last if isinstance(last, PartShuffle) else None
        )
        object.__setattr__(self, "timeline", timeline)
        object.__setattr__(self, "hash", digest)

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
        (place, stop, size), batch = self.timeline.find(step)
        setting, n_global = self._setting(place, size), stop - place.position
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
            last=batch == self.timeline.steps_in(place.epoch) - 1,
            n_global=n_global,
            n_rows=n_rows,
            n_local=n_local,
            loss_weight=n_local * ranks / n_global,
            image_size=setting.image_size,
            lr_mult=setting.lr_mult,
            momentum=setting.momentum,
            strength=setting.strength,
        )

    def batches(self, start: int, stop: int) -> Iterator[BatchPlan]:
        """Yield the batches of the global steps `start` to before `stop`.

        Under a constant schedule, all batches of an epoch except the last differ only
        in their place, so each costs a fifth of what `batch` takes.

        Raises:
            Exception: as `batch`.
        """
        constant = isinstance(self.schedule, ConstantSchedule) and isinstance(
            self.timeline, Timeline
        )
        while start < stop:
            plan = self.batch(start)
            yield plan
            alike = 0
            if constant and not plan.last:
                batches_left = self.timeline.steps_in(plan.epoch) - plan.batch - 2
                alike = min(stop - start - 1, batches_left)
            start += alike + 1
            (epoch, step, batch, position, *_), rest = plan, plan[4:]
            for ahead in range(1, alike + 1):
                place = step + ahead, batch + ahead, position + ahead * plan.n_global
                yield BatchPlan._make((epoch, *place, *rest))

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
            if batch.last and batch.batch:
                batch = self.batch(step - 1)
            size = "" if batch.image_size is None else f" of {batch.image_size} px"
            return f"batches of {batch.n_global}{size}"
        return ""

    def rows(self, plan: BatchPlan) -> Rows:
        """Return this rank's samples of a batch, `[n_rows]`, as read-only views."""
        for epoch, first_batch, bounds, rows in self._windows:
            at = plan.batch - first_batch
            if plan.epoch == epoch and 0 <= at < len(bounds) - 1:
                return rows.part(bounds[at], bounds[at + 1])
        # Those of the batches after it, too: they are cheapest in bulk.
        positions, ends = self._ahead(plan)
        rows = self.order.at(plan.epoch, positions)
        rows.indices.flags.writeable = rows.rounds.flags.writeable = False
        self._windows[:] = [IndexWindow(plan.epoch, plan.batch, (0, *ends), rows)]
        return rows.part(0, plan.n_rows)

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
        return {
            "version": STATE_VERSION,
            "plan": self.hash,
            "facts": self.facts(),
            **asdict(cursor),
        }

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
        if isinstance(self.timeline, BudgetTimeline) and cursor.step >= cursor.batch:
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

    def _ahead(self, plan: BatchPlan) -> tuple[Numbers, list[int]]:
        """Return the positions of `plan` and the batches after it, and their ends."""
        count = min(max(WINDOW_ROWS // plan.n_rows, 1), WINDOW_BATCHES)
        timeline, epoch = self.timeline, plan.epoch
        stop = min(plan.batch + count, timeline.steps_in(epoch))
        if (
            self.shard.size == 1
            and self._parts is None
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
        (_, start, *_), stop, size = self.timeline.span(epoch, batch)
        ranks, n_true = self.shard.size, stop - start
        # A single rank does not pad.
        n_dealt = n_true if ranks == 1 else max(size, ranks)
        first, n_rows = self.shard.share(n_dealt)
        rows = np.arange(first, first + n_rows, dtype=np.int64)
        if first + n_rows > n_true:
            rows %= n_true
        parts = self._parts
        return start + rows if parts is None else parts.positions(start, size, rows)


def canonical(value: object) -> str:
    """Return the unique JSON text of `value`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class IndexWindow(NamedTuple):
    """The rows of a few consecutive batches of one epoch."""

    epoch: int
    first_batch: int
    bounds: tuple[int, ...]
    """Batch `first_batch + i` has rows `bounds[i]` to `bounds[i + 1]`."""
    rows: Rows
