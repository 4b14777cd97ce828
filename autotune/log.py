"""The autotune log: sentences for people, rows for programs, a file for the result.

Sentences go to the logger `penstock.autotune`. With a prefix, each decision, outcome
and situation is also a row of `<prefix>_<rank>.jsonl`, written at once, and at the end
`<prefix>_<rank>.json` has the values that were found. Several pipelines share them:
each line, row and result names its pipeline.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from io import FileIO
from itertools import chain, count
from pathlib import Path
from typing import Any, Self, cast

from ..engine.observe.observation import Move, Observation, TrainerObservation
from . import phrases
from .explain import Explanation, verdict_of
from .policies.policy import Situation, Values
from .saved import VERSION, Row, Saved, write_whole
from .trial import Decision, DecisionOutcome
from .window import lost_share

LOGGER = logging.getLogger("penstock.autotune")

REMARK = "Written by penstock's autotune: the values in force at the end of the run."
UNCHANGED = " Loading did not hold training up; nothing was changed."


# Files of this process: a further loop, or another pipeline, continues in them.
_begun: set[Path] = set()
# By result file and pipeline: the values found, and how many changes were kept.
_found: dict[Path, dict[str, tuple[Saved, int]]] = {}
# Names of the pipelines being tuned.
_tuned: set[str] = set()
# The user's functions that are called with each verdict.
_listeners: list[Callable[[str, Explanation], object]] = []
# The verdict is repeated after this long.
VERDICT_S = 60.0
# It may change after this long, twice as long after each change, and half as long again
# while it stays.
VERDICT_CHANGE_S = 5.0
# Fewer steps than this, in less time than this, change no verdict.
FEW_STEPS, FEW_STEPS_S = 4, 2.0
# Bytes of rows that are always written. Beyond them, for all pipelines together,
# windows on which nothing was decided or said are left out above this rate. A day
# therefore takes some 13 MB, and reports can read every row.
FREE_BYTES, BYTES_PER_S = 4_000_000, 100
# Points of a curve of the run, at least, whenever it ends: a day has 3,400.
POINTS = 500


class Spoken:
    """The verdict that was logged last."""

    def __init__(self) -> None:
        self.time_s = float("-inf")
        self._verdict = ""
        self._change_s = VERDICT_CHANGE_S

    def due(self, window: Observation) -> bool:
        """Whether to log the window's verdict now; if so, it counts as logged."""
        steps, told = window.trainer.steps, bool(self._verdict)
        if steps == 0 or (told and steps < FEW_STEPS and window.window_s < FEW_STEPS_S):
            return False
        verdict = verdict_of(lost_share(window))
        changes = verdict != self._verdict
        if window.time_s - self.time_s < (self._change_s if changes else VERDICT_S):
            return False
        if told:
            patience_s = self._change_s * (2.0 if changes else 0.5)
            self._change_s = min(max(patience_s, VERDICT_CHANGE_S), VERDICT_S)
        self._verdict, self.time_s = verdict, window.time_s
        return True


class AutotuneLog:
    """Owns the two files of one rank. Only the tuner's thread writes to it.

    A full disk ends the files with one warning, never the training.
    """

    def __init__(
        self, prefix: str | None = None, rank: int = 0, name: str = ""
    ) -> None:
        """Open the files, if a prefix is given.

        Args:
            prefix: of their paths; None means no files.
            rank: the rank they belong to.
            name: name of the tuned pipeline; if another one is being tuned under the
                same name, it gets a number.
        """
        self.name = _free(name)
        result = Path(f"{prefix}_{rank}.json").absolute()
        self._result = None if prefix is None else result
        self._rows: FileIO | None = None
        # Time of the latest row: sentences belong to the row before.
        self._time_s: float | None = None
        self._kept = self._written = 0  # changes, and bytes of rows
        self._begun_s: float | None = None  # time of the first window
        self._spent_s = float("-inf")  # of the latest row on what the trainer has spent
        self._passed: Row | None = None  # the latest window, if it was left out
        if prefix is not None:
            try:
                # Unbuffered: a run that is killed leaves its rows behind, and who
                # reads the file meanwhile finds whole lines.
                path = result.with_suffix(".jsonl")
                if path not in _begun:
                    path.unlink(missing_ok=True)
                self._rows = path.open("ab", buffering=0)
                _begun.add(path)
            except OSError as error:
                self._give_up(error)
        clocks = {"wall_s": time.time(), "rank": rank, "time_s": time.perf_counter()}
        self._write({"event": "begin", "version": VERSION, **clocks})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, sentence: str) -> None:
        """Log one line for people."""
        self._catch_up()
        announce(sentence, self.name)
        self._write({"event": "said", "time_s": self._time_s, "text": sentence})

    def situation(self, situation: Situation) -> None:
        """Write a policy's input: enough to ask the policy again."""
        if self._rows is None:
            return
        due = FREE_BYTES + BYTES_PER_S * self._passed_s(situation.observation.time_s)
        self._passed = situation.to_row()
        if self._written * max(1, len(_tuned)) <= due:
            self._catch_up()

    def spent(
        self, trained: TrainerObservation, time_s: float, event: str = ""
    ) -> None:
        """Write what the trainer has done in all: reports have no other figures.

        Args:
            trained: what it did since tuning began.
            time_s: now.
            event: what follows: a decision, a verdict or the end. If nothing does, it
                is written only where a curve of all of the run would show it.
        """
        finest_s = self._passed_s(time_s) / POINTS
        if not event and time_s - self._spent_s < finest_s:
            return
        time_s = self._spent_s = max(time_s, self._spent_s)
        self._write(
            {
                "time_s": time_s,
                "event": "spent",
                "before": event,
                "rows": trained.rows,
                "wait_s": trained.wait_s,
                "gap_s": trained.gap_s,
            }
        )

    def _passed_s(self, now_s: float) -> float:
        """Return the seconds since the first window."""
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        return now_s - self._begun_s

    def decision(self, decision: Decision, time_s: float) -> None:
        """Log a change that is applied."""
        self.say(decision.reason)
        self.say(phrases.request(decision))
        self._write(
            {
                "time_s": time_s,
                "event": "decision",
                "op": decision.operator,
                "knob": decision.knob,
                "old": decision.old,
                "new": decision.new,
                "reason": decision.reason,
                "expected": decision.expected,
                "rule": decision.rule,
                "evidence": dict(decision.evidence),
                "forced": decision.forced,
            }
        )

    def outcome(self, outcome: DecisionOutcome, time_s: float) -> None:
        """Log the outcome of a change."""
        self._kept += outcome.kept
        self.say(phrases.outcome(outcome))
        self._write(
            {
                "time_s": time_s,
                "event": "outcome",
                "op": outcome.decision.operator,
                "knob": outcome.decision.knob,
                "old": outcome.decision.old,
                "new": outcome.decision.new,
                "kept": outcome.kept,
                "before": asdict(outcome.before),
                "after": asdict(outcome.after),
            }
        )

    def moved(self, move: Move) -> None:
        """Log that the engine moved something by itself, or could not."""
        self.say(move.line)
        self._write({"event": "executor", **asdict(move)})

    def verdict(self, explanation: Explanation, time_s: float) -> None:
        """Log who waits for whom, from time to time."""
        self.say(explanation.line)
        self._explained("verdict", explanation, time_s)
        _tell(self.name, explanation)

    def torchs(self, explanation: Explanation) -> None:
        """Write the verdict on a loop that torch's own workers loaded."""
        self._explained("torch", explanation, time.perf_counter())

    def _explained(self, event: str, explanation: Explanation, time_s: float) -> None:
        told = {"line": explanation.line, **explanation.to_dict()}
        self._write({"time_s": time_s, "event": event, **told})

    def result(self, saved: Saved, unjudged: Sequence[Decision] = ()) -> None:
        """Log and write the final values.

        Args:
            saved: the values.
            unjudged: changes among them that have not been verified yet.
        """
        for line in _summary(saved.knobs):
            self.say(line)
        self._write(
            {
                "event": "end",
                "time_s": self._time_s,
                "unjudged": [
                    [decision.operator, decision.knob] for decision in unjudged
                ],
                "wall_s": time.time(),
                **saved.to_row(),
            }
        )
        if self._result is None:
            return
        found = _found.setdefault(self._result, {})
        before, kept = found.get(self.name, (saved, 0))
        found[self.name] = saved.beside(before), kept + self._kept
        try:
            write_whole(self._result, _text(found))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the files. Idempotent."""
        _tuned.discard(self.name)
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()

    def _catch_up(self) -> None:
        """Write the latest window, if it was left out so far."""
        row, self._passed = self._passed, None
        if row is not None:
            self._write(row)

    def _write(self, row: Row) -> None:
        if self._rows is None:
            return
        self._time_s = cast("float", row["time_s"])
        line = json.dumps({"pipeline": self.name, **row}) + "\n"
        self._written += len(line)
        try:
            self._rows.write(line.encode())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        LOGGER.warning(
            "the autotune log could not be written (%s), and logging ends; tuning"
            " continues; to keep the log, check the folder's space and permissions",
            error,
        )
        self._result = None
        with suppress(OSError):
            self.close()


def announce(text: str, pipeline: str, level: int = logging.INFO) -> None:
    """Log a line about a pipeline, for people."""
    LOGGER.log(level, "%s", f"{pipeline}: {text}" if pipeline else text)


def on_verdict(listener: Callable[[str, Explanation], object]) -> Callable[[], object]:
    """Have `listener(name, explanation)` called with each verdict of a tuned pipeline.

    It is called in the tuner's thread, when the log records a verdict: once a minute
    and when it changes. If it raises, the exception is logged and it is not called
    again.

    Args:
        listener: takes the pipeline's name in the log, and what `explain()` would say.

    Returns:
        A function that stops further calls.
    """
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def _tell(name: str, explanation: Explanation) -> None:
    """Call every listener; one that raises is removed."""
    for listener in list(_listeners):
        try:
            listener(name, explanation)
        except Exception:
            _listeners.remove(listener)
            logging.getLogger("penstock").exception(
                "a listener of verdicts failed, and gets no more of them"
            )


class Shown(logging.Handler):
    """Writes lines to the present stderr, above any progress bar of tqdm or rich.

    rich puts a stream of its own in stderr's place while a bar is shown; tqdm does not.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            line = self.format(record)
            bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
            if not getattr(bars, "_instances", ()):  # it has no public name for them
                sys.stderr.write(f"{line}\n")
            else:
                bars.write(line, file=sys.stderr)
        except Exception:  # noqa: BLE001 as handlers do
            self.handleError(record)


def show_by_default(rank: int = 0) -> None:
    """Show the log on stderr, if logging is not configured and this is rank 0."""
    if rank == 0 and not LOGGER.hasHandlers():
        shown = Shown()
        shown.setFormatter(logging.Formatter("[autotune] %(message)s"))
        LOGGER.addHandler(shown)
        LOGGER.setLevel(logging.INFO)


def _free(name: str) -> str:
    """Return a name under which no other pipeline is being tuned."""
    numbered = (f"{name}-{number}" for number in count(2))
    free = next(each for each in chain([name], numbered) if each not in _tuned)
    if free:
        _tuned.add(free)
    return free


def _text(found: Mapping[str, tuple[Saved, int]]) -> str:
    """Return the result file of several pipelines."""
    pipelines = {
        name: {"summary": _summary(saved.knobs), "kept": kept, **saved.to_row()}
        for name, (saved, kept) in found.items()
    }
    kept = sum(kept for _, kept in found.values())
    remark = REMARK if kept else REMARK + UNCHANGED
    whole = {"version": VERSION, "remark": remark, "pipelines": pipelines}
    return json.dumps(whole, indent=2) + "\n"


def _summary(knobs: Values) -> list[str]:
    """Return one line per operator, with all its knobs."""
    by_operator: dict[str, list[str]] = {}
    for (operator, name), value in knobs.items():
        by_operator.setdefault(operator, []).append(f"{name}: {value}")
    return [f"{op} ({', '.join(values)})" for op, values in by_operator.items()]
