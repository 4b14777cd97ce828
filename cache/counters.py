"""What the tiers of one pipeline did, counted by all of its processes.

Each process adds to a row of its own in shared memory, so nothing is sent and no other
process is waited for. A row belongs to whoever has its byte locked: when that process
is gone, another may go on with it, since only sums are asked for.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass, fields

from .locks import ByteLock, try_lock

__all__ = ["Counters", "Counts"]

ROWS = 512
"""Processes of one pipeline on one host that are counted; those beyond add to the last
row without its lock."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals. Times are nanoseconds."""

    misses: int = 0
    """Samples computed."""
    compute_ns: int = 0
    ram_hits: int = 0
    ram_ns: int = 0
    ram_bytes: int = 0
    """Of records read."""
    disk_hits: int = 0
    disk_ns: int = 0
    disk_bytes: int = 0
    waits: int = 0
    """Samples that another thread or process was about to compute."""
    stored: int = 0
    stored_bytes: int = 0
    body_bytes: int = 0
    """Of the stored samples before they were compressed."""
    refused: int = 0
    """Samples for which there was no room."""
    damaged: int = 0
    """Records that were not whole, and were computed anew."""
    compared: int = 0
    """Records of an earlier run that were computed once more, and equal."""
    repeated: int = 0
    """Samples computed twice, to see whether that makes a difference."""
    warnings: int = 0
    """Told or not: the first of a kind is, over all processes."""
    ram_warnings: int = 0
    disk_warnings: int = 0


COLUMNS = {each.name: at for at, each in enumerate(fields(Counts))}
ROW_BYTES = 8 * len(COLUMNS)


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
            os.ftruncate(descriptor, ROWS * ROW_BYTES)
        place = -1 if descriptor is None else descriptor
        self._memory: mmap.mmap | None = mmap.mmap(place, ROWS * ROW_BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self._lock = threading.Lock()
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
        place = self._descriptor
        alone = nullcontext() if place is None else ByteLock(place, ROWS)
        with self._lock, alone:
            was = self.total(name)
            self._numbers[self._start + COLUMNS[name]] += 1
            return not was

    def total(self, name: str) -> int:
        """Return one sum over all processes."""
        return sum(self._numbers[COLUMNS[name] :: len(COLUMNS)])

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
