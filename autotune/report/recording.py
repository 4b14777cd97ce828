"""The files that a tuned run wrote, read back: what happened to each pipeline.

A run that was killed leaves rows behind, perhaps with half a row at the end; complete
rows count. A day of eight ranks has 40,000 windows, so only a few figures of each are
kept.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
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
MOVED = ("moved", "kept")
"""The outcomes of the engine's own moves that changed a value."""
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
        {(each["op"], each["knob"]): each["kind"] or each["value"] for each in knobs},
    )


@dataclass(slots=True)
class Recorded:
    """One pipeline on one rank. Rows are as they were written, in that order."""

    name: str
    rank: int = 0
    wall_s: float = 0.0
    """Seconds since 1970 at time 0 of its clock; 0 if unknown."""
    windows: list[RecordedWindow] = field(default_factory=list)
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
    spent: Row | None = None
    """How long the trainer has waited and worked in all, as last written."""
    undecided: Row | None = None
    """The same before the first decision."""
    end: Row | None = None
    """Written when tuning ends; None: it is still running, or was killed."""
    values: dict[KnobName, int | str] = field(default_factory=dict)
    """The values in force at the end, or where the log breaks off."""

    def add(self, row: Row) -> None:
        """Add a row."""
        match row["event"]:
            case "begin":
                self.end, self.rank = None, int(row["rank"])
                self.wall_s = self.wall_s or row["wall_s"] - row["time_s"]
            case "end":
                self.end = row
                knobs = {(k["op"], k["knob"]): k["value"] for k in row["knobs"]}
                kinds = {(op, "executor"): k for op, k in row["executors"].items()}
                self.values = {**knobs, **kinds}
            case "spent":
                self.spent = row
                if row["decides"] and self.undecided is None:
                    self.undecided = row
            case "observation":
                self.windows.append(window_of(row))
                self.values = dict(self.windows[-1].values)
                self.segments = row["observation"]["segments"]
                worked = all(segment["rows"] > 0 for segment in self.segments)
                if worked and row["observation"]["trainer"]["steps"] > 0:
                    self.latest = row
            case "verdict":
                if row["stages"] is not None:
                    self.verdicts = [*self.verdicts[:1], row]
            case "decision" | "outcome" | "executor":
                self._change(row, (row["op"], row["knob"]))
            case event:
                {"said": self.said, "torch": self.torchs}[event].append(row)

    def _change(self, row: Row, key: KnobName) -> None:
        value = row["new"]
        if row["event"] == "decision":
            self.unjudged[key] = row
        elif row["event"] == "executor":
            if row["outcome"] not in MOVED:
                return
            self.moves.append(row)
        else:
            value = row["new" if row["kept"] else "old"]
            if key in self.unjudged:
                self.judged.append((self.unjudged.pop(key), row))
        self.values[key] = value

    @property
    def tuned_s(self) -> float:
        """Seconds from the beginning of its first window to the end of the last."""
        if not self.windows:
            return 0.0
        first, last = self.windows[0], self.windows[-1]
        return last.time_s - first.time_s + first.window_s

    @property
    def waited_s(self) -> float:
        """Seconds that its trainer waited."""
        tuned_s = 0.0 if self.spent is None else float(self.spent["wait_s"])
        return tuned_s + sum(float(row["trainer"]["wait_s"]) for row in self.torchs)

    @property
    def told(self) -> list[Row]:
        """The verdicts: the tuner's, or those on loops that torch loads by itself."""
        return self.verdicts or self.torchs


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


class Recording:
    """The logs of a run, as far as they were read: perhaps while they grow.

    Args:
        files: one rank's each.
        name: of the pipelines to tell of; None means all.
    """

    def __init__(self, files: Sequence[str], name: str | None = None) -> None:
        self._name = name
        self._offsets = dict.fromkeys(files, 0)
        self._found: dict[str, dict[str, Recorded]] = {file: {} for file in files}
        self.damaged = 0
        """Lines that could not be read: mostly the last one of a killed run."""

    @property
    def names(self) -> set[str]:
        """The names of all pipelines."""
        return set(chain.from_iterable(self._found.values()))

    @property
    def pipelines(self) -> tuple[Recorded, ...]:
        """In the order in which they began, rank by rank."""
        every = chain.from_iterable(each.values() for each in self._found.values())
        return tuple(each for each in every if self._name in (None, each.name))

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

    def _take(self, line: bytes, path: str) -> None:
        """Add the row of a line, unless it is damaged."""
        found = self._found[path]
        try:
            row = json.loads(line)
            if row["event"] == "begin":
                check_version(row, path)
            recorded = found.get(row["pipeline"]) or Recorded(row["pipeline"])
            recorded.add(row)
            found[recorded.name] = recorded
        except SpecError:
            raise
        except UNREADABLE as error:
            self.damaged += 1
            if not found:
                told = f"{type(error).__name__}: {error}"
                raise SpecError(STRANGE.format(path, told)) from error


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
    recording = Recording(files, name)
    try:
        recording.read(over=True)
    except OSError as error:
        raise SpecError(
            NO_LOG.format(error.filename or shown, error.strerror)
        ) from error
    names = sorted(recording.names)
    check(
        name in (None, *names) or not names,
        f"the log has no pipeline {name!r}; it has {', '.join(names)}",
    )
    return recording


def logs_of(prefix: str) -> list[str]:
    """Return the logs of a prefix, by rank."""
    ranks = {
        int(rank): found
        for found in glob.glob(glob.escape(prefix) + "_*.jsonl")
        if (rank := Path(found).stem.rpartition("_")[2]).isdigit()
    }
    return [ranks[rank] for rank in sorted(ranks)]
