"""The figures of a run: all that header, text and charts say is computed here.

The log says now and then what the trainer has done in all. What lies between two such
points is an interval, and what all intervals add up to is what the last point says. So
no chart can show another run than the header.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from ...system.printing import figures
from ..phrases import per_s
from .recording import Recorded, Spent

INTERVALS = 240
"""Most intervals of a run: a chart has hardly more columns on a small screen."""
MIN_INTERVAL_S = 1.0
"""Below this, a few steps make the figures of intervals uneven."""


@dataclass(frozen=True, slots=True)
class Course:
    """What one rank's trainer did in the course of a run.

    Its seconds are those of the trainer's steps: breaks between loops are left out.

    Attributes:
        points: what it had done at some times, in order of time.
        intervals: what it did in each.
        undecided: what it had done before the first decision, if there was one.
        when: when the last interval was, as text.
    """

    points: Sequence[Spent]
    intervals: Sequence[Spent]
    undecided: Spent | None
    when: str

    @property
    def whole(self) -> Spent:
        """What it did in all."""
        return self.points[-1]

    @property
    def last(self) -> Spent:
        """How it was in the end, or is now: what the last verdict tells of, if any."""
        return self.intervals[-1]

    def at(self, time_s: float) -> float:
        """Return a time of the log as seconds of the run, rounded for charts."""
        later = bisect_left(self.points, time_s, key=attrgetter("time_s"))
        return round(self.points[min(later, len(self.points) - 1)].whole_s, 2)

    def __str__(self) -> str:
        """How long the trainer waited in the whole run, when, and the final rate."""
        wait_s, before, parts = self.whole.wait_s, self.undecided, ""
        if before is not None:
            parts = (
                f": {figures(before.wait_s)} s before the first decision,"
                f" {figures(wait_s - before.wait_s)} s after"
            )
        return (
            f"waited {figures(wait_s)} of {figures(self.whole.whole_s)} s"
            f" ({self.whole.wait_share:.0%}){parts}; {self.when} {rate(self.last)}"
        )


def course_of(seen: Recorded) -> Course | None:
    """Return the figures of one pipeline on one rank; None if no step ended."""
    if not seen.points or not seen.points[-1].whole_s:
        return None
    origin, last, told = Spent(0.0), seen.points[-1], seen.told[-1:]
    bounds = _bounds([origin, *seen.points], last)
    if told and told[0]["time_s"] == last.time_s:
        begun = last.since(origin.more(told[0]["trainer"], 0.0))
        before = [p for p in seen.points if p.whole_s < begun.whole_s]
        bounds = [*_bounds([origin, *before, begun], last), last]
    return Course(
        seen.points,
        [after.since(before) for before, after in pairwise(bounds)],
        seen.undecided,
        "at the end" if seen.end or seen.torchs else "most recently",
    )


def _bounds(points: list[Spent], last: Spent) -> list[Spent]:
    """Return the first point, the last one, and those that make no short intervals."""
    shortest_s = max(MIN_INTERVAL_S, last.whole_s / INTERVALS)
    found = points[:1]
    for point in points[1:]:
        if point.whole_s - found[-1].whole_s >= shortest_s:
            found.append(point)
    if found[-1] is not points[-1] and points[-1].whole_s > 0:
        found = [*found[: max(1, len(found) - 1)], points[-1]]  # the rest joins them
    return found


def rate(spent: Spent) -> str:
    """Return the samples per second as text."""
    return f"{per_s(spent.rows_per_s, thousands=',')} samples/s"
