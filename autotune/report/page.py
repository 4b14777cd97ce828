"""The page of a run: one HTML file that needs no network, for `penstock report --html`.

Its drawings use the same rows as the terminal's report. They are paths of an SVG
picture, of numbers alone. Every text of the user's goes through the template, which
escapes it; the page's script only adds text.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from ..saved import NAMES, write_whole
from .recording import Group, Recorded, RecordedWindow, Recording, Row, groups
from .terminal import changed, settings, stages_of, waited, why_none

SHOWN = 200
"""Lines of the log that are visible even without scripts."""
MAX_RANKS = 64
"""Ranks that are drawn."""
WIDTH, HEIGHT = 960.0, 120.0
"""Size of a chart in its own units: it is drawn as wide as the page."""
HEADROOM = 1.1
"""Height of a chart relative to its highest value, to keep the line visible."""


def page(recording: Recording, title: str) -> str:
    """Return the page.

    Args:
        recording: of the run.
        title: of the page.
    """
    lines = list(_lines(recording.pipelines))
    source = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"duration": duration, "percent": "{:.0%}".format}
    return environment.from_string(source).render(
        title=title,
        sections=list(map(_section, groups(recording.pipelines))),
        damaged=recording.damaged,
        width=WIDTH,
        height=HEIGHT,
        lines=lines[-SHOWN:],
        count=len(lines),
        packed=_packed(lines),
    )


def write_page(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write the page, completely or not at all."""
    write_whole(path, page(recording, os.path.basename(path)))


def _section(group: Group) -> dict[str, Any]:
    """Return what the page shows about one pipeline."""
    seen = group.worst
    if not seen.told:
        return {"group": group, "verdict": None}
    first, last = seen.told[0], seen.told[-1]
    return {
        "group": group,
        "verdict": last,
        "began": None if first is last else first,
        "waited": waited(seen),
        "stages": stages_of(seen),
        "no_steps": why_none(seen),
        "settings": list(settings(seen)),
        "timelines": [timeline(r) for r in group.ranks[:MAX_RANKS] if r.windows],
        "changes": list(changed(seen)),
    }


def _lines(pipelines: Sequence[Recorded]) -> Iterator[tuple[str, str, str]]:
    """Yield the log in order of time: when, whose, what."""
    rows = (
        (seen.wall_s + (row["time_s"] or 0.0), seen, row["text"])
        for seen in pipelines
        for row in seen.said
    )
    ranks = len({seen.rank for seen in pipelines}) > 1
    for wall_s, seen, text in sorted(rows, key=lambda row: row[0]):
        whose = f"{seen.name}, rank {seen.rank}" if ranks else seen.name
        yield time.strftime("%H:%M:%S", time.localtime(wall_s)), whose, text


def _packed(lines: Sequence[tuple[str, str, str]]) -> str:
    """Return the lines as a browser unpacks them."""
    text = json.dumps(lines, ensure_ascii=False).encode()
    return base64.b64encode(gzip.compress(text, mtime=0)).decode()


def duration(seconds: float) -> str:
    """Return a duration as text for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Line(NamedTuple):
    """One curve of a chart."""

    path: str
    """The curve as an SVG path."""
    label: str
    latest: float


class Chart(NamedTuple):
    """One quantity over time."""

    title: str
    unit: str
    """Shown after a number."""
    most: float
    """Value at its upper edge; the lower one is 0."""
    lines: tuple[Line, ...]


def timeline(seen: Recorded) -> dict[str, Any]:
    """Return what one pipeline did on one rank; at least one window was written.

    `kept` has decisions that were kept, at their times: vertical lines, as an SVG path.
    `others` has the others. `bands` are the times in which batches were of one kind.
    """
    first, last = seen.windows[0], seen.windows[-1]
    begun = first._replace(time_s=first.time_s - first.window_s)
    seconds = max(last.time_s - begun.time_s, 1e-9)

    def x_of(time_s: float) -> float:
        share = (time_s - begun.time_s) / seconds
        return round(WIDTH * min(1.0, max(0.0, share)), 1)

    every = [begun, *seen.windows]  # a window's values hold from its beginning
    # A day has more windows than a screen has columns: the last of each is drawn.
    windows = list({round(x_of(window.time_s)): window for window in every}.values())
    xs = [x_of(window.time_s) for window in windows]
    waits = [100 * window.wait_share for window in windows]
    charts = [
        _chart("trainer waits", "%", xs, {"": waits}, most=100),
        _chart("rate", " samples/s", xs, {"": [w.rows_per_s for w in windows]}),
    ]
    values = [*(window.values for window in windows), seen.values]
    for knob in NAMES:
        names = dict.fromkeys(op for each in values for op, k in each if k == knob)
        columns = {op: [float(v.get((op, knob), 0)) for v in values] for op in names}
        charts.append(_chart(knob, "", [*xs, WIDTH], columns, steps=True))

    def xs_of(decisions: Iterable[Row]) -> set[int]:
        return {round(x_of(each["time_s"])) for each in decisions}

    kept = xs_of(decision for decision, outcome in seen.judged if outcome["kept"])
    decided = xs_of(
        [*seen.unjudged.values(), *(decision for decision, _ in seen.judged)]
    )
    return {
        "rank": seen.rank,
        "seconds": seconds,
        "charts": charts,
        "kept": _upright(kept),
        "others": _upright(decided - kept),
        "bands": _bands(windows, x_of),
    }


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
) -> list[tuple[float, float, str]]:
    """Return where each regime begins, how wide it is, and its name, if several."""
    groups = groupby(windows, key=attrgetter("regime"))
    begun = [(regime, x_of(next(group).time_s)) for regime, group in groups]
    ends = [x for _, x in begun[1:]] + [WIDTH]
    if len(begun) < 2:
        return []
    return [
        (x, round(end - x, 1), regime)
        for (regime, x), end in zip(begun, ends, strict=True)
    ]
