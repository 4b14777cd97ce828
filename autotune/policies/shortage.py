"""What is short: cores, as measured or as the run queue shows, or the GIL. Pure."""

from __future__ import annotations

from ...pipeline.observation import Observation, SegmentObservation, ratio
from ..situation import Situation

__all__ = ["CPU_USED", "QUEUED", "cores_of", "cpu_bound", "spent"]

GIL_BOUND = 0.8
"""Share of moments with the GIL held from which threads that compute get no further."""
QUEUED = 0.25
"""Share of their run time that workers wait for a core from which more of them only
wait."""
CPU_USED = 0.85
"""Share of the budget from which on CPU is what binds."""


def cpu_bound(situation: Situation, share: float = CPU_USED) -> bool:
    """Whether no core is to be had, or `share` of the budget is in use."""
    seen = situation.observation
    return spent(seen) or seen.cpu_cores >= share * situation.budget.cpu_cores


def spent(seen: Observation) -> bool:
    """Whether workers with work to do wait for a core, or take turns at the GIL."""
    queued_s = sum(segment.queued_s for segment in seen.segments)
    queued = ratio(queued_s, sum(segment.run_s for segment in seen.segments))
    return queued >= QUEUED or any(gil_bound(seen, s) for s in seen.segments)


def cores_of(situation: Situation, segment: SegmentObservation) -> float:
    """Return the cores that a segment's workers can use at once."""
    alone = gil_bound(situation.observation, segment)
    return 1.0 if alone else situation.budget.cpu_cores


def gil_bound(seen: Observation, segment: SegmentObservation) -> bool:
    """Whether a segment's threads take turns at the GIL."""
    held = seen.gil_held
    return segment.executor == "thread" and held is not None and held >= GIL_BOUND
