"""The records in which instruments are read: they add and subtract.

Each field of such a record says what it is: a total, a mean, or (unmarked) the state at
the end. So one rule joins two windows that follow each other, and takes a window out of
two readings of what has happened since the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

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
    changed = {}
    for name, how in _marked(kind):
        a, b = getattr(first, name), getattr(second, name)
        if how == "total":
            changed[name] = b + sign * a
        elif how == "parts":
            changed[name] = _combined(a, b, sign, weights)
        else:
            whole = sum(weights)
            total = a * weights[0] + b * weights[1]
            mean = max(0.0, total / whole) if whole > 0 else 0.0
            changed[name] = min(1.0, mean) if how == "share" else mean
    return replace(second, **changed)


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
