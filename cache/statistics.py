"""What a cache did, counted over all of its processes.

Each process adds to its own row in shared memory, so it sends nothing and waits for no
other process. A process owns a row by locking its byte. When it ends, another process
may continue the row, since only sums matter.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields
from typing import Any

from ..system.file_locks import ByteLock, try_lock

MIB = 1 << 20
# Samples found, and samples made, that show whether a cache saves anything.
MANY = 100
LOSS = (
    "; to find one takes {:.3g} ms, and to make one {:.3g}: without this cache, the"
    " pipeline is faster"
)
# Bytes of a cache per byte of its samples, and per sample: the overhead of records.
ROOM, RECORD_BYTES = 1.1, 256
# Finding a sample takes at most this long, plus its bytes at this rate. Rows of a
# table, every one found, came at 9,500 to 16,000 a second.
FINDING_S, FOUND_BYTES_PER_S = 100e-6, 1e9
# Rows of counts. Each process of a pipeline on one host owns one; any beyond the first
# 511 share the last row, without its lock.
ROWS = 512

# The kinds of warnings. Only the first of a kind, over all processes, is logged.
KINDS = (
    *("no claims", "damaged", "changed", "disk full", "no disk"),
    *("no RAM", "RAM short", "RAM stopped", "other RAM", "unshared RAM"),
)


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """What one tier did."""

    name: str
    """`RAM` or `disk`."""
    hits: int
    """Samples found here."""
    records: int
    """Number of records, including those of other jobs on this host."""
    nbytes: int
    """Size of these records in bytes."""
    capacity: int
    """Bytes that the tier may hold."""
    evictions: int
    """Records dropped to make room: from RAM by any process, from disk by this one."""
    seconds_saved: float
    """Worker-seconds that hits here saved over computing the samples again."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache did: totals of this pipeline on this host since it began.

    Times are in nanoseconds.
    """

    misses: int = 0
    """Samples computed."""
    compute_ns: int = 0
    ram_hits: int = 0
    ram_ns: int = 0
    disk_hits: int = 0
    disk_ns: int = 0
    stored: int = 0
    stored_bytes: int = 0
    refused: int = 0
    """Samples that found no room."""
    damaged: int = 0
    """Damaged records, whose samples were computed again."""
    compared: int = 0
    """Records of an earlier run that were computed again for comparison."""
    repeated: int = 0
    """Samples computed twice, to see whether the results differ."""
    warnings: int = 0
    """Bit n is set once a warning of the kind `KINDS[n]` was logged."""
    name: str = ""
    """Name of the cache in the log, such as `Cache(ID:2)`."""
    tiers: tuple[TierStatistics, ...] = ()

    def saved_s(self, hits: int, took_ns: int) -> float:
        """Return the seconds saved by finding `hits` samples in `took_ns`, 0 or more.

        Computing a sample that was found is assumed to take the mean time of the
        misses.
        """
        if not self.misses:
            return 0.0
        again_ns = hits * self.compute_ns / self.misses
        return max(0.0, (again_ns - took_ns) / 1e9)

    @property
    def line(self) -> str:
        """A summary in one line."""
        parts = [
            f"{tier.name} {tier.hits:,} ({tier.nbytes / MIB:,.0f} of"
            f" {tier.capacity / MIB:,.0f} MiB, {tier.seconds_saved:.1f} s of work"
            " saved)"
            for tier in self.tiers
        ]
        short = f"; no room for {self.refused:,}" if self.refused else ""
        return (
            f"{self.name}: {self.hit_share:.0%} of samples found: {', '.join(parts)}"
            f"{short}{self._loss}"
        )

    @property
    def _loss(self) -> str:
        """What to do if samples are found more slowly than made; else nothing."""
        if min(self.hits, self.misses) < MANY:
            return ""
        found_ms = (self.ram_ns + self.disk_ns) / 1e6 / self.hits
        made_ms = self.compute_ns / 1e6 / self.misses
        return LOSS.format(found_ms, made_ms) if found_ms > made_ms else ""

    @property
    def hits(self) -> int:
        """Samples found in any tier."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_share(self) -> float:
        """Share of samples, 0 to 1, that were found."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


# Most namespaces of one pipeline; records of any others are compared each time.
NAMESPACES = 64
# Where each count is in a row.
COLUMNS = {field.name: at for at, field in enumerate(fields(CacheStatistics)[:-2])}
# Where the pairs of a namespace and its count of equal records begin.
AGREED = ROWS * len(COLUMNS)
END = AGREED + 2 * NAMESPACES
NBYTES = 8 * END


def found_s(sample_bytes: float) -> float:
    """Return the seconds that finding a sample of this size takes at most."""
    return FINDING_S + sample_bytes / FOUND_BYTES_PER_S


def room_for(samples: int, sample_bytes: float) -> int:
    """Return the bytes that a cache needs for so many samples of this size."""
    return int((ROOM * sample_bytes + RECORD_BYTES) * samples)


class Counters:
    """A row of counts, and the sums over all rows.

    Args:
        descriptor: a shared file of `NBYTES` zeros; `close` closes it. None means that
            this process counts for itself.

    Raises:
        OSError: there is no memory for the file.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        place = -1 if descriptor is None else descriptor
        self._memory: mmap.mmap | None = mmap.mmap(place, NBYTES)
        self._numbers = memoryview(self._memory).cast("q")
        # A row is this process's own, so only its threads must keep out of each other's
        # way. What all processes read before they write takes the byte lock, too.
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

    def first(self, kind: str) -> bool:
        """Return whether a warning is the first of its kind over all processes."""
        bit = 1 << KINDS.index(kind)
        with self._lock, suppress(TimeoutError), self._alone:
            is_first = not self.total("warnings") & bit  # set in one row at most
            self._numbers[self._start + COLUMNS["warnings"]] += bit * is_first
            return is_first
        return False  # a process that was stopped in here was the first

    def agree(self, namespace: bytes, records: int) -> int:
        """Add to the number of a namespace's records that were compared and equal.

        Returns:
            the number over all processes; 0 if there is no room to count.
        """
        name = int.from_bytes(namespace, "little", signed=True) or 1
        with self._lock, suppress(TimeoutError), self._alone:
            for at in range(AGREED, END, 2):
                if self._numbers[at] in (0, name):
                    self._numbers[at] = name
                    count = max(0, self._numbers[at + 1] + records)
                    self._numbers[at + 1] = count
                    return count
        return 0

    def total(self, name: str) -> int:
        """Return one sum over all processes."""
        return sum(self._numbers[COLUMNS[name] : AGREED : len(COLUMNS)])

    def totals(self) -> CacheStatistics:
        """Return the sums over all processes."""
        totals: dict[str, Any] = {name: self.total(name) for name in COLUMNS}
        return CacheStatistics(**totals)

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        if self._memory is not None:
            self._numbers.release()
            self._memory.close()
            self._memory = None
            if self._descriptor is not None:
                os.close(self._descriptor)
