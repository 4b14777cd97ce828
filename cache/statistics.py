"""What a cache did: counted by all of its processes, told to people.

Each process adds to a row of its own in shared memory, so nothing is sent and no other
process is waited for. A row belongs to the process that has its byte locked: when that
process is gone, another may go on with it, since only sums are asked for.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields

from ..system.file_locks import ByteLock, try_lock

MIB = 1 << 20
ROWS = 512
"""Processes of one pipeline on one host that are counted apart; those beyond add to the
last row without its lock."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals. Times are nanoseconds."""

    misses: int = 0
    """Samples computed."""
    compute_ns: int = 0
    ram_hits: int = 0
    ram_ns: int = 0
    disk_hits: int = 0
    disk_ns: int = 0
    waits: int = 0
    """Samples that another thread or process was about to compute."""
    stored: int = 0
    stored_bytes: int = 0
    body_bytes: int = 0
    """Of the stored samples before they were compressed."""
    refused: int = 0
    """Samples for which there was no room."""
    damaged: int = 0
    """Records that were not whole, and were computed again."""
    compared: int = 0
    """Records of an earlier run that were computed once more, and equal."""
    repeated: int = 0
    """Samples computed twice, to see whether that makes a difference."""
    warnings: int = 0
    """Told or not: the first of a kind is, over all processes."""
    ram_warnings: int = 0
    disk_warnings: int = 0


NAMESPACES = 64
"""Of one pipeline; records of those beyond are compared each time."""
COLUMNS = {each.name: at for at, each in enumerate(fields(Counts))}
AGREED = ROWS * len(COLUMNS)
"""Where pairs of a namespace and the records of it that agreed begin."""
END = AGREED + 2 * NAMESPACES


class Counters:
    """A row of counts, and the sum of all rows.

    Args:
        descriptor: of a file of zeros that is shared; closed by `close`. None: this
            process counts for itself.

    Raises:
        OSError: no memory is to be had for the file.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.ftruncate(descriptor, 8 * END)
        place = -1 if descriptor is None else descriptor
        self._memory: mmap.mmap | None = mmap.mmap(place, 8 * END)
        self._numbers = memoryview(self._memory).cast("q")
        self._lock = threading.Lock()
        self._alone: AbstractContextManager[object] = (
            nullcontext() if descriptor is None else ByteLock(descriptor, ROWS)
        )
        rows = range(0 if descriptor is None else ROWS - 1)
        free = (row for row in rows if try_lock(place, row))
        self._start = next(free, ROWS - 1) * len(COLUMNS)

    def add(self, **counts: int) -> None:
        """Add to the counts of these names."""
        with self._lock:
            for name, count in counts.items():
                self._numbers[self._start + COLUMNS[name]] += count

    def first(self, name: str) -> bool:
        """Add one to a count, and return whether it was 0 over all processes."""
        with self._lock, suppress(TimeoutError), self._alone:
            was = self.total(name)
            self._numbers[self._start + COLUMNS[name]] += 1
            return not was
        return False  # whoever was stopped within is the first

    def agree(self, namespace: bytes, records: int) -> int:
        """Add to the records of a namespace that were compared, and equal.

        Returns:
            how many did, over all processes; 0 where there is no room to count.
        """
        name = int.from_bytes(namespace, "little", signed=True) or 1
        with self._lock, suppress(TimeoutError), self._alone:
            for at in range(AGREED, END, 2):
                if self._numbers[at] in (0, name):
                    self._numbers[at] = name
                    agreed = max(0, self._numbers[at + 1] + records)
                    self._numbers[at + 1] = agreed
                    return agreed
        return 0

    def total(self, name: str) -> int:
        """Return one sum over all processes."""
        return sum(self._numbers[COLUMNS[name] : AGREED : len(COLUMNS)])

    def totals(self) -> Counts:
        """Return the sums over all processes."""
        return Counts(**{name: self.total(name) for name in COLUMNS})

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        if self._memory is not None:
            self._numbers.release()
            self._memory.close()
            self._memory = None
            if self._descriptor is not None:
                os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One level."""

    name: str
    """`RAM` or `disk`."""
    hits: int
    """Samples found here."""
    records: int
    nbytes: int
    """Of all records, those of other jobs on this host among them."""
    capacity: int
    evictions: int
    seconds_saved: float
    """Worker-seconds that computing these samples again would have taken longer."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A cache: counts are of this pipeline on this host since it began."""

    name: str
    """As `Cache(ID:2)`."""
    tiers: tuple[TierStatistics, ...]
    misses: int
    """Samples computed."""
    waits: int
    """Samples that another was about to compute, and that were waited for."""
    refused: int
    """Samples computed for which there was no room."""
    damaged: int
    """Records that were not whole; their samples were computed again."""
    ratio: float
    """Bytes of records for each byte of the samples stored; 1.0 before any is."""

    @property
    def line(self) -> str:
        """What it does, in one line."""
        parts = [
            f"{tier.name} {tier.hits:,} ({tier.nbytes / MIB:,.0f} of"
            f" {tier.capacity / MIB:,.0f} MiB, {tier.seconds_saved:.1f} s of work"
            " spared)"
            for tier in self.tiers
        ]
        short = f"; no room for {self.refused:,}" if self.refused else ""
        return (
            f"{self.name}: {self.hit_share:.0%} of samples found: {', '.join(parts)}"
            f"{short}"
        )

    @property
    def hits(self) -> int:
        """Samples found on any level."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_share(self) -> float:
        """Share of samples, 0 to 1, that were found."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


def saved_s(counts: Counts, hits: int, took_ns: int) -> float:
    """Return what finding `hits` samples in `took_ns` saved, in seconds, 0 or more.

    A sample that was found counts as long as those did, in the mean, that were not.
    """
    if not counts.misses:
        return 0.0
    anew_ns = hits * counts.compute_ns / counts.misses
    return max(0.0, (anew_ns - took_ns) / 1e9)
