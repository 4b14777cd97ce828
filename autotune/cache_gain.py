"""What a cache at each point of a pipeline would gain, and what it would need."""

from __future__ import annotations

from ..pipeline.observation import Observation
from . import phrases

__all__ = ["cache_points"]

WORTH = 0.1
"""Share of the work on a sample that a cache must spare to be worth a word."""


def cache_points(observation: Observation) -> tuple[str, ...]:
    """Return one line for each segment behind which a cache is worth a thought.

    A sample that is found needs none of the worker-seconds spent up to there; where
    there is room for a share of the samples only, that share is found (see
    `penstock.cache.admission`), so the gain is in proportion.
    """
    segments = observation.segments
    whole_s = sum(segment.run_s_per_row for segment in segments)
    if any(segment.queue_name.startswith("Cache(") for segment in segments):
        return ()
    lines = []
    spared_s = 0.0
    for segment in segments:
        spared_s += segment.run_s_per_row
        if segment.storable is None or not segment.nbytes or not whole_s:
            break
        if spared_s >= WORTH * whole_s:
            nbytes = segment.bytes_per_row * segment.storable
            lines.append(
                f"a cache behind {segment.name} would spare {1000 * spared_s:.2f} of"
                f" {1000 * whole_s:.2f} ms of work a sample, and need"
                f" {size(nbytes)} ({segment.storable:,} samples of"
                f" {size(segment.bytes_per_row)})"
            )
    return tuple(lines)


def size(nbytes: float) -> str:
    """Return a number of bytes for people."""
    if nbytes >= phrases.GIB:
        return f"{nbytes / phrases.GIB:.1f} GiB"
    if nbytes >= phrases.MIB:
        return f"{nbytes / phrases.MIB:.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB"
