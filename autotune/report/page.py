"""The page of a run: one HTML file that needs no network, for `penstock report --html`.

It shows the same rows and figures as the terminal's report. uPlot draws the charts; a
copy of it lies here. Every text of the user's goes through Jinja, which escapes it, or
is packed with the log and the charts; the page's script only adds text.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import accumulate, chain
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..log import NAMES, write_whole
from .recording import Course, Group, Recorded, Recording, course_of, groups
from .terminal import changed, moments, settings, stages_of, why_none

# Lines of the log that are visible even without scripts.
SHOWN = 200
# Ranks that are drawn.
MAX_RANKS = 64
# Latest decisions of a rank that are marked and listed.
MAX_MARKS = 200
# Latest values of a knob that are said in words.
MAX_SAID = 8


def page(recording: Recording, title: str) -> str:
    """Return the page.

    Args:
        recording: of the run.
        title: of the page.
    """
    lines = list(_lines(recording.pipelines))
    sections = list(map(_section, groups(recording.pipelines)))
    text = {
        name: files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "uplot.min.js", "uplot.min.css")
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"percent": "{:.0%}".format}
    ranks = [rank for each in sections for rank in each["ranks"]]
    packed = json.dumps({"lines": lines, "ranks": ranks}).encode()
    rendered = environment.from_string(text["page.html"]).render(
        title=title,
        sections=sections,
        damaged=recording.damaged,
        lines=lines[-SHOWN:],
        count=len(lines),
        # As a browser unpacks it.
        packed=base64.b64encode(gzip.compress(packed, mtime=0)).decode(),
        library=text["uplot.min.js"],
        style=text["uplot.min.css"],
    )
    # Names may be paths, and these need not be text.
    return rendered.encode("utf-8", "backslashreplace").decode()


def write_page(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write the page, completely or not at all."""
    write_whole(path, page(recording, os.path.basename(path)))


def _section(group: Group) -> dict[str, Any]:
    """Return what the page shows about one pipeline."""
    seen = group.worst
    known = {
        "group": group,
        "course": course_of(seen),
        "verdict": None,
        "ranks": [
            drawn(course)
            for rank in group.ranks[:MAX_RANKS]
            if (course := course_of(rank))
        ],
        "changes": list(changed(seen)),
    }
    if not seen.told:
        return known
    first, last = seen.told[0], seen.told[-1]
    return {
        **known,
        "verdict": last,
        "began": None if first is last else first,
        "stages": stages_of(seen),
        "no_steps": why_none(seen),
        "settings": list(settings(seen)),
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


def drawn(course: Course) -> dict[str, Any]:
    """Return the charts of one pipeline on one rank, and what is marked in them.

    A chart has times, and a curve of as many values for each label. What `said` has is
    what the curves show, in words. With `steps` 1 a value is in force from its time on,
    with -1 until then.
    """
    lengths_s = (each.whole_s for each in course.intervals)
    ends = [round(end_s, 2) for end_s in accumulate(lengths_s, initial=0.0)]
    waits = [round(100 * each.wait_share, 1) for each in course.intervals]
    rates = [round(each.rows_per_s, 2) for each in course.intervals]
    whole, last = course.whole.wait_share, course.last.wait_share
    charts = [
        {
            "title": "trainer waits",
            "said": [f"{whole:.0%} of the run, {last:.0%} {course.when}"],
            "steps": -1,
            "unit": "%",
            "xs": ends,
            "curves": {"wait": waits[:1] + waits},
        },
        {
            "title": "samples/s",
            "said": [f"{course.last.rate} {course.when}"],
            "steps": -1,
            "unit": "",
            "xs": ends,
            "curves": {"rate": rates[:1] + rates},
        },
        *(_changes(course, knob, ends[-1]) for knob in NAMES),
    ]
    marks = [
        {**each._asdict(), "at_s": course.at(each.time_s)}
        for each in moments(course.seen)
    ]
    return {
        "rank": course.seen.rank,
        "seconds": ends[-1],
        "charts": [chart for chart in charts if chart["curves"]],
        "marks": marks[-MAX_MARKS:],
    }


def _changes(course: Course, knob: str, end_s: float) -> dict[str, Any]:
    """Return a chart of the operators whose knob has changed."""
    found: dict[str, dict[float, float]] = {}
    for time_s, (operator, name), value in course.seen.history:
        if name == knob:  # what it had first, it had from the beginning
            at_s = course.at(time_s) if operator in found else 0.0
            found.setdefault(operator, {})[at_s] = float(value)
    changed = {name: each for name, each in found.items() if len(each) > 1}
    xs = sorted({0.0, end_s, *chain.from_iterable(changed.values())})
    curves = {
        operator: [each[max(at_s for at_s in each if at_s <= x)] for x in xs]
        for operator, each in changed.items()
    }
    said = []
    for operator, each in changed.items():
        values = [f"{value:g}" for value in each.values()]
        earlier = "... -> " if len(values) > MAX_SAID else ""
        said.append(f"{operator}: {earlier}{' -> '.join(values[-MAX_SAID:])}")
    return {
        "title": knob,
        "said": said,
        "steps": 1,
        "unit": "",
        "xs": xs,
        "curves": curves,
    }
