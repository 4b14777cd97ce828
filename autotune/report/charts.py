"""The charts of the page: what a run did over time, as paths of an SVG picture.

Paths consist of numbers alone. Names given by users are left to the page's template,
which escapes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ..saved import NAMES
from .recording import Recorded, RecordedWindow

WIDTH, HEIGHT = 960.0, 120.0
"""Size of a chart in its own units: it is drawn as wide as the page."""
HEADROOM = 1.1
"""Height of a chart relative to its highest value, to keep the line visible."""


class Line(NamedTuple):
    """One curve of a chart."""

    path: str
    """The curve as an SVG path."""
    label: str
    latest: float


@dataclass(frozen=True, slots=True)
class Chart:
    """One quantity over time."""

    title: str
    unit: str
    """Shown after a number."""
    most: float
    """Value at its upper edge; the lower one is 0."""
    lines: tuple[Line, ...]


class Band(NamedTuple):
    """A time in which batches were of one kind."""

    x: float
    width: float
    label: str


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one pipeline did on one rank."""

    rank: int
    seconds: float
    charts: tuple[Chart, ...]
    kept: str
    """Decisions that were kept, at their times: vertical lines, as an SVG path."""
    others: str
    """The other decisions."""
    bands: tuple[Band, ...]


def timeline(seen: Recorded) -> RankTimeline:
    """Return the charts of a pipeline of which at least one window was written."""
    first, last = seen.windows[0], seen.windows[-1]
    begun = first._replace(time_s=first.time_s - first.window_s)
    windows = [begun, *seen.windows]  # a window's values hold from its beginning
    seconds = max(last.time_s - begun.time_s, 1e-9)

    def x_of(time_s: float) -> float:
        share = (time_s - begun.time_s) / seconds
        return round(WIDTH * min(1.0, max(0.0, share)), 1)

    xs = [x_of(window.time_s) for window in windows]
    waits = [100 * window.wait_share for window in windows]
    charts = [
        _chart("trainer waits", "%", xs, {"": waits}, most=100),
        _chart("rate", " samples/s", xs, {"": [w.rows_per_s for w in windows]}),
    ]
    values = [*(window.values for window in windows), seen.values()]
    for knob in NAMES:
        names = dict.fromkeys(op for each in values for op, k in each if k == knob)
        columns = {op: [float(v.get((op, knob), 0)) for v in values] for op in names}
        charts.append(_chart(knob, "", [*xs, WIDTH], columns, steps=True))
    trials = [
        (round(x_of(decision["time_s"])), outcome is not None and outcome["kept"])
        for decision, outcome in seen.trials()
    ]
    kept = {x for x, stays in trials if stays}
    return RankTimeline(
        rank=seen.rank,
        seconds=seconds,
        charts=tuple(charts),
        kept=_upright(kept),
        others=_upright({x for x, _ in trials} - kept),
        bands=_bands(windows, x_of),
    )


def _upright(places: Iterable[int]) -> str:
    return "".join(f"M{x} 0V{HEIGHT:g}" for x in sorted(places))


def _chart(
    title: str,
    unit: str,
    xs: Sequence[float],
    columns: Mapping[str, Sequence[float]],
    *,
    most: float = 0.0,
    steps: bool = False,
) -> Chart:
    top = most or HEADROOM * max(map(max, columns.values()), default=0.0) or 1.0
    lines = tuple(
        Line(path_of(xs, column, top, steps=steps), label, column[-1])
        for label, column in columns.items()
    )
    return Chart(title, unit, top, lines)


def path_of(
    xs: Sequence[float], ys: Sequence[float], top: float, *, steps: bool = False
) -> str:
    """Return the path of a curve.

    Args:
        xs: horizontal positions of its points, in the chart's units.
        ys: their heights, with `top` as the upper edge.
        top: above 0.
        steps: each value holds until the next; otherwise a line connects them.
    """
    heights = [f"{HEIGHT * (1 - min(y, top) / top):.1f}" for y in ys]
    points = [f"{x:g},{y}" for x, y in zip(xs, heights, strict=True)]
    if not steps:
        return "M" + "L".join(points)
    later = zip(xs[1:], heights[1:], strict=True)
    return "M" + points[0] + "".join(f"H{x:g}V{y}" for x, y in later)


def _bands(
    windows: Sequence[RecordedWindow], x_of: Callable[[float], float]
) -> tuple[Band, ...]:
    """Return the regimes, if there are several."""
    groups = groupby(windows, key=attrgetter("regime"))
    begun = [(regime, x_of(next(group).time_s)) for regime, group in groups]
    ends = [x for _, x in begun[1:]] + [WIDTH]
    if len(begun) < 2:
        return ()
    return tuple(
        Band(x, round(end - x, 1), regime)
        for (regime, x), end in zip(begun, ends, strict=True)
    )
