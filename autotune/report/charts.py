"""The charts of the page: what a run did over time, as paths of an SVG picture.

Paths consist of numbers alone. Names given by users are left to the page's template,
which escapes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .recording import Recorded, RecordedWindow

WIDTH, HEIGHT = 960.0, 120.0
"""Size of a chart in its own units: it is drawn as wide as the page."""
POINTS = 480
"""Maximum number of points of a line: of more windows, means of groups are drawn."""
HEADROOM = 1.1
"""Height of a chart relative to its highest value, to keep the line visible."""
KNOBS = ("num_parallel_workers", "prefetch_size")


class Line(NamedTuple):
    """One curve of a chart."""

    path: str
    """The curve as an SVG path."""
    label: str
    latest: float


class Marks(NamedTuple):
    """Decisions at their times: vertical lines, as an SVG path."""

    kept: str
    others: str


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
    marks: Marks
    bands: tuple[Band, ...]


def timeline(seen: Recorded) -> RankTimeline | None:
    """Return the charts of a pipeline, or None if no window was written."""
    if not seen.windows:
        return None
    first, last = seen.windows[0], seen.windows[-1]
    begun = first._replace(time_s=first.time_s - first.window_s)
    windows = [begun, *seen.windows]  # a window's values hold from its beginning
    begun_s = windows[0].time_s
    seconds = max(windows[-1].time_s - begun_s, 1e-9)

    def x_of(time_s: float) -> float:
        return round(WIDTH * min(1.0, max(0.0, (time_s - begun_s) / seconds)), 1)

    few = thinned(windows)
    known = [*few, last._replace(values=seen.values())]
    charts = (
        _chart(
            few, x_of, "trainer waits", "%", [("", lambda w: 100 * w.wait_share)], 100
        ),
        _chart(few, x_of, "rate", " samples/s", [("", lambda w: w.rows_per_s)]),
        *(_knob_chart(known, x_of, knob) for knob in KNOBS),
    )
    bands = tuple(_bands(windows, x_of))
    return RankTimeline(seen.rank, seconds, charts, _marks(seen, x_of), bands)


def _marks(seen: Recorded, x_of: Callable[[float], float]) -> Marks:
    trials = [
        (round(x_of(decision["time_s"])), outcome is not None and outcome["kept"])
        for decision, outcome in seen.trials()
    ]
    kept = {x for x, stays in trials if stays}
    return Marks(_upright(kept), _upright({x for x, _ in trials} - kept))


def _upright(places: Iterable[int]) -> str:
    return "".join(f"M{x} 0V{HEIGHT:g}" for x in sorted(places))


def thinned(windows: Sequence[RecordedWindow]) -> list[RecordedWindow]:
    """Return at most `POINTS` windows, even in time; rates and waits are means."""
    if len(windows) <= POINTS:
        return list(windows)
    times = [window.time_s for window in windows]
    step_s = (times[-1] - times[0]) / POINTS
    found, start = [], 0
    for number in range(1, POINTS + 1):
        stop = bisect_left(times, times[0] + number * step_s, start + 1)
        some = windows[start:stop]
        if not some:
            break
        found.append(
            some[-1]._replace(
                rows_per_s=sum(w.rows_per_s for w in some) / len(some),
                wait_share=sum(w.wait_share for w in some) / len(some),
            )
        )
        start = stop
    return found


Value = Callable[[RecordedWindow], float]


def _chart(
    windows: Sequence[RecordedWindow],
    x_of: Callable[[float], float],
    title: str,
    unit: str,
    values: Sequence[tuple[str, Value]],
    most: float = 0.0,
    *,
    steps: bool = False,
) -> Chart:
    columns = [(label, [value(w) for w in windows]) for label, value in values]
    highest = max((max(column) for _, column in columns), default=0.0)
    top = most or HEADROOM * highest or 1.0
    xs = [x_of(window.time_s) for window in windows]
    lines = tuple(
        Line(path_of(xs, column, top, steps=steps), label, column[-1])
        for label, column in columns
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


def _knob_chart(
    windows: Sequence[RecordedWindow], x_of: Callable[[float], float], knob: str
) -> Chart:
    names = list(dict.fromkeys(op for w in windows for op, k in w.values if k == knob))

    def value_of(name: str) -> Value:
        return lambda window: float(window.values.get((name, knob), 0))

    values = [(name, value_of(name)) for name in names]
    return _chart(windows, x_of, knob, "", values, steps=True)


def _bands(
    windows: Sequence[RecordedWindow], x_of: Callable[[float], float]
) -> list[Band]:
    """Return the regimes, if there are several."""
    starts = [
        w
        for a, w in zip([None, *windows], windows, strict=False)
        if a is None or a.regime != w.regime
    ]
    if len(starts) < 2:
        return []
    edges = [x_of(w.time_s) for w in starts] + [WIDTH]
    return [
        Band(x, round(after - x, 1), window.regime)
        for x, after, window in zip(edges, edges[1:], starts, strict=False)
    ]
