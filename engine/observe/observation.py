"""What the monitor saw during one window of time: frozen, plain numbers.

The tuner and `explain()` see a running pipeline only through these. All times are
seconds, all rates are derived, nothing here holds a lock or a live object. A window is
the difference of two readings of cumulative counters, so windows may be added, replayed
and simulated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal


def ratio(part: float, whole: float) -> float:
    """`part / whole`, and 0 where there was nothing to divide by."""
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ConnectorObservation:
    """The rows that waited between two segments, or before the trainer."""

    occupancy: float
    """Rows waiting, mean over time."""
    capacity: float
    """Rows that may wait at most, at the end of the window."""
    empty: float
    """Share of the window, 0 to 1, with no row waiting: near 1, what reads it
    starves."""
    full: float
    """Share of the window, 0 to 1, at capacity: near 1, what fills it is held back."""
    nbytes: float
    """Bytes waiting, mean over time."""

    @property
    def utilization(self) -> float:
        """Mean occupancy as a share of capacity, 0 to 1 (MindSpore's measure)."""
        return min(1.0, ratio(self.occupancy, self.capacity))


Face = Literal["Pipeline", "DataLoader"]
"""What the user calls: the two do not have the same words for a setting."""

MoveOutcome = Literal["moved", "stays", "failed"]


@dataclass(frozen=True, slots=True)
class Move:
    """A change of kind (executor or host), or why there was none."""

    time_s: float
    op: str
    """The segment, as `Map(ID:1) decode`, or `Pipeline` for the host."""
    old: str
    new: str
    """`inline`, `thread` or `process`; the same as `old` where it stays."""
    outcome: MoveOutcome
    reason: str

    knob: Literal["executor", "host"] = "executor"

    @classmethod
    def now(
        cls,
        op: str,
        old: str,
        new: str,
        outcome: MoveOutcome,
        reason: str,
        knob: Literal["executor", "host"] = "executor",
    ) -> Move:
        """Return one made at this moment."""
        now_s = time.perf_counter_ns() / 1e9
        return cls(now_s, op, old, new, outcome, reason, knob)

    @property
    def line(self) -> str:
        """One line for people."""
        what = f"{self.op}: {self.knob} {self.old}"
        if self.outcome == "stays":
            return f"{what} stays: {self.reason}."
        ending = "" if self.outcome == "moved" else f" {self.outcome}"
        return f"{what} -> {self.new}{ending}: {self.reason}."


@dataclass(frozen=True, slots=True)
class ContentionObservation:
    """The trainer's own part of a step while batches are loaded beside it, and not."""

    loading_s: float
    """Seconds, median, while workers load in the trainer's process."""
    paused_s: float
    """The same while loading is paused."""
    certain: bool
    """Whether it is longer while loading in nearly all comparisons."""

    @property
    def growth(self) -> float:
        """By what share loading makes it longer."""
        return ratio(self.loading_s, self.paused_s) - 1.0


@dataclass(frozen=True, slots=True)
class PartObservation:
    """One operation of a segment: a read, a function, a filter."""

    name: str
    """As `Map(ID:2) decode`."""
    run_s_per_row: float
    """Worker-seconds one row takes in it; 0 while none is finished."""
    bytes_per_row: float
    """Bytes of a sample it makes; 0 while none is finished."""
    storable: int | None
    """Samples that a cache behind it would hold; None where it makes others each
    time."""
    cpu_s_per_row: float = 0.0
    """Of its worker-seconds, those on a CPU."""


@dataclass(frozen=True, slots=True)
class SegmentObservation:
    """One segment: neighbouring stages that run together under one set of workers."""

    name: str
    """The operator that the worker count is logged under, as `Map(ID:2) decode`."""
    queue_name: str
    """The operator that the prefetch size is logged under, as `Batch(ID:3)`."""
    executor: str
    """`inline`, `thread` or `process`."""
    num_parallel_workers: int
    prefetch_size: int
    """Batches it may work ahead of what reads it."""
    rows: int
    """Rows finished in the window."""
    worker_s: float
    """Worker-seconds: how long its workers existed, summed over them."""
    run_s: float
    """Worker-seconds inside the stages' functions: CPU and everything that blocks in
    them."""
    cpu_s: float
    """CPU-seconds of these; `run_s - cpu_s` is I/O, the GIL, locks and the run
    queue."""
    wait_input_s: float
    """Worker-seconds waiting for rows to work on."""
    wait_credit_s: float
    """Worker-seconds held back: by the reader's bound, or by the memory budget."""
    input: ConnectorObservation | None
    """None for a source: it always has input, and counts as utilisation 1.0."""
    output: ConnectorObservation
    moves: tuple[Move, ...] = ()
    """The latest since the engine began, in order."""
    moving: bool = False
    """Whether workers of the kind before have yet to leave, or another kind is asked
    for."""
    queued_s: float = 0.0
    """Of `run_s - cpu_s`, what was a wait for a core (Linux; elsewhere 0)."""
    parts: tuple[PartObservation, ...] = ()
    """Its operations, in order."""
    wait_memory_s: float = 0.0
    """Of `wait_credit_s`, what was for lack of bytes in the memory budget."""
    max_workers: int = 0
    """So many it may have at most; 0 where that is not known."""
    iterable: bool = False
    """Whether one worker reads it from its beginning to its end, as an iterable."""
    beginning: int = 0
    """Workers that start, or have not settled a lease of those they have: how fast they
    work is not known."""

    @property
    def input_utilization(self) -> float:
        """Utilisation of what feeds it; 1.0 for a source."""
        return 1.0 if self.input is None else self.input.utilization

    @property
    def cpu_utilization(self) -> float:
        """Share of its workers' time spent on a CPU, 0 to 1."""
        return ratio(self.cpu_s, self.worker_s)

    @property
    def run_s_per_row(self) -> float:
        """Worker-seconds one row takes; 0 while none is finished."""
        return ratio(self.run_s, self.rows)

    @property
    def cpu_s_per_row(self) -> float:
        """CPU-seconds one row takes; 0 while none is finished."""
        return ratio(self.cpu_s, self.rows)


@dataclass(frozen=True, slots=True)
class TrainerObservation:
    """The trainer's side of the window, measured in `next()`."""

    steps: int
    """Batches handed over."""
    rows: int
    """Samples in these, on this rank."""
    wait_s: float
    """Exposed wait: time inside `next()` until its batch was ready."""
    gap_s: float
    """The trainer's own time between two calls of `next()`; not while it was away."""
    copy_s: float = 0.0
    """Of the wait, what it took to bring batches to the device."""
    collate_s: float = 0.0
    """Of the wait, what the user's `collate_fn` took in the trainer's own thread."""
    away_s: float = 0.0
    """What single steps took beyond all measure: it was stopped, or did something else,
    as to write a checkpoint. No part of a step."""
    first_s: float = 0.0
    """Of the wait, what was for the first batch of a loop, as of an epoch."""

    @property
    def wait_share(self) -> float:
        """Exposed wait as a share of the step, 0 to 1."""
        return ratio(self.wait_s, self.wait_s + self.gap_s)

    @property
    def step_s(self) -> float:
        """Seconds a training step takes, wait included."""
        return ratio(self.wait_s + self.gap_s, self.steps)


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything the tuner is told about one window."""

    time_s: float
    """End of the window on the tuner's clock."""
    window_s: float
    """Its length."""
    epoch: int
    step: int
    """The batch handed over last."""
    trainer: TrainerObservation
    segments: tuple[SegmentObservation, ...]
    """In the order of the data, source first."""
    held_bytes: int
    """Bytes charged to the memory budget at the end of the window."""
    peak_bytes: int
    """Most that was charged at any time so far."""
    regime: str = ""
    """What the plan says of the batch handed over last, as `batches of 64 of 224 px`:
    what was learned of one regime need not be true in another."""
    gil_held: float | None = None
    """Share of moments, 0 to 1, at which threads of the trainer's process held the GIL
    when another wanted it; None while nobody has looked."""
    used_cores: float = 0.0
    """Cores that the engine's process and its worker processes kept busy."""
    host: str = "trainer"
    """Where the engine runs: `trainer`, or `process`."""
    contention: ContentionObservation | None = None
    """What loading costs the trainer; None while that is not known."""
    moves: tuple[Move, ...] = ()
    """Of the engine as a whole, the latest."""
    inline_s_per_row: float = 0.0
    """Seconds that a sample took the trainer while it made batches alone; 0 while that
    is not known."""
    batch_bytes: int = 0
    """What one batch takes of the memory budget; 0 while that is not known."""
    face: Face = "Pipeline"
    """In whose words the user has set it."""
    caches: tuple[str, ...] = ()
    """What each cache did since the run began, in a line."""

    @property
    def rows_per_s(self) -> float:
        """Samples handed over a second."""
        return ratio(self.trainer.rows, self.window_s)

    @property
    def cpu_cores(self) -> float:
        """Cores that all segments together kept busy."""
        return ratio(sum(segment.cpu_s for segment in self.segments), self.window_s)
