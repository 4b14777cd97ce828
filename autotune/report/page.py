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
# First ranks that are drawn, and the one that waits most.
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
    ranks = list(chain.from_iterable(section["ranks"] for section in sections))
    content = json.dumps({"lines": lines, "ranks": ranks}).encode()
    html = environment.from_string(text["page.html"]).render(
        title=title,
        sections=sections,
        damaged=recording.damaged,
        lines=lines[-SHOWN:],
        count=len(lines),
        # As a browser unpacks it.
        packed=base64.b64encode(gzip.compress(content, mtime=0)).decode(),
        library=text["uplot.min.js"],
        style=text["uplot.min.css"],
    )
    # Names may be paths, and these need not be text.
    return html.encode("utf-8", "backslashreplace").decode()


def write_page(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write the page, completely or not at all."""
    write_whole(path, page(recording, os.path.basename(path)))


def _section(group: Group) -> dict[str, Any]:
    """Return what the page shows about one pipeline."""
    pipeline = group.worst
    section = {
        "group": group,
        "course": course_of(pipeline),
        "verdict": None,
        "ranks": [
            drawn(course)
            for at, rank in enumerate(group.ranks)
            if at < MAX_RANKS or rank is pipeline
            if (course := course_of(rank))
        ],
        "changes": list(changed(pipeline)),
    }
    if not pipeline.told:
        return section
    first, last = pipeline.told[0], pipeline.told[-1]
    return {
        **section,
        "verdict": last,
        "began": None if first is last else first,
        "stages": stages_of(pipeline),
        "no_steps": why_none(pipeline),
        "settings": list(settings(pipeline)) if pipeline.verdicts else [],
    }


def _lines(pipelines: Sequence[Recorded]) -> Iterator[tuple[str, str, str]]:
    """Yield the log in order of time: when, whose, what."""
    rows = (
        (pipeline.wall_s + (row["time_s"] or 0.0), pipeline, row["text"])
        for pipeline in pipelines
        for row in pipeline.said
    )
    ranks = len({pipeline.rank for pipeline in pipelines}) > 1
    for wall_s, pipeline, text in sorted(rows, key=lambda row: row[0]):
        whose = f"{pipeline.name}, rank {pipeline.rank}" if ranks else pipeline.name
        yield time.strftime("%H:%M:%S", time.localtime(wall_s)), whose, text


def drawn(course: Course) -> dict[str, Any]:
    """Return the charts of one pipeline on one rank, and what is marked in them.

    A chart has times, and a curve of as many values for each label. What `said` has is
    what the curves show, in words. With `steps` 1 a value is in force from its time on,
    with -1 until then.
    """
    ends = [
        round(end_s, 2)
        for end_s in accumulate((i.whole_s for i in course.intervals), initial=0.0)
    ]
    waits = [round(100 * interval.wait_share, 1) for interval in course.intervals]
    rates = [round(interval.rows_per_s, 2) for interval in course.intervals]
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
        {**moment._asdict(), "at_s": course.at(moment.time_s)}
        for moment in moments(course.pipeline)
    ]
    return {
        "rank": course.pipeline.rank,
        "seconds": ends[-1],
        "charts": [chart for chart in charts if chart["curves"]],
        "marks": marks[-MAX_MARKS:],
    }


def _changes(course: Course, knob: str, end_s: float) -> dict[str, Any]:
    """Return a chart of the operators whose knob has changed."""
    histories: dict[str, dict[float, float]] = {}
    for time_s, (operator, name), value in course.pipeline.history:
        if name == knob:  # what it had first, it had from the beginning
            at_s = course.at(time_s) if operator in histories else 0.0
            histories.setdefault(operator, {})[at_s] = float(value)
    changes = {name: history for name, history in histories.items() if len(history) > 1}
    xs = sorted({0.0, end_s, *chain.from_iterable(changes.values())})
    curves = {
        operator: [history[max(at_s for at_s in history if at_s <= x)] for x in xs]
        for operator, history in changes.items()
    }
    sentences = []
    for operator, history in changes.items():
        values = [f"{value:g}" for value in history.values()]
        earlier = "... -> " if len(values) > MAX_SAID else ""
        sentences.append(f"{operator}: {earlier}{' -> '.join(values[-MAX_SAID:])}")
    return {
        "title": knob,
        "said": sentences,
        "steps": 1,
        "unit": "",
        "xs": xs,
        "curves": curves,
    }
