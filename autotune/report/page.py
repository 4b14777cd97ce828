"""The page of a run: one HTML file that needs no network, for `penstock report --html`.

Its drawings use the same rows as the terminal's report. Every text of the user's goes
through the template, which escapes it; the page's script only adds text.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..saved import write_whole
from .charts import HEIGHT, WIDTH, timeline
from .recording import Group, Recorded, Recording, groups
from .terminal import changed, settings, stages_of, waited, why_none

SHOWN = 200
"""Lines of the log that are visible even without scripts."""
MAX_RANKS = 64
"""Ranks that are drawn."""


def page(recording: Recording, title: str) -> str:
    """Return the page.

    Args:
        recording: of the run.
        title: of the page.
    """
    lines = list(_lines(recording.pipelines))
    source = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"duration": duration, "percent": percent}
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


def percent(share: float) -> str:
    """Return a share, 0 to 1, in percent."""
    return f"{100 * share:.0f}%"
