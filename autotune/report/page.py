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
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from .charts import HEIGHT, WIDTH, RankTimeline, timeline
from .recording import Group, Recorded, Row, groups
from .terminal import Report, changed, next_steps, settings, staff, waited, why_none

SHOWN = 200
"""Lines of the log that are visible even without scripts."""
STAFF = ("num_parallel_workers", "executor")
MAX_RANKS = 64
"""Ranks that are drawn."""


@dataclass(frozen=True, slots=True)
class Section:
    """What the page shows about one pipeline."""

    group: Group

    @property
    def verdict(self) -> Row | None:
        """The last verdict; None if nothing was measured."""
        return self.group.verdict

    @property
    def began(self) -> Row | None:
        """The first verdict, if it was a different one."""
        first, last = self.group.first, self.group.verdict
        return first if first is not last else None

    @property
    def waited(self) -> str:
        """How long the trainer waited in the whole run."""
        return waited(self.group.worst)

    @property
    def timelines(self) -> list[RankTimeline]:
        """What each rank did over time."""
        drawn = map(timeline, self.group.ranks[:MAX_RANKS])
        return [each for each in drawn if each is not None]

    @property
    def steps(self) -> list[str]:
        """What to do next."""
        return [] if self.verdict is None else next_steps(self.group.worst)

    @property
    def no_steps(self) -> str:
        """Why there is nothing to do next, or nothing yet; empty if there is."""
        return why_none(self.group.worst)

    @property
    def settings(self) -> list[str]:
        """The lines of code that set the found values by hand."""
        if self.verdict is None:
            return []
        return list(settings(self.group.worst.values(), self.verdict))

    @property
    def changes(self) -> list[str]:
        """The changes that were made, and their effects."""
        return list(changed(self.group.worst))

    @property
    def stages(self) -> list[dict[str, Any]]:
        """The pipeline, source first, with the filling of each connector."""
        if self.verdict is None:
            return []
        last = self.group.worst.windows[-1].stages if self.group.worst.windows else ()
        filled = {stage.name: stage.output for stage in last}
        values = self.group.worst.values()
        return [
            {
                **stage,
                **dict(zip(STAFF, staff(values, stage), strict=True)),
                "filled": filled.get(stage["name"]),
                "blamed": self.verdict["bottleneck"]
                in (stage["name"], *(part for part, _ in stage["parts"])),
            }
            for stage in self.verdict["stages"]
        ]


def page(report: Report, title: str) -> str:
    """Return the page.

    Args:
        report: of the run.
        title: of the page.
    """
    lines = list(_lines(report.pipelines))
    source = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"duration": duration, "percent": percent}
    return environment.from_string(source).render(
        title=title,
        sections=list(map(Section, groups(report.pipelines))),
        damaged=report.damaged,
        width=WIDTH,
        height=HEIGHT,
        lines=lines[-SHOWN:],
        count=len(lines),
        packed=_packed(lines),
    )


def write_page(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page, completely or not at all."""
    shown = os.fspath(path)
    partial = f"{shown}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(page(report, os.path.basename(shown)))
    os.replace(partial, shown)


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
