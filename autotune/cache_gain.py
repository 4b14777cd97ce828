"""What a cache at each point of a pipeline would gain, and what it would need."""

from __future__ import annotations

from ..pipeline.observation import Observation, PartObservation
from . import phrases

__all__ = ["cache_points"]

WORTH = 0.1
"""Share of the work on a sample that a cache must spare to be worth a word."""


def cache_points(observation: Observation) -> tuple[str, ...]:
    """Return one line for each place where a cache is worth a thought.

    A sample that is found needs none of the worker-seconds spent up to there; where
    there is room for a share of the samples only, that share is found (see
    `penstock.cache.admission`), so the gain is in proportion.
    """
    parts = [part for segment in observation.segments for part in segment.parts]
    whole_s = sum(part.run_s_per_row for part in parts)
    lines = []
    spared_s = 0.0
    for part in parts:
        spared_s += part.run_s_per_row
        if part.storable is None or not part.bytes_per_row:
            break
        if spared_s >= WORTH * whole_s:
            lines.append(point(part, spared_s, whole_s, part.storable))
    return tuple(lines)


def point(part: PartObservation, spared_s: float, whole_s: float, count: int) -> str:
    """Say what a cache behind an operation would spare, and take."""
    return (
        f"a cache behind {part.name} would spare {1000 * spared_s:.2f} of"
        f" {1000 * whole_s:.2f} ms of work a sample, and need"
        f" {size(part.bytes_per_row * count)} ({count:,} samples of"
        f" {size(part.bytes_per_row)})"
    )


def size(nbytes: float) -> str:
    """Return a number of bytes for people."""
    if nbytes >= phrases.GIB:
        return f"{nbytes / phrases.GIB:.1f} GiB"
    if nbytes >= phrases.MIB:
        return f"{nbytes / phrases.MIB:.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB"
