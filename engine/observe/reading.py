"""Readings of all counters of one engine, and windows: the differences of two."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from ...cache.statistics import CacheStatistics
from ...system.printing import Printed
from ..core.metrics import GaugeReading, PartReading, WorkerReading
from ..plan import BatchPlan
from .observation import (
    ConnectorObservation,
    ContentionObservation,
    Face,
    Move,
    Observation,
    PartObservation,
    SegmentObservation,
    TrainerObservation,
    ratio,
)

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SegmentReading:
    """One segment's totals since the engine started."""

    name: str
    queue_name: str
    executor: str
    num_parallel_workers: int
    prefetch_size: int
    """Batches it may work ahead of its consumer."""
    total: WorkerReading
    """The sum over all workers, past ones included."""
    alive: int
    """Workers that work or wait now."""
    output: GaugeReading
    row_bytes: float
    """Mean bytes of a row that waits after it now."""
    moves: tuple[Move, ...] = ()
    """The latest moves between kinds of workers."""
    moving: bool = False
    """Whether workers of the previous kind have yet to leave."""
    queued_s: float = 0.0
    """Worker-seconds spent waiting for a core."""
    parts: tuple[PartReading, ...] = ()
    """Costs of its operations, if there are several."""
    names: tuple[str, ...] = ()
    """Names of its operations."""
    storable: tuple[int | None, ...] = ()
    """For each operation, the samples that a cache after it would hold; None if they
    differ between epochs."""
    max_workers: int = 0
    """Largest possible number of workers; 0 if unknown."""
    iterable: bool = False
    """Whether one worker reads it from start to end, as an iterable."""
    beginning: int = 0
    """Workers whose speed is not known yet."""
    fixed: str = ""
    """What the program says that leaves the work to the trainer: `num_workers=0`."""


@dataclass(frozen=True, slots=True, repr=False)
class Reading(Printed):
    """Everything at one moment; counters are totals since the engine started."""

    time_s: float
    """When it was taken, by `time.perf_counter`."""
    epoch: int
    step: int
    """The step of the last batch handed over."""
    trainer: TrainerObservation
    segments: tuple[SegmentReading, ...]
    held_bytes: int
    """Bytes charged to the memory budget."""
    peak_bytes: int
    """Maximum charged at any time so far."""
    regime: str = ""
    """The regime of the batch that starts next (`BatchPlan.regime`): loading enters a
    new regime before the trainer does."""
    gil_held: float | None = None
    """Share of moments, 0 to 1, at which the GIL was held; None if not measured yet."""
    process_cpu_s: float = 0.0
    """CPU-seconds of the engine's process, over all threads."""
    host: str = "trainer"
    contention: ContentionObservation | None = None
    moves: tuple[Move, ...] = ()
    """The moves of the engine as a whole."""
    inline_s_per_row: float = 0.0
    """Seconds that a sample took the trainer while it made batches alone; 0 if
    unknown."""
    batch_bytes: int = 0
    """Bytes that one batch takes of the memory budget; 0 if unknown."""
    face: Face = "Pipeline"
    caches: tuple[CacheStatistics, ...] = ()
    """What the pipeline's caches did, on this host, since it began."""

    def __repr__(self) -> str:
        """Return a table with a line for each segment, and one for the trainer."""
        width = max((len(each.name) for each in self.segments), default=0)
        head = (
            f"{'segment':<{width}}  workers  executor     rows  in functions      CPU"
        )
        rows = [
            f"{each.name:<{width}}  {each.num_parallel_workers:>7}  {each.executor:<8}"
            f"  {each.total.rows:>7,}  {each.total.run_s:>10.1f} s"
            f"  {each.total.cpu_s:>5.1f} s"
            for each in self.segments
        ]
        trainer = self.trainer
        last = (
            f"trainer: {trainer.steps:,} steps, {trainer.rows:,} samples, waited"
            f" {trainer.wait_s:.1f} s, {trainer.gap_s:.1f} s of its own; batches hold"
            f" {self.held_bytes / MIB:.1f} MiB"
        )
        return "\n".join([head, *rows, last, *(cache.line for cache in self.caches)])


AWAY_NS = 1_000_000_000
AWAY = 20
"""A gap this many times the usual one, and at least `AWAY_NS`, means it was away."""


class TrainerMeter:
    """Measures how long `next()` made the trainer wait.

    A step's times are counted when its batch is handed over, together with the batch,
    so a window never holds half a step. Only the trainer's thread writes; any thread
    may read at any time.
    """

    def __init__(self) -> None:
        self.epoch = self.step = 0
        self._totals = (0, 0, 0, 0, 0, 0, 0)
        """Steps, rows, and nanoseconds: waits, gaps, the part of the waits for copying
        to the device, time away, and waits for first batches. Replaced as a whole, so
        readers need no lock."""
        self.collate_ns = 0
        """Time spent in the user's `collate_fn`, in nanoseconds."""
        self._left_ns: int | None = None
        self._asked_ns = self._gap_ns = 0
        self._first = False

    @property
    def training(self) -> bool:
        """Whether the trainer is in its loop."""
        return self._left_ns is not None

    @property
    def steps(self) -> int:
        """Batches handed over."""
        return self._totals[0]

    @property
    def gap_s(self) -> float:
        """Seconds between the last batch and this request; 0 at the start of a loop."""
        return self._gap_ns / 1e9

    def ask(self, now_ns: int) -> None:
        """Note that the trainer calls `next()`."""
        self._first = self._left_ns is None
        self._gap_ns = 0 if self._left_ns is None else now_ns - self._left_ns
        self._asked_ns = self._left_ns = now_ns

    def get(self, now_ns: int, plan: BatchPlan, copy_ns: int = 0) -> None:
        """Note a batch; `copy_ns` of its wait went into copying it to the device."""
        self.count(now_ns, plan.n_rows, copy_ns)
        self.epoch, self.step = plan.epoch, plan.step

    def count(self, now_ns: int, n_rows: int, copy_ns: int = 0) -> None:
        """Note a batch that has no plan."""
        steps, rows, wait_ns, gap_ns, copied_ns, away_ns, first_ns = self._totals
        gap, wait = self._gap_ns, now_ns - self._asked_ns
        if self._first:
            first_ns += wait
        if gap > AWAY_NS and gap * steps > AWAY * (gap_ns + away_ns) > 0:
            gap, away_ns = 0, away_ns + gap
        self._totals = (
            steps + 1,
            rows + n_rows,
            wait_ns + wait,
            gap_ns + gap,
            copied_ns + copy_ns,
            away_ns,
            first_ns,
        )
        self._left_ns = now_ns

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        """Measure the user's `collate_fn` in the trainer's thread."""
        begun_ns = time.perf_counter_ns()
        yield
        self.collate_ns += time.perf_counter_ns() - begun_ns

    def stop(self) -> None:
        """Note that it left the loop: the last step ends here, and no gap begins."""
        steps, rows, wait_ns, gap_ns, copied_ns, away_ns, first_ns = self._totals
        gap_ns += self._gap_ns
        self._totals = steps, rows, wait_ns, gap_ns, copied_ns, away_ns, first_ns
        self._left_ns = None

    def read(self) -> TrainerObservation:
        """Return the totals over whole steps."""
        steps, rows, *spent_ns = self._totals
        spent_ns.insert(3, self.collate_ns)
        return TrainerObservation(steps, rows, *(ns / 1e9 for ns in spent_ns))


def difference(before: Reading, now: Reading) -> Observation:
    """Return the window between two readings of one engine."""
    trainer = _trainer(before.trainer, now.trainer)
    window_s = max(now.time_s - before.time_s - trainer.away_s, 1e-9)
    outputs = [
        connector(a, b, window_s)
        for a, b in zip(before.segments, now.segments, strict=True)
    ]
    pairs = zip(before.segments, now.segments, strict=True)
    segments = tuple(
        segment(a, b, outputs[at - 1] if at else None, outputs[at])
        for at, (a, b) in enumerate(pairs)
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
        now.inline_s_per_row,
        now.batch_bytes,
        now.face,
        tuple(cache.line for cache in now.caches),
    )


def _trainer(before: TrainerObservation, now: TrainerObservation) -> TrainerObservation:
    """Return what the trainer did between two of its totals."""
    return TrainerObservation(
        now.steps - before.steps,
        now.rows - before.rows,
        max(0.0, now.wait_s - before.wait_s),
        max(0.0, now.gap_s - before.gap_s),
        max(0.0, now.copy_s - before.copy_s),
        max(0.0, now.collate_s - before.collate_s),
        max(0.0, now.away_s - before.away_s),
        max(0.0, now.first_s - before.first_s),
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
        # The run queue is also counted between leases, and read at other moments.
        min(now.queued_s - before.queued_s, max(0.0, work.run_s - work.cpu_s)),
        parts(before, now, work),
        work.wait_memory_s,
        now.max_workers,
        now.iterable,
        now.beginning,
        now.fixed,
    )


def parts(
    before: SegmentReading, now: SegmentReading, work: WorkerReading
) -> tuple[PartObservation, ...]:
    """Return what the operations of a segment did during a window."""
    if len(now.names) == 1:
        spent = [PartReading(work.rows, work.run_s, work.nbytes, work.cpu_s)]
    else:
        spent = [b - a for a, b in zip(before.parts, now.parts, strict=True)]
    return tuple(
        PartObservation(
            name,
            ratio(each.run_s, each.rows),
            ratio(each.nbytes, each.rows),
            storable,
            ratio(each.cpu_s, each.rows),
        )
        for name, each, storable in zip(
            now.names, spent, chain(now.storable, repeat(None)), strict=False
        )
    )


def connector(
    before: SegmentReading, now: SegmentReading, window_s: float
) -> ConnectorObservation:
    """Return the state of one segment's output during a window."""
    a, b = before.output, now.output
    occupancy = (b.area - a.area) / window_s
    return ConnectorObservation(
        occupancy,
        b.capacity,
        min(1.0, (b.empty_s - a.empty_s) / window_s),
        min(1.0, (b.full_s - a.full_s) / window_s),
        occupancy * now.row_bytes,
    )
