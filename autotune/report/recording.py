"""The files that a tuned run wrote, read back: what happened to each pipeline.

A run that was killed leaves rows behind, perhaps with half a row at the end; complete
rows count. A day of eight ranks has 40,000 windows, so only a few figures of each are
kept.

All figures that header, text and charts say are computed here. The log says now and
then what the trainer has done in all. What lies between two such points is an interval,
and what all intervals add up to is what the last point says. So no chart can show
another run than the header.
"""

from __future__ import annotations

import glob
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.observe.observation import ratio
from ...errors import SpecError, check
from ...system.printing import figures
from ..log import UNREADABLE, check_version
from ..phrases import per_s

Row = Mapping[str, Any]
# Operator and knob.
KnobName = tuple[str, str]

NO_LOG = (
    "no log can be read from {!r} ({}); a run with set_enable_autotune(True, prefix),"
    " or `penstock run --log PREFIX train.py`, writes PREFIX_<rank>.jsonl"
)
# Most intervals of a run: a chart has hardly more columns on a small screen.
INTERVALS = 240
# Below this, a few steps make the figures of intervals uneven.
MIN_INTERVAL_S = 1.0
# By how much clocks of a run's ranks may differ, or one may be done before another.
APART_S = 5.0


class Spent(NamedTuple):
    """What the trainer did until some time, or in an interval that ends then.

    The time is on the clock of its rank: see `Recorded.wall_s`. `wait_s` are seconds
    that it waited, `own_s` those of its own part of all steps.
    """

    time_s: float
    wait_s: float = 0.0
    own_s: float = 0.0
    rows: float = 0.0

    @property
    def whole_s(self) -> float:
        """Seconds of all steps."""
        return self.wait_s + self.own_s

    @property
    def wait_share(self) -> float:
        """Wait as a share of the steps, 0 to 1."""
        return ratio(self.wait_s, self.whole_s)

    @property
    def rows_per_s(self) -> float:
        """Samples per second, breaks between loops left out."""
        return ratio(self.rows, self.whole_s)

    @property
    def rate(self) -> str:
        """The samples per second, as text."""
        return f"{per_s(self.rows_per_s, thousands=',')} samples/s"

    def more(self, trainer: Row, time_s: float) -> Spent:
        """Return this and what the trainer did besides, until later."""
        return Spent(
            time_s,
            self.wait_s + trainer["wait_s"],
            self.own_s + trainer["gap_s"],
            self.rows + trainer["rows"],
        )

    def since(self, before: Spent) -> Spent:
        """Return this without what had been done before."""
        return Spent(
            self.time_s,
            self.wait_s - before.wait_s,
            self.own_s - before.own_s,
            self.rows - before.rows,
        )


@dataclass(slots=True)
class Recorded:
    """One pipeline on one rank. Rows are as they were written, in that order."""

    name: str
    rank: int = 0
    wall_s: float = 0.0
    """Seconds since 1970 at time 0 of its clock; 0 if unknown."""
    points: list[Spent] = field(default_factory=list)
    """In order of time."""
    begun: Spent = field(default_factory=lambda: Spent(0.0))
    """What was done before tuning began last."""
    undecided: Spent | None = None
    """What was done before the first decision."""
    history: list[tuple[float, KnobName, int | str]] = field(default_factory=list)
    """When a knob got a value, which one, and the value; its first one included."""
    regimes: list[tuple[float, str]] = field(default_factory=list)
    """When batches became those of another regime, and which one."""
    segments: Sequence[Row] = ()
    """Those of the last window, as they were written."""
    latest: Row | None = None
    """The last window in which training went on, as it was written."""
    unjudged: dict[KnobName, Row] = field(default_factory=dict)
    """The decisions whose effect has not been measured yet."""
    judged: list[tuple[Row, Row]] = field(default_factory=list)
    """The others, with their outcomes."""
    moves: list[Row] = field(default_factory=list)
    """What the engine moved by itself."""
    verdicts: list[Row] = field(default_factory=list)
    """The first and the last; others are only in `said`, as the log told them."""
    said: list[Row] = field(default_factory=list)
    torchs: list[Row] = field(default_factory=list)
    """The measurements of loops that torch's own workers loaded."""
    end: Row | None = None
    """Written when tuning ends; None: it is still running, or was killed."""
    values: dict[KnobName, int | str] = field(default_factory=dict)
    """The values in force at the end, or where the log breaks off."""

    def add(self, row: Row) -> None:
        """Add a row."""
        match row["event"]:
            case "begin":
                self.end, self.rank = None, int(row["rank"])
                self.begun = self.points[-1] if self.points else self.begun
                self.wall_s = self.wall_s or row["wall_s"] - row["time_s"]
            case "end":
                self.end = row
                knobs = {(k["op"], k["knob"]): k["value"] for k in row["knobs"]}
                kinds = {(op, "executor"): k for op, k in row["executors"].items()}
                self._see(row["time_s"], {**knobs, **kinds}, row.get("unjudged", ()))
            case "spent":
                self.points.append(self.begun.more(row, row["time_s"]))
                if row["before"] == "decision":
                    self.undecided = self.undecided or self.points[-1]
            case "observation":
                self._observe(row, row["observation"])
            case "verdict":
                self.verdicts = [*self.verdicts[:1], row]
            case "decision" | "outcome" | "executor":
                self._change(row, (row["op"], row["knob"]))
            case "torch":
                self.points.append(self.begun.more(row["trainer"], row["time_s"]))
                self.torchs.append(row)
            case event:
                {"said": self.said}[event].append(row)

    def _observe(self, row: Row, observation: Row) -> None:
        values = {(k["op"], k["knob"]): k["kind"] or k["value"] for k in row["knobs"]}
        self._see(row["time_s"], values)
        if observation["regime"] != (self.regimes[-1][1] if self.regimes else None):
            self.regimes.append((row["time_s"], observation["regime"]))
        self.segments = observation["segments"]
        worked = all(segment["rows"] > 0 for segment in self.segments)
        if worked and observation["trainer"]["steps"] > 0:
            self.latest = row

    def _see(
        self,
        time_s: float,
        values: Mapping[KnobName, int | str],
        unjudged: Sequence[Sequence[str]] = (),
    ) -> None:
        """Take over all values in force: a change that is none of them was undone.

        A move that failed and the end of a regime undo changes without a row.
        """
        for key, value in values.items():
            self._set(time_s, key, value)
        self.values = dict(values)
        self.unjudged = {
            key: row
            for key, row in self.unjudged.items()
            if values.get(key) == row["new"] or [*key] in unjudged
        }

    def _set(self, time_s: float, key: KnobName, value: int | str) -> None:
        if self.values.get(key) != value:
            self.history.append((time_s, key, value))
        self.values[key] = value

    def _change(self, row: Row, key: KnobName) -> None:
        value = row["new"]
        if row["event"] == "decision":
            self.unjudged[key] = row
        elif row["event"] == "executor":
            if row["outcome"] != "moved":
                return  # nothing has changed
            self.moves.append(row)
        else:
            value = row["new" if row["kept"] else "old"]
            if key in self.unjudged:
                self.judged.append((self.unjudged.pop(key), row))
        self._set(row["time_s"], key, value)

    @property
    def waited_s(self) -> float:
        """Seconds that its trainer waited."""
        return self.points[-1].wait_s if self.points else -1.0

    @property
    def told(self) -> list[Row]:
        """The verdicts: the tuner's, or those on loops that torch loads by itself."""
        return self.verdicts or self.torchs


@dataclass(frozen=True, slots=True)
class Course:
    """What one rank's trainer did in the course of a run.

    Its seconds are those of the trainer's steps: breaks between loops are left out.
    """

    pipeline: Recorded
    intervals: Sequence[Spent]
    """What it did in each."""
    when: str
    """When the last interval was."""

    @property
    def whole(self) -> Spent:
        """What it did in all."""
        return self.pipeline.points[-1]

    @property
    def last(self) -> Spent:
        """How it was in the end, or is now: what the last verdict tells of, if any."""
        return self.intervals[-1]

    def at(self, time_s: float) -> float:
        """Return a time of the log as seconds of the run, rounded for charts."""
        points = self.pipeline.points
        later = bisect_left(points, time_s, key=attrgetter("time_s"))
        return round(points[min(later, len(points) - 1)].whole_s, 2)

    def __str__(self) -> str:
        """How long the trainer waited in the whole run, when, and the final rate."""
        wait_s, before, parts = self.whole.wait_s, self.pipeline.undecided, ""
        if before is not None:
            parts = (
                f": {figures(before.wait_s)} s before the first decision,"
                f" {figures(wait_s - before.wait_s)} s after"
            )
        return (
            f"waited {figures(wait_s)} of {figures(self.whole.whole_s)} s"
            f" ({self.whole.wait_share:.0%}){parts}; {self.when} {self.last.rate}"
        )


def course_of(pipeline: Recorded) -> Course | None:
    """Return the figures of one pipeline on one rank; None if no step ended."""
    if not pipeline.points or not pipeline.points[-1].whole_s:
        return None
    origin, last, verdicts = Spent(0.0), pipeline.points[-1], pipeline.told[-1:]
    bounds = _bounds([origin, *pipeline.points], last)
    if verdicts and verdicts[0]["time_s"] == last.time_s:
        start = last.since(origin.more(verdicts[0]["trainer"], 0.0))
        before = [p for p in pipeline.points if p.whole_s < start.whole_s]
        bounds = [*_bounds([origin, *before, start], last), last]
    intervals = [after.since(before) for before, after in pairwise(bounds)]
    over = pipeline.end or pipeline.torchs
    return Course(pipeline, intervals, "at the end" if over else "most recently")


def _bounds(points: list[Spent], last: Spent) -> list[Spent]:
    """Return the first point, the last one, and those that make no short intervals."""
    shortest_s = max(MIN_INTERVAL_S, last.whole_s / INTERVALS)
    bounds = points[:1]
    for point in points[1:]:
        if point.whole_s - bounds[-1].whole_s >= shortest_s:
            bounds.append(point)
    if bounds[-1] is not points[-1] and points[-1].whole_s > 0:
        bounds = [*bounds[: max(1, len(bounds) - 1)], points[-1]]  # the rest joins them
    return bounds


@dataclass(frozen=True, slots=True)
class Group:
    """One pipeline on all its ranks."""

    name: str
    ranks: tuple[Recorded, ...]

    @property
    def worst(self) -> Recorded:
        """The rank that waited most."""
        return max(self.ranks, key=lambda rank: (bool(rank.told), rank.waited_s))


def groups(pipelines: Iterable[Recorded]) -> list[Group]:
    """Return pipelines with their ranks, the one that was waited for most first."""
    by_name: dict[str, list[Recorded]] = {}
    for pipeline in pipelines:
        by_name.setdefault(pipeline.name, []).append(pipeline)
    return sorted(
        (Group(name, tuple(ranks)) for name, ranks in by_name.items()),
        key=lambda group: -max(rank.waited_s for rank in group.ranks),
    )


class Recording:
    """The logs of a run, as far as they were read: perhaps while they grow.

    Args:
        files: one rank's each.
        name: of the pipelines to tell of; None means all.
    """

    def __init__(self, files: Sequence[str], name: str | None = None) -> None:
        self._name = name
        self._offsets = dict.fromkeys(files, 0)
        self._by_file: dict[str, dict[str, Recorded]] = {file: {} for file in files}
        # Lines that could not be read: mostly the last one of a killed run.
        self.damaged = 0

    @property
    def names(self) -> set[str]:
        """The names of all pipelines."""
        return set(chain.from_iterable(self._by_file.values()))

    @property
    def pipelines(self) -> tuple[Recorded, ...]:
        """In the order in which they began, rank by rank."""
        every = chain.from_iterable(file.values() for file in self._by_file.values())
        return tuple(
            pipeline for pipeline in every if self._name in (None, pipeline.name)
        )

    def read(self, *, over: bool = False) -> None:
        """Read what was written since the last call.

        Args:
            over: nothing more will be written, so half a line is a damaged one.

        Raises:
            OSError: a file cannot be read.
            SpecError: it is not such a log.
        """
        for path, offset in self._offsets.items():
            with open(path, "rb") as file:
                file.seek(offset)
                whole = takewhile(lambda line: line.endswith(b"\n"), file)
                for line in file if over else whole:
                    self._offsets[path] += len(line)
                    self._take(line, path)

    def drop_earlier(self) -> None:
        """Leave out the ranks of an earlier run, which had more, by the same prefix.

        The ranks of one run train at the same time.
        """
        times_s = {
            path: (
                min(
                    p.wall_s + p.points[0].time_s - p.points[0].whole_s
                    for p in measured
                ),
                max(p.wall_s + p.points[-1].time_s for p in measured),
            )
            for path, pipelines in self._by_file.items()
            if (measured := [p for p in pipelines.values() if p.points])
        }
        began_s = max((last_s for _, last_s in times_s.values()), default=0.0)
        for path, (first_s, last_s) in sorted(times_s.items(), key=lambda t: -t[1][1]):
            if last_s < began_s - APART_S:
                self._by_file[path].clear()
            else:
                began_s = min(began_s, first_s)

    def _take(self, line: bytes, path: str) -> None:
        """Add the row of a line, unless it is damaged."""
        pipelines = self._by_file[path]
        try:
            row = json.loads(line)
            if row["event"] == "begin":
                check_version(row, path)
            pipeline = pipelines.get(row["pipeline"]) or Recorded(row["pipeline"])
            pipeline.add(row)
            pipelines[pipeline.name] = pipeline
        except SpecError:
            raise
        except UNREADABLE as error:
            self.damaged += 1
            if not pipelines:
                raise SpecError(
                    f"{path!r} is not the log of a tuned run ({type(error).__name__}:"
                    f" {error}); PREFIX_<rank>.jsonl is one, not the .json beside it"
                ) from error


def read_recording(path: str | os.PathLike[str], name: str | None = None) -> Recording:
    """Read the log of a run.

    Args:
        path: of one rank's `<prefix>_<rank>.jsonl`, or the prefix, for all ranks.
        name: of the pipelines to read about; None means all.

    Raises:
        SpecError: there is no such log, or no such pipeline in it.
    """
    path_text = os.fspath(path)
    ranks = {
        int(rank): file
        for file in glob.glob(glob.escape(path_text) + "_*.jsonl")
        if (rank := Path(file).stem.rpartition("_")[2]).isdigit()
    }
    every = [ranks[rank] for rank in sorted(ranks)]
    files = [path_text] if os.path.isfile(path_text) else every
    check(files, NO_LOG.format(path_text, "No such file or directory"))
    recording = Recording(files, name)
    try:
        recording.read(over=True)
    except OSError as error:
        raise SpecError(
            NO_LOG.format(error.filename or path_text, error.strerror)
        ) from error
    recording.drop_earlier()
    names = sorted(recording.names)
    check(
        name in (None, *names) or not names,
        f"the log has no pipeline {name!r}; it has {', '.join(names)}",
    )
    return recording
