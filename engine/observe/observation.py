"""What the monitor saw during one window of time: frozen, plain numbers.

The tuner and `explain()` see a running pipeline only through these. All times are in
seconds, all rates are derived, and nothing here holds a lock or a live object. A window
is the difference of two readings of cumulative counters, so windows can be added,
replayed and simulated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ConnectorObservation:
    """The rows that waited between two segments, or for the trainer."""

    occupancy: float
    """Rows waiting, mean over time."""
    capacity: float
    """Maximum number of waiting rows, at the end of the window."""
    empty: float
    """Share of the window, 0 to 1, with no row waiting: near 1, its reader starves."""
    full: float
    """Share of the window, 0 to 1, at capacity: near 1, the producer is held back."""
    nbytes: float
    """Bytes waiting, mean over time."""

    @property
    def utilization(self) -> float:
        """Mean occupancy as a share of capacity, 0 to 1 (MindSpore's measure)."""
        return min(1.0, ratio(self.occupancy, self.capacity))


Face = Literal["Pipeline", "DataLoader"]
"""The API the user calls: the two use different words for some settings."""

MoveOutcome = Literal["moved", "stays", "failed"]


@dataclass(frozen=True, slots=True)
class Move:
    """A change of kind (executor or host), or the reason why there was none."""

    time_s: float
    op: str
    """The segment, such as `Map(ID:1) decode`, or `Pipeline` for the host."""
    old: str
    new: str
    """`inline`, `thread` or `process`; equal to `old` if it stays."""
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
        """Return a move made at this moment."""
        now_s = time.perf_counter_ns() / 1e9
        return cls(now_s, op, old, new, outcome, reason, knob)

    @property
    def line(self) -> str:
        """A description in one line."""
        what = f"{self.op}: {self.knob} {self.old}"
        if self.outcome == "stays":
            return f"{what} stays: {self.reason}."
        ending = "" if self.outcome == "moved" else f" {self.outcome}"
        return f"{what} -> {self.new}{ending}: {self.reason}."


@dataclass(frozen=True, slots=True)
class ContentionObservation:
    """The trainer's own part of a step, with and without loading beside it."""

    loading_s: float
    """Mean step of a cycle, in seconds; the median of all cycles. Workers load in the
    trainer's process during the first half of a cycle."""
    paused_s: float
    """Last step of a cycle, with loading paused, in seconds; the median of all."""
    certain: bool
    """Whether loading made it longer in nearly all comparisons."""

    @property
    def growth(self) -> float:
        """Relative increase due to loading."""
        return ratio(self.loading_s, self.paused_s) - 1.0


@dataclass(frozen=True, slots=True)
class PartObservation:
    """One operation of a segment: a read, a function, a filter."""

    name: str
    """Name of the operator in the log, such as `Map(ID:2) decode`."""
    run_s_per_row: float
    """Worker-seconds that it takes per row; 0 before any row is finished."""
    bytes_per_row: float
    """Bytes of a sample that it makes; 0 before any is finished."""
    storable: int | None
    """Samples that a cache after it would hold; None if it makes different ones each
    time."""
    cpu_s_per_row: float = 0.0
    """Worker-seconds on a CPU, per row."""


@dataclass(frozen=True, slots=True)
class SegmentObservation:
    """One segment: adjacent stages that run together under one set of workers."""

    name: str
    """The operator under which the log shows the worker count: `Map(ID:2) decode`."""
    queue_name: str
    """The operator under which the log shows the prefetch size: `Batch(ID:3)`."""
    executor: str
    """`inline`, `thread`, `async`, `process` or `ray`."""
    num_parallel_workers: int
    prefetch_size: int
    """Batches it may work ahead of its consumer."""
    rows: int
    """Rows finished in the window."""
    worker_s: float
    """Worker-seconds: the lifetimes of its workers within the window, summed."""
    run_s: float
    """Worker-seconds inside the stages' functions: CPU time and everything that blocks
    in them."""
    cpu_s: float
    """CPU-seconds of these; `run_s - cpu_s` is I/O, the GIL, locks and the run
    queue."""
    wait_input_s: float
    """Worker-seconds waiting for rows to work on."""
    wait_credit_s: float
    """Worker-seconds held back by the consumer's bound, or by the memory budget."""
    input: ConnectorObservation | None
    """None for a source: it always has input, and counts as utilisation 1.0."""
    output: ConnectorObservation
    moves: tuple[Move, ...] = ()
    """The latest moves since the engine started, in order."""
    moving: bool = False
    """Whether workers of the previous kind have yet to leave, or another kind is
    requested."""
    queued_s: float = 0.0
    """The part of `run_s - cpu_s` spent waiting for a core (Linux; elsewhere 0)."""
    parts: tuple[PartObservation, ...] = ()
    """Its operations, in order."""
    wait_memory_s: float = 0.0
    """The part of `wait_credit_s` due to a lack of bytes in the memory budget."""
    max_workers: int = 0
    """Largest possible number of workers; 0 if unknown."""
    iterable: bool = False
    """Whether one worker reads it from start to end, as an iterable."""
    beginning: int = 0
    """Workers whose speed is unknown, because they are starting or have settled none of
    their leases."""
    fixed: str = ""
    """What the program says that leaves the work to the trainer: `num_workers=0`."""

    @property
    def is_here(self) -> bool:
        """Whether its workers share this machine's cores."""
        return self.executor != "ray"

    @property
    def input_utilization(self) -> float:
        """Utilisation of its input; 1.0 for a source."""
        return 1.0 if self.input is None else self.input.utilization

    @property
    def cpu_utilization(self) -> float:
        """Share of its workers' time spent on a CPU, 0 to 1."""
        return ratio(self.cpu_s, self.worker_s)

    @property
    def run_s_per_row(self) -> float:
        """Worker-seconds per row; 0 before any row is finished."""
        return ratio(self.run_s, self.rows)

    @property
    def cpu_s_per_row(self) -> float:
        """CPU-seconds per row; 0 before any row is finished."""
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
    """The trainer's own time between calls of `next()`, except while it was away."""
    copy_s: float = 0.0
    """The part of the wait spent copying batches to the device."""
    collate_s: float = 0.0
    """The part of the wait spent in the user's `collate_fn`, in the trainer."""
    away_s: float = 0.0
    """Excess time of exceptionally long steps: the trainer was stopped, or did other
    work, such as writing a checkpoint. Not part of a step."""
    first_s: float = 0.0
    """The part of the wait for the first batch of a loop, such as an epoch's."""

    @property
    def wait_share(self) -> float:
        """Exposed wait as a share of the step, 0 to 1."""
        return ratio(self.wait_s, self.wait_s + self.gap_s)

    @property
    def step_s(self) -> float:
        """Seconds of a training step, including the wait."""
        return ratio(self.wait_s + self.gap_s, self.steps)


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that the tuner learns about one window."""

    time_s: float
    """End of the window on the tuner's clock."""
    window_s: float
    """Length of the window in seconds, without the time that the trainer was away."""
    epoch: int
    step: int
    """The step of the last batch handed over."""
    trainer: TrainerObservation
    segments: tuple[SegmentObservation, ...]
    """In the order of the data, source first."""
    held_bytes: int
    """Bytes charged to the memory budget at the end of the window."""
    peak_bytes: int
    """Maximum charged at any time so far."""
    regime: str = ""
    """The plan's description of the batch that starts loading next, such as `batches of
    64 of 224 px`. What was learned in one regime may be wrong in another."""
    gil_held: float | None = None
    """Share of moments, 0 to 1, at which threads of the trainer's process held the GIL
    when another wanted it; None if not measured yet."""
    used_cores: float = 0.0
    """Cores that the engine's process and its worker processes kept busy."""
    host: str = "trainer"
    """Where the engine runs: `trainer` or `process`."""
    contention: ContentionObservation | None = None
    """What loading costs the trainer; None if unknown."""
    moves: tuple[Move, ...] = ()
    """The latest moves of the engine as a whole."""
    inline_s_per_row: float = 0.0
    """Seconds that a sample took the trainer while it made batches alone; 0 if
    unknown."""
    batch_bytes: int = 0
    """Bytes that one batch takes of the memory budget; 0 if unknown."""
    face: Face = "Pipeline"
    """The API whose words the user knows."""
    caches: tuple[str, ...] = ()
    """A line for each cache: what it did since the run began."""

    @property
    def rows_per_s(self) -> float:
        """Samples handed over per second."""
        return ratio(self.trainer.rows, self.window_s)

    @property
    def cpu_cores(self) -> float:
        """Cores of this machine that all segments together kept busy."""
        here = (segment.cpu_s for segment in self.segments if segment.is_here)
        return ratio(sum(here), self.window_s)
