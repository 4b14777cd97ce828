"""How the tuner sees a running pipeline, and how it changes one.

An observation is what the monitor saw during one window of time: frozen, plain numbers.
The tuner and `explain()` see a pipeline only through these. All times are in seconds,
all rates are derived, and nothing there holds a lock or a live object. A reading is the
window since the run began. Other windows are differences of two readings. Windows add
up, so they can be joined, replayed and simulated.

The records in which instruments are read add and subtract. Each field of such a record
says what it is: a total, a mean, or (unmarked) the state at the end. So one rule joins
two windows, and takes a window out of two readings.

Knobs are the only way to change a pipeline from outside. A restriction says why one
stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

from ...cache.statistics import CacheStatistics
from ...system.printing import Printed

# Marks a field that grows: windows add up.
TOTAL = {"combines": "total"}
# Marks a mean, over the record's time or over its rows.
MEAN = {"combines": "mean"}
# Marks a mean that never exceeds 1.
SHARE = {"combines": "share"}
# Marks a record, or a tuple of records, of the same time; None stays None.
PARTS = {"combines": "parts"}


class Totals:
    """A frozen dataclass whose fields are marked.

    `earlier + later` joins two windows that follow each other. `later - earlier`, of
    two records that began at the same time, is what happened in between.
    """

    __slots__ = ()

    weight: ClassVar[str] = ""
    """The field by which means are weighted; by default, that of the record around."""

    def __add__(self, later: Self) -> Self:
        return cast("Self", _combined(self, later, 1, (0.0, 0.0)))

    def __sub__(self, earlier: Self) -> Self:
        return cast("Self", _combined(earlier, self, -1, (0.0, 0.0)))


def _combined(
    first: Any, second: Any, sign: Literal[1, -1], weights: tuple[float, float]
) -> Any:
    """Return the second record with the first one added, or taken away.

    Args:
        first: a record of the same class, a tuple of records, or None.
        second: the later one.
        sign: 1 adds the first one, -1 takes it away.
        weights: those of the record around; the first one is negative if taken away.
    """
    if isinstance(second, tuple):
        return tuple(
            _combined(a, b, sign, weights) for a, b in zip(first, second, strict=True)
        )
    if first is None or second is None:
        return second
    if by := second.weight:
        weights = sign * getattr(first, by), getattr(second, by)
    kind: type = type(second)
    values = {}
    for name, how in _marked(kind):
        a, b = getattr(first, name), getattr(second, name)
        if how == "total":
            values[name] = b + sign * a
        elif how == "parts":
            values[name] = _combined(a, b, sign, weights)
        else:
            whole = sum(weights)
            total = a * weights[0] + b * weights[1]
            mean = max(0.0, total / whole) if whole > 0 else 0.0
            values[name] = min(1.0, mean) if how == "share" else mean
    return replace(second, **values)


@cache
def _marked(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the marked fields of a class, and what each one is."""
    return tuple(
        (field.name, field.metadata["combines"])
        for field in fields(kind)
        if field.metadata
    )


@dataclass(frozen=True, slots=True)
class ConnectorObservation(Totals):
    """The rows that waited between two segments, or for the trainer."""

    occupancy: float = field(default=0.0, metadata=MEAN)
    """Rows waiting, mean over time."""
    capacity: float = 0.0
    """Maximum number of waiting rows, at the end of the window."""
    empty: float = field(default=0.0, metadata=SHARE)
    """Share of the window, 0 to 1, with no row waiting: near 1, its reader starves."""
    full: float = field(default=0.0, metadata=SHARE)
    """Share of the window, 0 to 1, at capacity: near 1, the producer is held back."""
    row_bytes: float = 0.0
    """Mean bytes of a waiting row, at the end of the window."""

    @property
    def bounded(self) -> ConnectorObservation:
        """The same for people: a reading's shares exceed 1 if the trainer was away."""
        return replace(
            self,
            occupancy=min(self.occupancy, self.capacity),
            empty=min(1.0, self.empty),
            full=min(1.0, self.full),
        )

    @property
    def utilization(self) -> float:
        """Mean occupancy as a share of capacity, 0 to 1 (MindSpore's measure)."""
        return min(1.0, self.occupancy / self.capacity) if self.capacity else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReading(Totals):
    """Totals of one worker. `+` adds the readings of several workers."""

    rows: int = field(default=0, metadata=TOTAL)
    """Rows finished."""
    worker_s: float = field(default=0.0, metadata=TOTAL)
    """Worker-seconds: the lifetimes of the workers, summed."""
    run_s: float = field(default=0.0, metadata=TOTAL)
    """Worker-seconds inside the stages' functions: CPU time and everything that blocks
    in them."""
    settled_s: float = field(default=0.0, metadata=TOTAL)
    """The part of `run_s` whose rows are counted; 0: unknown."""
    settled_s2: float = field(default=0.0, metadata=TOTAL)
    """The squares of the seconds of single leases, summed."""
    cpu_s: float = field(default=0.0, metadata=TOTAL)
    """CPU-seconds of these; `run_s - cpu_s` is I/O, the GIL, locks and the run
    queue."""
    wait_input_s: float = field(default=0.0, metadata=TOTAL)
    """Worker-seconds waiting for rows to work on."""
    wait_credit_s: float = field(default=0.0, metadata=TOTAL)
    """Worker-seconds held back by the consumer's bound, or by the memory budget."""
    wait_memory_s: float = field(default=0.0, metadata=TOTAL)
    """The part of `wait_credit_s` due to a lack of bytes in the memory budget."""


def total_of(readings: Iterable[WorkerReading]) -> WorkerReading:
    """Return the sum of at least one; `+` takes a thousand instructions for each."""
    names = [name for name, _ in _marked(WorkerReading)]
    columns = zip(*map(attrgetter(*names), readings), strict=True)
    return WorkerReading(**dict(zip(names, map(sum, columns), strict=True)))


class PartReading(NamedTuple):
    """Total cost of one of several operations."""

    rows: int
    run_s: float
    cpu_s: float
    nbytes: int
    """Bytes of the samples it made, as if all of a chunk were like its first."""


MIB = 1 << 20
# Relative growth of the trainer's own part of a step that is worth acting on.
MIN_GROWTH = 0.05
# Share of a step that the trainer must wait for faster loading to be felt.
MIN_WAIT = 0.03


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0


# The API the user calls: the two use different words for some settings.
Face = Literal["Pipeline", "DataLoader"]

MoveOutcome = Literal["moved", "stays", "failed"]


@dataclass(frozen=True, slots=True)
class Move:
    """A change of kind (executor or host), or the reason why there was none."""

    op: str
    """The segment, such as `Map(ID:1) decode`, or `Pipeline` for the host."""
    old: str
    new: str
    """A kind of workers, or of the host `trainer` or `process`; `old` if it stays."""
    outcome: MoveOutcome
    reason: str
    knob: Literal["executor", "host"] = "executor"
    time_s: float = field(default_factory=time.perf_counter)
    """When it was made: by default, now."""

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

    beside_s: float
    """Seconds of a step while batches are loaded beside it: the mean, but for
    exceptionally long ones, or of all if loading lengthens only some."""
    alone_s: float
    """Seconds of a step while nothing is loaded: the median, or the mean likewise."""
    certain: bool
    """Whether loading made it longer."""

    @property
    def growth(self) -> float:
        """Relative increase due to loading."""
        return ratio(self.beside_s, self.alone_s) - 1.0


@dataclass(frozen=True, slots=True)
class PartObservation(Totals):
    """One operation of a segment: a read, a function, a filter."""

    name: str
    """Name of the operator in the log, such as `Map(ID:2) decode`."""
    run_s_per_row: float = field(metadata=MEAN)
    """Worker-seconds that it takes per row; 0 before any row is finished."""
    bytes_per_row: float = field(metadata=MEAN)
    """Bytes of a sample that it makes; 0 before any is finished."""
    storable: int | None
    """Samples that a cache after it would hold; None if it makes different ones each
    time."""
    cpu_s_per_row: float = field(default=0.0, metadata=MEAN)
    """Worker-seconds on a CPU, per row."""
    rows: int = field(default=1, metadata=TOTAL)
    """Rows over which these are means."""

    weight: ClassVar[str] = "rows"


def parts_of(
    names: Iterable[str], costs: Iterable[PartReading], storable: Iterable[int | None]
) -> tuple[PartObservation, ...]:
    """Return what the operations of a segment have cost since the run began."""
    operations = zip(names, costs, chain(storable, repeat(None)), strict=False)
    return tuple(
        PartObservation(
            name=name,
            run_s_per_row=ratio(cost.run_s, cost.rows),
            bytes_per_row=ratio(cost.nbytes, cost.rows),
            storable=samples,
            cpu_s_per_row=ratio(cost.cpu_s, cost.rows),
            rows=cost.rows,
        )
        for name, cost, samples in operations
    )


@dataclass(frozen=True, slots=True)
class SegmentObservation(WorkerReading):
    """One segment: adjacent stages that run together under one set of workers.

    Its totals are those of all its workers.
    """

    name: str
    """The operator under which the log shows the worker count: `Map(ID:2) decode`."""
    queue_name: str
    """The operator under which the log shows the prefetch size: `Batch(ID:3)`."""
    executor: str
    """`inline`, `thread`, `async`, `process` or `ray`."""
    num_parallel_workers: int
    prefetch_size: int
    """Batches it may work ahead of its consumer."""
    input: ConnectorObservation | None = field(default=None, metadata=PARTS)
    """None for a source: it always has input, and counts as utilisation 1.0."""
    output: ConnectorObservation = field(default=ConnectorObservation(), metadata=PARTS)
    moves: tuple[Move, ...] = ()
    """The latest moves since the engine started, in order."""
    moving: bool = False
    """Whether workers of the previous kind have yet to leave, or another kind is
    requested."""
    run_queue_s: float = field(default=0.0, metadata=TOTAL)
    """Worker-seconds spent waiting for a core (Linux; elsewhere 0), also between
    leases."""
    looked: int = field(default=0, metadata=TOTAL)
    """Workers seen in all looks, each time: threads of this process (Linux; else 0)."""
    lined: int = field(default=0, metadata=TOTAL)
    """How many of these were waiting for one and the same lock."""
    threads_cpu_s: float = field(default=0.0, metadata=TOTAL)
    """CPU-seconds of its worker processes, threads that its functions start included;
    of workers that are threads, their own (Linux; elsewhere 0)."""
    parts: tuple[PartObservation, ...] = field(default=(), metadata=PARTS)
    """Its operations, in order."""
    max_workers: int = 0
    """Largest possible number of workers; 0 if unknown."""
    iterable: bool = False
    """Whether one worker reads it from start to end, as an iterable."""
    alive: int = 0
    """Workers that work or wait, at the end of the window."""
    children: int = 0
    """Processes that they are in, if these are not the trainer's."""
    beginning: int = 0
    """Workers whose speed is unknown, because they are starting or have settled none of
    their leases."""
    held: str = ""
    """What keeps it from getting more workers, and what would allow them."""
    stays: str = ""
    """Why its workers may not become another kind; empty if they may."""
    fixed: str = ""
    """What the program says that leaves the work to the trainer: `num_workers=0`."""
    alone_s_per_row: float = 0.0
    """Seconds that a row took the trainer, before workers took over; 0: unknown."""

    @property
    def is_here(self) -> bool:
        """Whether its workers share this machine's cores."""
        return self.executor != "ray"

    @property
    def input_utilization(self) -> float:
        """Utilisation of its input; 1.0 for a source."""
        return 1.0 if self.input is None else self.input.utilization

    @property
    def queued_s(self) -> float:
        """The part of `run_s - cpu_s` spent waiting for a core."""
        return min(self.run_queue_s, max(0.0, self.run_s - self.cpu_s))

    @property
    def cpu_utilization(self) -> float:
        """Share of its workers' time spent on a CPU, 0 to 1."""
        return ratio(self.cpu_s, self.worker_s)

    @property
    def run_s_per_row(self) -> float:
        """Worker-seconds per row; 0 before any row is finished.

        `run_s` also has the work that goes on, whose rows are not counted yet.
        """
        return ratio(self.settled_s or self.run_s, self.rows)

    @property
    def cpu_s_per_row(self) -> float:
        """CPU-seconds per row; 0 before any row is finished."""
        return ratio(self.cpu_s, self.rows)

    @property
    def lease_s(self) -> float:
        """Seconds that a lease takes in whose midst one looks: the long ones count."""
        return ratio(self.settled_s2, self.settled_s)


@dataclass(frozen=True, slots=True)
class TrainerObservation(Totals):
    """The trainer's side of the window, measured in `next()`."""

    steps: int = field(default=0, metadata=TOTAL)
    """Batches handed over."""
    rows: int = field(default=0, metadata=TOTAL)
    """Samples in these, on this rank."""
    wait_s: float = field(default=0.0, metadata=TOTAL)
    """Exposed wait: time inside `next()` until its batch was ready."""
    gap_s: float = field(default=0.0, metadata=TOTAL)
    """The trainer's own time between calls of `next()`, except while it was away."""
    copy_s: float = field(default=0.0, metadata=TOTAL)
    """The part of the wait spent copying batches to the device."""
    collate_s: float = field(default=0.0, metadata=TOTAL)
    """The part of the wait spent in the user's `collate_fn`, in the trainer."""
    away_s: float = field(default=0.0, metadata=TOTAL)
    """Excess time of exceptionally long steps: the trainer was stopped, or did other
    work, such as writing a checkpoint. Not part of a step."""
    first_s: float = field(default=0.0, metadata=TOTAL)
    """The part of the wait for the first batch of a loop, such as an epoch's."""
    queued_s: float = field(default=0.0, metadata=TOTAL)
    """Time that its thread had work to do, but no core (Linux; elsewhere 0)."""
    loops: int = field(default=0, metadata=TOTAL, kw_only=True)
    """Loops whose first batch was handed over."""
    loop_s: float = field(default=0.0, kw_only=True)
    """Seconds from the start of the loop before the last one to that of the last, or
    since then, if these are more; 0 before there are two."""

    @property
    def wait_share(self) -> float:
        """Exposed wait as a share of the step, 0 to 1."""
        return ratio(self.wait_s, self.wait_s + self.gap_s)

    @property
    def step_s(self) -> float:
        """Seconds of a training step, including the wait."""
        return ratio(self.wait_s + self.gap_s, self.steps)


@dataclass(frozen=True, slots=True, repr=False)
class Observation(Printed, Totals):
    """Everything that the tuner learns about one window, or about the whole run."""

    time_s: float
    """End of the window on the tuner's clock."""
    window_s: float = field(metadata=TOTAL)
    """Length of the window in seconds, without the time that the trainer was away."""
    epoch: int
    step: int
    """The step of the last batch handed over."""
    trainer: TrainerObservation = field(metadata=PARTS)
    segments: tuple[SegmentObservation, ...] = field(metadata=PARTS)
    """In the order of the data, source first."""
    held_bytes: int = 0
    """Bytes charged to the memory budget at the end of the window."""
    peak_bytes: int = 0
    """Maximum charged at any time so far."""
    regime: str = ""
    """The plan's description of the batch that starts loading next, such as `batches of
    64 of 224 px`. What was learned in one regime may be wrong in another."""
    gil_held: float | None = None
    """Share of moments, 0 to 1, at which threads of the trainer's process held the GIL
    when another wanted it; None if not measured yet."""
    process_cpu_s: float = field(default=0.0, metadata=TOTAL)
    """CPU-seconds of the trainer's process, over all threads."""
    host: str = "trainer"
    """`process` if all work is in worker processes, otherwise `trainer`."""
    contention: ContentionObservation | None = None
    """What loading costs the trainer; None if unknown."""
    moves: tuple[Move, ...] = ()
    """The latest moves of the engine as a whole."""
    batch_bytes: int = 0
    """Bytes that one batch takes of the memory budget; 0 if unknown."""
    face: Face = "Pipeline"
    """The API whose words the user knows."""
    torch_threads: int = 0
    """Threads that torch computes with in the trainer's process; 0 if unknown."""
    caches: tuple[CacheStatistics, ...] = ()
    """What the pipeline's caches did, on this host, since the run began."""

    weight: ClassVar[str] = "window_s"

    def since(self, time_s: float) -> Observation:
        """Return a reading to subtract from later ones: a window from `time_s` on."""
        late_s = self.time_s - time_s
        return replace(self, time_s=time_s, window_s=self.window_s - late_s)

    @property
    def bounded(self) -> Observation:
        """The same for people, with all shares between 0 and 1."""
        segments = (
            replace(s, input=s.input and s.input.bounded, output=s.output.bounded)
            for s in self.segments
        )
        return replace(self, segments=tuple(segments))

    @property
    def slowdown(self) -> float:
        """How many times as long the trainer's own part of a step takes beside loading.

        It is 1 if it is not certainly longer.
        """
        contention = self.contention
        slowed = contention and contention.certain and contention.growth >= MIN_GROWTH
        return 1.0 + contention.growth if contention and slowed else 1.0

    @property
    def rows_per_s(self) -> float:
        """Samples handed over per second."""
        return ratio(self.trainer.rows, self.window_s)

    @property
    def cpu_cores(self) -> float:
        """Cores of this machine that all segments together kept busy."""
        cpu_s = (segment.cpu_s for segment in self.segments if segment.is_here)
        return ratio(sum(cpu_s), self.window_s)

    @property
    def used_cores(self) -> float:
        """Cores that the trainer's process and its worker processes kept busy."""
        children_s = sum(s.cpu_s for s in self.segments if s.executor == "process")
        return ratio(self.process_cpu_s + children_s, self.window_s)

    def __repr__(self) -> str:
        """Return a table with a line for each segment, and one for the trainer."""
        width = max((len(segment.name) for segment in self.segments), default=0)
        head = (
            f"{'segment':<{width}}  workers  executor     rows  in functions      CPU"
        )
        rows = [
            f"{segment.name:<{width}}  {segment.num_parallel_workers:>7}"
            f"  {segment.executor:<8}  {segment.rows:>7,}  {segment.run_s:>10.1f} s"
            f"  {segment.cpu_s:>5.1f} s"
            for segment in self.segments
        ]
        trainer = self.trainer
        last = (
            f"trainer: {trainer.steps:,} steps, {trainer.rows:,} samples, waited"
            f" {trainer.wait_s:.1f} s, {trainer.gap_s:.1f} s of its own; batches hold"
            f" {self.held_bytes / MIB:.1f} MiB"
        )
        return "\n".join([head, *rows, last, *(cache.line for cache in self.caches)])


KnobName = Literal["num_parallel_workers", "prefetch_size", "executor", "host"]
# A number, or one of a few kinds.
Value = int | str


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting of one operator that may change while the pipeline runs.

    Reading `value` and calling `set` are safe from any thread, and never wait for work
    in progress. A kind changes in the trainer's thread, at its next batch. If that
    fails, a `Move` says so and the knob disappears.
    """

    operator: str
    """Its name in the log: `Map(ID:2) decode`."""
    name: KnobName
    lower: int
    """Smallest number the user allows, >= 1; 0 for a kind."""
    upper: int
    """Largest number the user allows; 0 for a kind."""
    tunable: bool
    """False if the user pinned the stage with `tune=False`."""
    read: Callable[[], Value] = field(repr=False)
    write: Callable[[Any], object] = field(repr=False)
    choices: tuple[str, ...] = ()
    """Possible kinds; empty for a number."""
    held: str = ""
    """What keeps it from being raised, and what would let it; empty if nothing does."""

    @property
    def value(self) -> Value:
        """The requested value (workers may still be starting or finishing)."""
        return self.read()

    def set(self, value: Value) -> Value:
        """Request `value`; a number is clipped to its bounds.

        Returns:
            the requested value.

        Raises:
            ValueError: there is no such kind.
        """
        if isinstance(value, str):
            if value not in self.choices:
                raise ValueError(
                    f"{self.name} of {self.operator} must be one of {self.choices},"
                    f" got {value!r}"
                )
        else:
            value = min(max(value, self.lower), self.upper)
        if value != self.read():
            self.write(value)
        return value


class Restriction(StrEnum):
    """Why a setting stays as it is, in the words of `explain()` and of the log.

    Each says what would allow the change, if anything does. Most have one field, for
    `format`. Beside these, an error that a move met is such a reason.
    """

    # What the program says
    PINNED = "the stage has tune=False"
    GIVEN = 'executor="{}" was given, and "auto" allows others'
    BOUNDED = "it is limited to {}"
    ALONE = (
        "one worker was requested and stays alone, because {};"
        " num_parallel_workers=2 allows more"
    )
    HOSTED = 'options(host="{}") was given, and "auto" allows another'
    ZERO = "{}, but the program says `{}`; leave that out to let workers load"
    SHORT = (
        "{}, but epochs are so short that workers, which end with each, would hardly"
        " help; num_workers=2, persistent_workers=True keeps them"
    )
    SAMPLER = (
        "the sampler is the program's own, and with workers it would be asked ahead of"
        " time, before it can see what the loop does meanwhile; set num_workers"
        " yourself if that is acceptable"
    )
    # What samples are made of
    ITERABLE = (
        "one worker reads an iterable, in order (keep it cheap, and do the rest of the"
        " work in .map())"
    )
    SHARED = (
        "{}, so several workers would get wrong samples or the same draws; create it on"
        " first use, so that every worker has its own, and set num_parallel_workers, or"
        " pass from_dataset(thread_safe=True) if threads may share it"
    )
    CHANGES_THERE = (
        "`{}` changes there while samples are made, and each other worker would change"
        " its own copy"
    )
    CHANGES = (
        "`{}` changes while samples are made, and each worker would change its own"
        " copy; set the number of workers yourself if that is acceptable"
    )
    BELONGS = (
        "{} does not work in workers that share it, or have copies; create it on first"
        " use, so that each worker has its own, and set the number of workers yourself"
    )
    DREW = (
        "it draws from a global random generator, and each worker would draw from its"
        " own; draw from `rng`, or set the number of workers yourself if that is"
        " acceptable"
    )
    GRADIENTS = (
        "its samples carry gradients, which would end in the workers; set the number of"
        " workers yourself if that is acceptable"
    )
    # What this machine allows
    FORKLESS = "worker processes cannot be forked here"
    TRIED = "worker processes were tried lately, and were no faster"
    TRIED_MORE = "more workers were tried lately, and were no faster"
    MEMORY = "the memory budget has no room for more batches"


def is_chosen(why: str) -> bool:
    """Whether the program chose it, and may choose otherwise without harm."""
    return why.startswith(("executor=", "options("))
