"""The monitor: reads an engine's instruments, and makes windows of what it read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...cache.statistics import CacheStatistics
from ..core.connector import EngineLock
from ..plan import BatchPlan, DrawnPlan, Plan
from ..recipe import Recipe
from ..segment import Segment
from .gil import GilProbe
from .metrics import GaugeReading, PartReading, WorkerReading
from .observation import (
    ConnectorObservation,
    ContentionObservation,
    Move,
    Observation,
    PartObservation,
    SegmentObservation,
    TrainerObservation,
    ratio,
)

__all__ = [
    "Instruments",
    "Monitor",
    "Reading",
    "SegmentReading",
    "TrainerMeter",
    "Window",
    "difference",
    "unmeasured",
]


PROBE_AGAIN_S = 60.0
"""What the GIL probe has seen is believed for so long."""
MIN_WAIT = 0.05
"""Share of its time that the trainer waits from which the GIL is worth a look."""


@dataclass(frozen=True, slots=True)
class SegmentReading:
    """One segment's totals since the engine began."""

    name: str
    queue_name: str
    executor: str
    num_parallel_workers: int
    prefetch_size: int
    total: WorkerReading
    workers: tuple[WorkerReading, ...]
    """One a worker now alive."""
    output: GaugeReading
    row_bytes: float
    """Bytes one row waiting behind it holds, on the average of those now waiting."""
    moves: tuple[Move, ...] = ()
    """The latest from one kind of workers to another."""
    moving: bool = False
    """Whether workers of the kind before have yet to leave."""
    queued_s: float = 0.0
    """Worker-seconds that its workers waited for a core."""
    parts: tuple[PartReading, ...] = ()
    """Of its operations, where there are several."""
    names: tuple[str, ...] = ()
    """Of its operations."""
    storable: tuple[int | None, ...] = ()
    """Of each: samples that a cache behind it would hold, if it could."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything at one moment; counters are totals since the engine began."""

    time_s: float
    epoch: int
    step: int
    trainer: TrainerObservation
    segments: tuple[SegmentReading, ...]
    held_bytes: int
    peak_bytes: int
    regime: str = ""
    """That of the batch to be begun next (`BatchPlan.regime`): what is loaded changes
    before what the trainer is given does."""
    gil_held: float | None = None
    process_cpu_s: float = 0.0
    """CPU-seconds of the process that the engine runs in, all threads."""
    host: str = "trainer"
    contention: ContentionObservation | None = None
    moves: tuple[Move, ...] = ()
    """Of the engine as a whole."""
    caches: tuple[CacheStatistics, ...] = ()
    """What the caches of the pipeline did, on this host, since it began."""


class TrainerMeter:
    """Measures `next()` from outside: how long it made the trainer wait.

    A step's times are counted when its batch is handed over, together with the batch,
    so a window never holds half a step. Written by the trainer's thread alone; another
    may read at any time.
    """

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self.regime = ""
        self._totals = TrainerObservation(0, 0, 0.0, 0.0)
        self._left_ns: int | None = None
        self._asked_ns = self._gap_ns = 0

    @property
    def training(self) -> bool:
        """Whether the trainer is in its loop."""
        return self._left_ns is not None

    @property
    def steps(self) -> int:
        """Batches handed over."""
        return self._totals.steps

    @property
    def gap_s(self) -> float:
        """How long the trainer was away before it asked; 0 at the start of a loop."""
        return self._gap_ns / 1e9

    def ask(self, now_ns: int) -> None:
        """The trainer calls `next()`."""
        self._gap_ns = 0 if self._left_ns is None else now_ns - self._left_ns
        self._asked_ns = self._left_ns = now_ns

    def get(self, now_ns: int, plan: BatchPlan) -> None:
        """It is given a batch."""
        before = self._totals
        self._totals = TrainerObservation(
            before.steps + 1,
            before.rows + plan.n_rows,
            before.wait_s + (now_ns - self._asked_ns) / 1e9,
            before.gap_s + self._gap_ns / 1e9,
        )
        self._left_ns = now_ns
        self.epoch, self.step = plan.epoch, plan.step
        if not (plan.last and self.regime):  # the tail of an epoch is no new regime
            self.regime = plan.regime

    def stop(self) -> None:
        """It left the loop: the time before was its last step's, what comes is none."""
        before = self._totals
        self._totals = replace(before, gap_s=before.gap_s + self._gap_ns / 1e9)
        self._left_ns = None

    def read(self) -> TrainerObservation:
        """Return the totals of whole steps."""
        return self._totals


class Monitor:
    """Reads one engine."""

    def __init__(
        self,
        engine_lock: EngineLock,
        segments: Sequence[Segment],
        trainer: TrainerMeter,
        probe: GilProbe,
        plan: Plan | DrawnPlan,
    ) -> None:
        self._engine_lock = engine_lock
        self._plan = plan
        self._segments = segments
        self._trainer = trainer
        self._probe = probe
        self._probed_s = -PROBE_AGAIN_S
        self._workers: tuple[tuple[str, int], ...] = ()
        """As they were when the GIL was last looked at."""
        self._waited = (0.0, 0.0)

    def read(self) -> Reading:
        """Return all totals as of now."""
        # These are files: not to be read under the lock.
        queued = [segment.run_queue.look() for segment in self._segments]
        with self._engine_lock.lock:
            now_ns = self._engine_lock.clock()
            pairs = zip(self._segments, queued, strict=True)
            rows = tuple(self._segment(s, now_ns, waited) for s, waited in pairs)
            reservations = self._engine_lock.core.reservations.statistics()
            begun_next = self._engine_lock.core.next_step
        trainer = self._trainer
        self._look_at_gil(now_ns / 1e9, trainer.read())
        return Reading(
            now_ns / 1e9,
            trainer.epoch,
            trainer.step,
            trainer.read(),
            rows,
            reservations.held_bytes,
            reservations.peak_bytes,
            self._plan.regime(begun_next) or trainer.regime,
            self._probe.last_share,
            time.process_time(),
        )

    def _look_at_gil(self, now_s: float, trainer: TrainerObservation) -> None:
        """Have the probe look, now and then, where threads may be short of the GIL.

        What it saw of other workers is forgotten.
        """
        workers = tuple((s.executor, s.num_parallel_workers) for s in self._segments)
        if workers != self._workers:
            self._workers, self._probed_s = workers, -PROBE_AGAIN_S
            self._probe.clear()
        known = self._probe.held_share is not None
        if (known and now_s - self._probed_s < PROBE_AGAIN_S) or all(
            executor != "thread" for executor, _ in workers
        ):
            return
        (wait_s, gap_s), self._waited = self._waited, (trainer.wait_s, trainer.gap_s)
        waited_s, spent_s = trainer.wait_s - wait_s, trainer.gap_s - gap_s
        if waited_s >= MIN_WAIT * (waited_s + spent_s):
            self._probed_s = now_s
            self._probe.burst()

    def _segment(
        self, segment: Segment, now_ns: int, queued_s: float
    ) -> SegmentReading:
        core, at = self._engine_lock.core, segment.connector.segment
        state = core.segments[at]
        return SegmentReading(
            segment.recipe.name,
            segment.recipe.queue_name,
            segment.executor,
            segment.num_parallel_workers,
            segment.prefetch_size,
            segment.connector.total(now_ns),
            segment.connector.readings(now_ns),
            state.gauge.read(now_ns),
            core.row_bytes(at),
            tuple(segment.moves),
            segment.moving,
            queued_s,
            segment.connector.parts.read(),
            tuple(each.stage for each in segment.recipe.program.operations),
            segment.recipe.storable,
        )


class Instruments(Protocol):
    """What gives readings of one engine."""

    def read(self) -> Reading:
        """Return all totals as of now."""
        ...


class Window:
    """Makes observations: each call covers the time since the call before."""

    def __init__(self, monitor: Instruments) -> None:
        self._monitor = monitor
        self._before = monitor.read()

    def observe(self) -> Observation:
        """Return what happened since the last call, and begin a new window."""
        before, now = self._before, self._monitor.read()
        self._before = now
        return difference(before, now)


def difference(before: Reading, now: Reading) -> Observation:
    """Return the window between two readings of one engine."""
    window_s = max(now.time_s - before.time_s, 1e-9)
    outputs = [
        connector(a, b, window_s)
        for a, b in zip(before.segments, now.segments, strict=True)
    ]
    pairs = zip(before.segments, now.segments, strict=True)
    segments = tuple(
        segment(a, b, outputs[at - 1] if at else None, outputs[at])
        for at, (a, b) in enumerate(pairs)
    )
    ours, theirs = before.trainer, now.trainer
    trainer = TrainerObservation(
        theirs.steps - ours.steps,
        theirs.rows - ours.rows,
        max(0.0, theirs.wait_s - ours.wait_s),
        max(0.0, theirs.gap_s - ours.gap_s),
    )
    children_s = sum(s.cpu_s for s in segments if s.executor == "process")
    return Observation(
        now.time_s,
        window_s,
        now.epoch,
        now.step,
        trainer,
        segments,
        now.held_bytes,
        now.peak_bytes,
        now.regime,
        now.gil_held,
        (now.process_cpu_s - before.process_cpu_s + children_s) / window_s,
        now.host,
        now.contention,
        now.moves,
    )


def segment(
    before: SegmentReading,
    now: SegmentReading,
    feeding: ConnectorObservation | None,
    output: ConnectorObservation,
) -> SegmentObservation:
    """Return what one segment did during a window."""
    work = now.total - before.total
    return SegmentObservation(
        now.name,
        now.queue_name,
        now.executor,
        now.num_parallel_workers,
        now.prefetch_size,
        work.rows,
        work.alive_s,
        work.run_s,
        work.cpu_s,
        work.wait_input_s,
        work.wait_credit_s,
        feeding,
        output,
        now.moves,
        now.moving,
        # Also counted between two leases, and at other moments than these.
        min(now.queued_s - before.queued_s, max(0.0, work.run_s - work.cpu_s)),
        parts(before, now, work),
    )


def parts(
    before: SegmentReading, now: SegmentReading, work: WorkerReading
) -> tuple[PartObservation, ...]:
    """Return what the operations of a segment did during a window."""
    if len(now.names) == 1:
        spent = [PartReading(work.rows, work.run_s, work.nbytes)]
    else:
        spent = [b - a for a, b in zip(before.parts, now.parts, strict=True)]
    return tuple(
        PartObservation(
            name, ratio(each.run_s, each.rows), ratio(each.nbytes, each.rows), storable
        )
        for name, each, storable in zip(now.names, spent, now.storable, strict=False)
    )


def connector(
    before: SegmentReading, now: SegmentReading, window_s: float
) -> ConnectorObservation:
    """Return how one segment's output stood during a window."""
    a, b = before.output, now.output
    occupancy = (b.area - a.area) / window_s
    return ConnectorObservation(
        occupancy,
        b.capacity,
        min(1.0, (b.empty_s - a.empty_s) / window_s),
        min(1.0, (b.full_s - a.full_s) / window_s),
        occupancy * now.row_bytes,
    )


def unmeasured(recipe: Recipe) -> Observation:
    """Return the window of a pipeline that has not run yet: nothing happened in it."""
    nothing = WorkerReading()
    segments = tuple(
        SegmentReading(
            segment.name,
            segment.queue_name,
            segment.executor,
            segment.num_parallel_workers,
            segment.prefetch_size,
            nothing,
            (),
            GaugeReading(0.0, 0.0, 0.0, 0),
            0.0,
        )
        for segment in recipe.segments
    )
    trainer = TrainerObservation(0, 0, 0.0, 0.0)
    reading = Reading(0.0, 0, 0, trainer, segments, 0, 0)
    return difference(reading, reading)
