"""The files that a tuned run wrote, read back: what happened to each pipeline.

A run that was killed leaves rows behind, perhaps with half a row at the end; complete
rows count. A day of eight ranks has 100,000 windows, so only a few figures of each are
kept.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.observe.observation import ratio
from ...errors import SpecError, check
from ..saved import UNREADABLE, check_version

Row = Mapping[str, Any]
KnobName = tuple[str, str]
"""Operator and knob."""
Values = Mapping[KnobName, int | str]

NO_LOG = (
    "no log can be read from {!r} ({}); a run with set_enable_autotune(True, prefix),"
    " or `penstock run --log PREFIX train.py`, writes PREFIX_<rank>.jsonl"
)
STRANGE = (
    "{!r} is not the log of a tuned run ({}); PREFIX_<rank>.jsonl is one, not the .json"
    " beside it"
)


class RecordedWindow(NamedTuple):
    """The content of a window's row."""

    time_s: float
    """On the clock of its rank: see `Recorded.wall_s`."""
    window_s: float
    rows_per_s: float
    wait_share: float
    regime: str
    held_bytes: int
    values: Values
    """The values in force."""


def window_of(row: Row) -> RecordedWindow:
    """Return the content of a window's row."""
    seen, trainer = row["observation"], row["observation"]["trainer"]
    spent_s = trainer["wait_s"] + trainer["gap_s"]
    share = (
        trainer["wait_s"] / spent_s
        if spent_s
        else seen["segments"][-1]["output"]["empty"]
    )
    knobs = row["knobs"]
    return RecordedWindow(
        row["time_s"],
        seen["window_s"],
        ratio(trainer["rows"], seen["window_s"]),
        share,
        seen["regime"],
        seen["held_bytes"],
        {(each["op"], each["knob"]): each["kind"] or each["value"] for each in knobs},
    )


@dataclass(slots=True)
class Recorded:
    """One pipeline on one rank. Rows are as they were written, in that order."""

    name: str
    rank: int
    begun: Row | None = None
    windows: list[RecordedWindow] = field(default_factory=list)
    segments: Sequence[Row] = ()
    """Those of the last window, as they were written."""
    latest: Row | None = None
    """The last window in which training went on, as it was written."""
    changes: list[Row] = field(default_factory=list)
    """Decisions, their outcomes, and what the engine moved."""
    verdicts: list[Row] = field(default_factory=list)
    """The first and the last; others are only in `said`, as the log told them."""
    said: list[Row] = field(default_factory=list)
    torchs: list[Row] = field(default_factory=list)
    """The measurements of loops that torch's own workers loaded."""
    spent: Row | None = None
    """How long the trainer has waited and worked in all, as last written."""
    undecided: Row | None = None
    """The same before the first decision."""
    end: Row | None = None
    """Written when tuning ends; None: it is still running, or was killed."""
    _since: int = 0
    """The first change after the last window."""

    def add(self, row: Row) -> None:
        """Add a row."""
        match row["event"]:
            case "begin":
                self.begun, self.end = self.begun or row, None
                self.rank = int(row["rank"])
            case "end":
                self.end = row
            case "spent":
                self.spent = row
                if row["decides"] and self.undecided is None:
                    self.undecided = row
            case "observation":
                self.windows.append(window_of(row))
                self._since = len(self.changes)
                self.segments = row["observation"]["segments"]
                worked = all(segment["rows"] > 0 for segment in self.segments)
                if worked and row["observation"]["trainer"]["steps"] > 0:
                    self.latest = row
            case "verdict":
                if row["stages"] is not None:
                    self.verdicts[1:] = [row] if self.verdicts else []
                    self.verdicts = self.verdicts or [row]
            case event:
                places = {
                    "decision": self.changes,
                    "outcome": self.changes,
                    "executor": self.changes,
                    "said": self.said,
                    "torch": self.torchs,
                }
                places[event].append(row)

    @property
    def wall_s(self) -> float:
        """Seconds since 1970 at time 0 of its clock; 0 if unknown."""
        begun = self.begun
        return 0.0 if begun is None else float(begun["wall_s"] - begun["time_s"])

    @property
    def tuned_s(self) -> float:
        """Seconds from the beginning of its first window to the end of the last."""
        if not self.windows:
            return 0.0
        first, last = self.windows[0], self.windows[-1]
        return last.time_s - first.time_s + first.window_s

    @property
    def waited_s(self) -> float:
        """Seconds that its trainer waited in all windows that were read."""
        tuned = sum(window.wait_share * window.window_s for window in self.windows)
        return tuned + sum(float(row["trainer"]["wait_s"]) for row in self.torchs)

    @property
    def told(self) -> list[Row]:
        """The verdicts: the tuner's, or those on loops that torch loads by itself."""
        return self.verdicts or self.torchs

    def values(self) -> dict[KnobName, int | str]:
        """Return the values in force at the end, or where the log breaks off."""
        if self.end is not None:
            found = {(k["op"], k["knob"]): k["value"] for k in self.end["knobs"]}
            kinds = self.end["executors"].items()
            return {**found, **{(op, "executor"): kind for op, kind in kinds}}
        values = dict(self.windows[-1].values) if self.windows else {}
        for row in self.changes[self._since :]:
            if row["event"] == "outcome":
                values[row["op"], row["knob"]] = row["new" if row["kept"] else "old"]
            elif row["event"] == "decision" or row["outcome"] in MOVED:
                values[row["op"], row["knob"]] = row["new"]
        return values

    def trials(self) -> list[tuple[Row, Row | None]]:
        """Return each decision with its outcome; None if that is not known yet."""
        found: list[tuple[Row, Row | None]] = []
        deciding: dict[KnobName, Row] = {}
        for row in self.changes:
            key = row["op"], row["knob"]
            if row["event"] == "decision":
                deciding[key] = row
            elif row["event"] == "outcome" and key in deciding:
                found.append((deciding.pop(key), row))
        return [*found, *((row, None) for row in deciding.values())]

    def unjudged(self) -> list[Row]:
        """Return the decisions whose effect has not been measured yet."""
        return [decision for decision, outcome in self.trials() if outcome is None]


MOVED = ("moved", "kept")


@dataclass(frozen=True, slots=True)
class Recording:
    """The logs of a run: one for each rank, with one pipeline or several in each."""

    pipelines: tuple[Recorded, ...]
    """In the order in which they began, rank by rank."""
    damaged: int = 0
    """Lines that could not be read: mostly the last one of a run that was killed."""


@dataclass(frozen=True, slots=True)
class Group:
    """One pipeline on all its ranks."""

    name: str
    ranks: tuple[Recorded, ...]

    @property
    def worst(self) -> Recorded:
        """The rank that waits most at the end."""
        return max(self.ranks, key=_wait_share)


def groups(pipelines: Iterable[Recorded]) -> list[Group]:
    """Return pipelines with their ranks, the one that was waited for most first."""
    by_name: dict[str, list[Recorded]] = {}
    for each in pipelines:
        by_name.setdefault(each.name, []).append(each)
    found = [Group(name, tuple(ranks)) for name, ranks in by_name.items()]
    return sorted(found, key=lambda group: -max(r.waited_s for r in group.ranks))


def _wait_share(seen: Recorded) -> float:
    return float(seen.told[-1]["wait_share"]) if seen.told else -1.0


def read_recording(path: str | os.PathLike[str], name: str | None = None) -> Recording:
    """Read the log of a run.

    Args:
        path: of one rank's `<prefix>_<rank>.jsonl`, or the prefix, for all ranks.
        name: of the pipelines to read about; None means all.

    Raises:
        SpecError: there is no such log, or no such pipeline in it.
    """
    shown = os.fspath(path)
    files = [shown] if os.path.isfile(shown) else logs_of(shown)
    if not files:
        raise SpecError(NO_LOG.format(shown, "No such file or directory"))
    followers = [Follower(file, number) for number, file in enumerate(files)]
    for follower, file in zip(followers, files, strict=True):
        try:
            follower.read()
            follower.end()
        except OSError as error:
            raise SpecError(NO_LOG.format(file, error.strerror)) from error
    every = [each for follower in followers for each in follower.pipelines]
    named = tuple(each for each in every if name in (None, each.name))
    names = sorted({each.name for each in every})
    check(
        bool(named) or not every,
        f"the log has no pipeline {name!r}; it has {', '.join(names)}",
    )
    return Recording(named, sum(each.damaged for each in followers))


def logs_of(prefix: str) -> list[str]:
    """Return the logs of a prefix, by rank."""
    ranks = {
        int(rank): found
        for found in glob.glob(glob.escape(prefix) + "_*.jsonl")
        if (rank := Path(found).stem.rpartition("_")[2]).isdigit()
    }
    return [ranks[rank] for rank in sorted(ranks)]


ROW = re.compile(
    rb'\{"pipeline": ("(?:[^"\\]|\\.)*"), (?:"time_s": [^,]+, )?"event": "(\w+)"'
)
"""The beginning of a row: its pipeline and event, in the form in which logs have it."""
CHANGES = (b"decision", b"outcome", b"executor")
LARGE = 1 << 21
"""Size of a log, some 800 windows, above which not every window is examined."""
BLOCK = 1 << 20
"""Bytes that are read at a time."""


class Follower:
    """Reads a log as it grows. Of a large one, every second or tenth window counts.

    The window before a change and the last one always count: they have the values.

    Args:
        path: of one rank's file.
        number: its number among several.
    """

    def __init__(self, path: str, number: int = 0) -> None:
        self._path, self._number = path, number
        self._offset = 0
        self._rest = b""
        self._windows = 0
        # The latest window of each pipeline, if it was skipped.
        self._passed: dict[bytes, bytes] = {}
        self._found: dict[str, Recorded] = {}
        self.damaged = 0
        """Lines that could not be read."""

    @property
    def pipelines(self) -> tuple[Recorded, ...]:
        """The pipelines read so far, in the order in which they began."""
        return tuple(self._found.values())

    def read(self) -> None:
        """Read what was written since the last call; the last line may be incomplete.

        Raises:
            OSError: the file cannot be read.
            SpecError: it is not such a log.
        """
        with open(self._path, "rb") as file:
            every = 1 + (os.fstat(file.fileno()).st_size - self._offset) // LARGE
            file.seek(self._offset)
            while block := file.read(BLOCK):
                self._offset += len(block)
                *lines, self._rest = (self._rest + block).split(b"\n")
                self._take([each for line in lines for each in self._due(line, every)])
        self._take(list(self._passed.values()))
        self._passed.clear()

    def end(self) -> None:
        """Note that nothing more will be written: half a line is a damaged one."""
        if self._rest:
            self._take([self._rest])
            self._rest = b""

    def _due(self, line: bytes, every: int) -> Iterable[bytes]:
        """Return the lines to take at this one, which may itself be skipped for now."""
        begins = ROW.match(line)
        if every == 1 or begins is None:
            return (line,)
        whose, event = begins.groups()
        if event == b"observation":
            self._windows += 1
            if self._windows % every:
                self._passed[whose] = line
                return ()
            self._passed.pop(whose, None)
        elif event in CHANGES and whose in self._passed:
            return self._passed.pop(whose), line
        return (line,)

    def _take(self, lines: Sequence[bytes]) -> None:
        """Add the rows of lines, except for damaged ones."""
        for line in lines:
            try:
                self._add(json.loads(line))
            except SpecError:
                raise
            except UNREADABLE as error:
                self.damaged += 1
                if not self._found:
                    told = f"{type(error).__name__}: {error}"
                    raise SpecError(STRANGE.format(self._path, told)) from error

    def _add(self, row: Row) -> None:
        if row["event"] == "begin":
            check_version(row, self._path)
        name = row["pipeline"]
        recorded = self._found.get(name) or Recorded(name, self._number)
        recorded.add(row)
        self._found[name] = recorded
