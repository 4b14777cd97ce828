"""Where a cache would pay: what it would save, and what it would need.

A sample that is found needs none of the worker-seconds spent before the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.observe.observation import Observation
from . import phrases

CACHE_WORTH = 0.1
"""Share of the work on a sample that a cache must save to be worth mentioning."""
FINDING_S = 100e-6
FOUND_BYTES_PER_S = 1e9
"""Finding a sample takes at most this long, plus its bytes at this rate. Rows of a
table, every one found, came at 9,500 to 16,000 a second."""
ROOM, RECORD_BYTES = 1.1, 256
"""Bytes of a cache per byte of its samples, and per sample: the overhead of records."""


@dataclass(frozen=True, slots=True)
class CachePoint:
    """A place for a cache."""

    part: str
    """The operation that it would follow, such as `Map(ID:1) decode`."""
    spared_s: float
    """Worker-seconds per sample up to that operation."""
    whole_s: float
    """Worker-seconds per sample in total."""
    sample_bytes: float
    samples: int

    @property
    def line(self) -> str:
        """What it would save and need, in one line."""
        return (
            f"a cache after {self.part} would save {phrases.ms(self.saved_s)} of"
            f" {phrases.ms(self.whole_s)} ms of work a sample, and need"
            f" {phrases.size(self.room_bytes)} ({self.samples:,} samples of"
            f" {phrases.size(self.sample_bytes)})"
        )

    @property
    def saved_s(self) -> float:
        """Worker-seconds that a sample saves if it is found."""
        return self.spared_s - FINDING_S - self.sample_bytes / FOUND_BYTES_PER_S

    @property
    def room_bytes(self) -> int:
        """Bytes that a cache for all samples must have."""
        return int((ROOM * self.sample_bytes + RECORD_BYTES) * self.samples)


def cache_points(observation: Observation) -> tuple[CachePoint, ...]:
    """Return every place where a cache with room for all samples would save work."""
    parts = [part for segment in observation.segments for part in segment.parts]
    whole_s = sum(part.run_s_per_row for part in parts)
    points = []
    spared_s = 0.0
    for part in parts:
        spared_s += part.run_s_per_row
        if part.storable is None or not part.bytes_per_row:
            break
        size, samples = part.bytes_per_row, part.storable
        point = CachePoint(part.name, spared_s, whole_s, size, samples)
        if point.saved_s >= CACHE_WORTH * whole_s:
            points.append(point)
    return tuple(points)
