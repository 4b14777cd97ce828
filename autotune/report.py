"""What a tuned run found, told at its end from its `<prefix>_<rank>.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ..errors import SpecError
from . import phrases

Row = Mapping[str, Any]
SETTINGS = ("num_parallel_workers", "prefetch_size", "executor")
"""Of a stage, that a user can write down."""


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of a log that tell something. `print` it."""

    verdicts: tuple[Row, ...]
    """Explanations, as `Explanation.to_dict`, in the order they were made."""
    outcomes: tuple[Row, ...]
    """What came of changes of knobs."""
    moves: tuple[Row, ...]
    """Changes of executors."""

    @property
    def kept(self) -> tuple[Row, ...]:
        """The changes that stand."""
        return tuple(row for row in self.outcomes if row["kept"])

    def __str__(self) -> str:
        if not self.verdicts:
            return "nothing was measured: no step of a tuned loop was finished."
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        first, last = self.verdicts[0], self.verdicts[-1]
        yield f"began:  {_told(first)}"
        if first["bottleneck"] is not None:
            yield f"        bottleneck {first['bottleneck']}; {first['cause']}"
        if len(self.verdicts) > 1:
            yield f"ended:  {_told(last)}"
            yield f"        {last['cause']}"
        yield from self._changes()
        for stage in last["stages"]:
            yield "set by hand:  " + _settings(stage, last.get("face"))
        for step in last["advice"]:
            yield f"try:  {step}"

    def _changes(self) -> Iterator[str]:
        moves = [row for row in self.moves if row["outcome"] in ("moved", "kept")]
        if not self.kept and not moves:
            yield "changed: nothing; it was as good as could be found, or had no time."
        for row in moves:
            yield f"changed: {row['op']}: executor {row['old']} -> {row['new']}"
        for row in self.kept:
            before, after = row["before"], row["after"]
            yield (
                f"changed: {row['op']}: {row['knob']} {row['old']} -> {row['new']},"
                f" {before['rows_per_s']:.0f} -> {after['rows_per_s']:.0f}/s,"
                f" wait {before['wait_share']:.0%} -> {after['wait_share']:.0%}"
            )
        tried = len(self.outcomes) - len(self.kept)
        if tried:
            yield f"tried and taken back: {tried}"


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read the log of a tuned run.

    Raises:
        SpecError: there is none, or it is not one.
    """
    shown = os.fspath(path)
    try:
        with open(shown, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return _report(rows)
    except OSError as error:
        raise SpecError(
            f"no log can be read from {shown!r} ({error.strerror}); a run with"
            " set_enable_autotune(True, filepath_prefix) writes <prefix>_<rank>.jsonl"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            f"{shown!r} is not the log of a tuned run ({type(error).__name__}:"
            f" {error}); <prefix>_<rank>.jsonl is one, not the .json beside it"
        ) from error


def _report(rows: Sequence[Row]) -> Report:
    def of(event: str) -> tuple[Row, ...]:
        return tuple(row for row in rows if row["event"] == event)

    verdicts = tuple(row for row in of("verdict") if row["stages"] is not None)
    return Report(verdicts, of("outcome"), of("executor"))


def _told(row: Row) -> str:
    """A verdict with its figures."""
    return (
        f"{row['verdict']}: waiting {row['wait_share']:.0%} of each step,"
        f" {row['rows_per_s']:.0f} samples/s; {phrases.speedup(row['headspace'])}"
    )


def _settings(stage: Row, face: str | None) -> str:
    """Return what a user can write down, in the words of what was run."""
    if face == "DataLoader":
        workers = stage["num_parallel_workers"]
        if stage["executor"] == "inline":
            return f"{face}(num_workers=0)"
        factor = ceil(stage["prefetch_size"] / workers)
        return f"{face}(num_workers={workers}, prefetch_factor={factor})"
    values = ", ".join(f"{name}={stage[name]}" for name in SETTINGS)
    return f"{stage['name']}: {values}"
