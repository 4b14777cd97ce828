"""The monitor's instruments: cumulative counters, updated under the engine's lock.

An event costs each well under a microsecond (benchmarks/engine_overhead.py). A reading
includes the interval that is still open. So a worker that has waited for a minute, or a
connector that has long been empty, never looks healthy.

They are read as records that add and subtract. Each field of such a record says what it
is: a total, a mean, or (unmarked) the state at the end. So one rule joins two windows
that follow each other, and takes a window out of two readings of what has happened
since the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Self

from ...system.run_queue import waited_ns

TOTAL = {"combines": "total"}
"""Marks a field that grows: windows add up."""
MEAN = {"combines": "mean"}
"""Marks a mean, over the record's time or over its rows."""
SHARE = {"combines": "share"}
"""Marks a mean that never exceeds 1."""
PARTS = {"combines": "parts"}
"""Marks a record, or a tuple of records, of the same time; None stays None."""


class Totals:
    """A frozen dataclass whose fields are marked.

    `earlier + later` joins two windows that follow each other. `later - earlier`, of
    two records that began at the same time, is what happened in between.
    """

    __slots__ = ()

    weight: ClassVar[str] = ""
    """The field by which means are weighted; by default, that of the record around."""

    def __add__(self, later: Self) -> Self:
        joined: Self = _combined(self, later, 1, (0.0, 0.0))
        return joined

    def __sub__(self, earlier: Self) -> Self:
        between: Self = _combined(earlier, self, -1, (0.0, 0.0))
        return between


def _combined(
    first: Any, second: Any, sign: Literal[1, -1], weights: tuple[float, float]
) -> Any:
    """Return the second record with the first one added, or taken away.

    Args:
        first: a record of the same class.
        second: the later record.
        sign: 1 adds the first one, -1 takes it away.
        weights: those of the record around; the first one is negative if taken away.
    """
    if by := second.weight:
        weights = sign * getattr(first, by), getattr(second, by)
    kind: type = type(second)
    changed = {}
    for name, how in _marked(kind):
        a, b = getattr(first, name), getattr(second, name)
        if how == "total":
            changed[name] = b + sign * a
        elif how == "parts":
            changed[name] = _combined_parts(a, b, sign, weights)
        else:
            whole = sum(weights)
            total = a * weights[0] + b * weights[1]
            mean = max(0.0, total / whole) if whole > 0 else 0.0
            changed[name] = min(1.0, mean) if how == "share" else mean
    return replace(second, **changed)


def _combined_parts(
    first: Any, second: Any, sign: Literal[1, -1], weights: tuple[float, float]
) -> Any:
    if isinstance(second, tuple):
        pairs = zip(first, second, strict=True)
        return tuple(_combined(a, b, sign, weights) for a, b in pairs)
    absent = first is None or second is None
    return second if absent else _combined(first, second, sign, weights)


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


class Gauge:
    """How many rows wait in one connector, integrated over time."""

    __slots__ = ("_area", "_empty", "_full", "_last", "capacity", "level")

    def __init__(self, capacity: int, now_ns: int) -> None:
        self.capacity = capacity
        self.level = 0
        self._area = self._empty = self._full = 0
        self._last = now_ns

    def move(self, level: int, now_ns: int) -> None:
        """End the current interval, and continue at `level` rows."""
        elapsed = now_ns - self._last
        if self.level <= 0:
            self._empty += elapsed
        else:
            self._area += self.level * elapsed
            if self.level >= self.capacity:
                self._full += elapsed
        self._last = now_ns
        self.level = level

    def read(
        self, now_ns: int, window_s: float, row_bytes: float = 0.0
    ) -> ConnectorObservation:
        """Return what was seen up to now, since the run began `window_s` ago."""
        self.move(self.level, now_ns)
        share = 1e-9 / window_s if window_s > 0 else 0.0  # of a nanosecond
        return ConnectorObservation(
            self._area * share,
            self.capacity,
            self._empty * share,
            self._full * share,
            row_bytes,
        )


class Wait(Enum):
    """What a worker without a lease is waiting for."""

    INPUT = "input"
    """Rows from the segment before."""
    CREDIT = "credit"
    """Permission to work further ahead of the consumer."""
    MEMORY = "memory"
    """Credit, because the byte budget has no room for another batch."""


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


class PartsMeter:
    """The cost of each operation of a segment. Guarded by the engine lock."""

    def __init__(self, count: int) -> None:
        self._rows = 0
        self._spent = [[0, 0, 0] for _ in range(count)]

    def add(self, parts: Iterable[tuple[int, int, int]], rows: int) -> None:
        """Add the cost of a chunk.

        Args:
            parts: for each operation, its wall time (ns), its CPU time (ns), and the
                bytes of a sample.
            rows: number of rows worked on.
        """
        self._rows += rows
        for spent, (run_ns, cpu_ns, nbytes) in zip(self._spent, parts, strict=True):
            spent[0] += run_ns
            spent[1] += cpu_ns
            spent[2] += nbytes * rows

    @property
    def spent(self) -> list[tuple[int, int, int]]:
        """For each operation, its wall time (ns), its CPU time (ns), and the bytes."""
        return [(run_ns, cpu_ns, nbytes) for run_ns, cpu_ns, nbytes in self._spent]

    def read(self) -> tuple[PartReading, ...]:
        """Return the totals."""
        return tuple(
            PartReading(self._rows, run_ns / 1e9, cpu_ns / 1e9, nbytes)
            for run_ns, cpu_ns, nbytes in self._spent
        )


LONG_NS = 1_000_000
"""Pieces at least this long always have their CPU time measured."""
SOME = 64
"""One in this many shorter pieces is measured."""


class SampledClock:
    """A clock of one thread that is read for some of many similar pieces of its work.

        clock.begin()
        ...                             # one piece
        spent_ns = clock.end(run_ns)

    Reading it takes a system call or two, which may take longer than a short piece. So
    it is read for long pieces and for a few of the others, beginning with the first.
    The rest are assumed to be like the latest measured ones.

    Args:
        read: returns nanoseconds; by default, those that the thread has computed.
        long_ns: pieces of at least this length are always measured.
    """

    __slots__ = (
        "_begun_ns",
        "_last_ns",
        "_long_ns",
        "_read",
        "_run_ns",
        "_share",
        "_spent_ns",
        "_until",
        "total_ns",
    )

    def __init__(
        self, read: Callable[[], int] | None = None, long_ns: int = LONG_NS
    ) -> None:
        self._read = read or time.thread_time_ns
        self._last_ns = self._long_ns = long_ns
        # How many more to skip; the times of those measured, with decaying weights.
        self._until = 0
        self._begun_ns: int | None = None
        self._spent_ns = self._run_ns = self._share = 0.0
        self.total_ns = 0
        """Nanoseconds of all pieces."""

    def begin(self) -> float | None:
        """Begin a piece; return its likely share of the time, or None if measured."""
        if self._last_ns < self._long_ns and self._until:
            self._until -= 1
            self._begun_ns = None
            return self._share
        self._until = SOME
        self._begun_ns = self._read()
        return None

    def end(self, run_ns: int) -> int:
        """End a piece that took `run_ns`; return the nanoseconds by this clock."""
        self._last_ns = run_ns
        if self._begun_ns is None:
            # A sudden long one was waiting; if not, the next ones are measured.
            known_ns = min(self._long_ns, run_ns)
            spent_ns = int(known_ns * self._share)
        else:
            spent_ns = self._read() - self._begun_ns
            self._spent_ns = self._spent_ns / 2 + spent_ns
            self._run_ns = self._run_ns / 2 + run_ns
            self._share = min(1.0, self._spent_ns / max(self._run_ns, 1.0))
        self.total_ns += spent_ns
        return spent_ns


QUEUE_LONG_NS = 5_000_000
"""As `LONG_NS`, for waits for a core: reading them takes some 15 us."""


def own_queue() -> SampledClock:
    """Return a clock of the time that the calling thread waits for a core."""
    return SampledClock(partial(waited_ns, "/proc/thread-self"), QUEUE_LONG_NS)


class WorkerMeter:
    """The time of one worker, or of several in another process: running, or waiting.

    Those in another process may have a second lease waiting while they run one.

    Args:
        now_ns: when they begin.
        workers: how many they are.
    """

    __slots__ = (
        "_alive",
        "_cpu",
        "_rows",
        "_run",
        "_running_since",
        "_since",
        "_squares",
        "_wait",
        "_waiting_since",
        "_workers",
        "clock",
        "leases",
        "waiting_for",
    )

    def __init__(self, now_ns: int, workers: int = 1) -> None:
        self._since = now_ns
        self._workers = workers
        self.clock = SampledClock()
        """The CPU clock of a worker thread."""
        self._rows = self._alive = self._run = self._cpu = 0
        self._squares = 0.0
        self._wait = dict.fromkeys(Wait, 0)
        self.waiting_for: Wait | None = None
        self._waiting_since = 0
        self._running_since = 0
        self.leases = 0
        """Leases that the worker has, including the one it works on."""

    @property
    def begins(self) -> bool:
        """Whether the worker is working on its first lease."""
        return self.leases > 0 and self._rows == 0

    def resize(self, workers: int, now_ns: int) -> None:
        """Note that they are more from now on, or fewer."""
        self._alive += (now_ns - self._since) * self._workers
        self._since = now_ns
        if self.waiting_for is not None:
            what = self.waiting_for
            self._stop_waiting(now_ns)
            self.waiting_for, self._waiting_since = what, now_ns
        self._workers = workers

    def wait(self, what: Wait, now_ns: int) -> None:
        """Note that the worker found nothing to do, for the reason `what`."""
        if self.leases == 0 and self.waiting_for is not what:
            self._stop_waiting(now_ns)
            self.waiting_for = what
            self._waiting_since = now_ns

    def start(self, now_ns: int) -> None:
        """Note that the worker received a lease."""
        if self.waiting_for is not None:
            self._stop_waiting(now_ns)
        if self.leases == 0:
            self._running_since = now_ns
        self.leases += 1

    def stop(self, rows: int, run_ns: int, cpu_ns: int, now_ns: int) -> None:
        """Note that a lease was settled; the next one, if any, starts now.

        `run_ns` and `cpu_ns` are worker-time.
        """
        self._rows += rows
        self._run += run_ns
        self._squares += run_ns * 1e-18 * run_ns
        self._cpu += cpu_ns
        self._running_since = now_ns
        self.leases -= 1

    def read(self, now_ns: int) -> WorkerReading:
        """Return the totals, including the open interval."""
        waits = dict(self._wait)
        if self.waiting_for is not None:
            waits[self.waiting_for] += (now_ns - self._waiting_since) * self._workers
        run = self._run
        if self.leases:
            run += (now_ns - self._running_since) * self._workers
        return WorkerReading(
            rows=self._rows,
            worker_s=(self._alive + (now_ns - self._since) * self._workers) / 1e9,
            run_s=run / 1e9,
            settled_s=self._run / 1e9,
            settled_s2=self._squares,
            cpu_s=self._cpu / 1e9,
            wait_input_s=waits[Wait.INPUT] / 1e9,
            wait_credit_s=(waits[Wait.CREDIT] + waits[Wait.MEMORY]) / 1e9,
            wait_memory_s=waits[Wait.MEMORY] / 1e9,
        )

    def _stop_waiting(self, now_ns: int) -> None:
        if self.waiting_for is not None:
            waited_ns = (now_ns - self._waiting_since) * self._workers
            self._wait[self.waiting_for] += waited_ns
            self.waiting_for = None
