"""The autotune log: sentences for people, rows for programs, a file for the result.

Sentences go to the logger `penstock.autotune`. With a prefix, each decision, outcome
and situation is also a row of `<prefix>_<rank>.jsonl`, written at once, and at the end
`<prefix>_<rank>.json` has the values that were found, for the next run to start with.
Several pipelines share them: each line, row and result names its pipeline.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from io import FileIO
from itertools import chain, count
from math import isclose
from pathlib import Path
from threading import get_ident
from typing import Any, Self, cast

from ..engine.observe.observation import Move, Observation, TrainerObservation
from ..errors import SpecError, check
from . import phrases
from .explain import Explanation, verdict_of
from .policies.policy import KnobKey, Situation, Values
from .trial import CHEAPER, Decision, DecisionOutcome
from .window import lost_share

LOGGER = logging.getLogger("penstock.autotune")

REMARK = "Written by penstock's autotune: the values in force at the end of the run."
UNCHANGED = " Loading did not hold training up; nothing was changed."

# Format version of `<prefix>_<rank>.json` and of the rows in its `.jsonl`.
VERSION = 1
EXECUTORS = {*CHEAPER, "async", "ray"}
NAMES = ("num_parallel_workers", "prefetch_size")
# Suffix of a file that is still being written.
PARTIAL = ".partial"
# CPU budgets within this relative difference count as the same machine.
SAME_CORES = 0.1

# One line of the JSON log, or a part of it.
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Saved:
    """The values that a new run starts with."""

    knobs: Values
    """Values in force at the end."""
    executors: Mapping[str, str]
    """Kinds of workers in force at the end, by operator."""
    regimes: Mapping[str, Values] = field(default_factory=dict)
    """Values for each regime that was met (`Observation.regime`)."""
    cpu_cores: float | None = None
    """Cores that the run could use; None if the file does not say."""

    def values(self, regime: str) -> Values:
        """Return the values for a regime, or those in force at the end if it is new."""
        return self.regimes.get(regime, self.knobs)

    def fits(self, cpu_cores: float) -> bool:
        """Whether the values come from a machine with about as many usable cores."""
        return self.cpu_cores is None or isclose(
            self.cpu_cores, cpu_cores, rel_tol=SAME_CORES
        )

    def beside(self, other: Saved) -> Saved:
        """Return these values, plus another run's for operators that these lack."""
        return Saved(
            {**other.knobs, **self.knobs},
            {**other.executors, **self.executors},
            {
                name: {**other.regimes.get(name, {}), **self.regimes.get(name, {})}
                for name in {**other.regimes, **self.regimes}
            },
            self.cpu_cores,
        )

    @property
    def operators(self) -> set[str]:
        """The operators for which it has values."""
        return {operator for operator, _ in self.knobs}

    def to_row(self) -> Row:
        """Return the values as JSON can hold them."""
        return {
            "machine": {"cpu_cores": self.cpu_cores},
            "knobs": _rows(self.knobs),
            "executors": dict(self.executors),
            "regimes": {name: _rows(values) for name, values in self.regimes.items()},
        }


# Files of this process, and whose they are: a further loop, or another pipeline,
# continues in them.
begun_ranks: dict[Path, int] = {}
# By result file and pipeline: the values found, and how many changes were kept.
_results: dict[Path, dict[str, tuple[Saved, int]]] = {}
# Names of the pipelines being tuned.
_tuned_names: set[str] = set()
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
        steps, has_verdict = window.trainer.steps, bool(self._verdict)
        if steps == 0 or (
            has_verdict and steps < FEW_STEPS and window.window_s < FEW_STEPS_S
        ):
            return False
        verdict = verdict_of(lost_share(window))
        changes = verdict != self._verdict
        if window.time_s - self.time_s < (self._change_s if changes else VERDICT_S):
            return False
        if has_verdict:
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
        # Whether a function of the user's runs now, which may never end.
        self.in_listener = False
        # Time of the latest row: sentences belong to the row before.
        self._time_s: float | None = None
        self._kept_changes = self._written_bytes = 0
        self._begun_s: float | None = None  # time of the first window
        self._spent_s = float("-inf")  # of the latest row on what the trainer has spent
        self._skipped_row: Row | None = None  # the latest window, if it was left out
        if prefix is not None:
            try:
                # Unbuffered: a run that is killed leaves its rows behind, and who
                # reads the file meanwhile finds whole lines.
                path = result.with_suffix(".jsonl")
                if path not in begun_ranks:
                    path.unlink(missing_ok=True)
                self._rows = path.open("ab", buffering=0)
                begun_ranks[path] = rank
            except OSError as error:
                self._give_up(error)
        self._write(
            {
                "event": "begin",
                "version": VERSION,
                "wall_s": time.time(),
                "rank": rank,
                "time_s": time.perf_counter(),
            }
        )

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
        self._skipped_row = situation.to_row()
        if self._written_bytes * max(1, len(_tuned_names)) <= due:
            self._catch_up()

    def spent(
        self, trainer: TrainerObservation, time_s: float, event: str = ""
    ) -> None:
        """Write what the trainer has done in all: reports have no other figures.

        Args:
            trainer: what it did since tuning began.
            time_s: now.
            event: what follows: a decision, a verdict or the end. If nothing does, it
                is written only where a curve of all of the run would show it.
        """
        if not event and time_s - self._spent_s < self._passed_s(time_s) / POINTS:
            return
        time_s = self._spent_s = max(time_s, self._spent_s)
        self._write(
            {
                "time_s": time_s,
                "event": "spent",
                "before": event,
                "rows": trainer.rows,
                "wait_s": trainer.wait_s,
                "gap_s": trainer.gap_s,
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
        self._kept_changes += outcome.kept
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
        for listener in _listeners.copy():
            self.in_listener = True
            try:
                listener(self.name, explanation)
            except Exception:
                _end_calls(listener)
                logging.getLogger("penstock").exception(
                    "a listener of verdicts failed, and gets no more of them"
                )
            self.in_listener = False

    def torchs(self, explanation: Explanation) -> None:
        """Write the verdict on a loop that torch's own workers loaded."""
        self._explained("torch", explanation, time.perf_counter())

    def _explained(self, event: str, explanation: Explanation, time_s: float) -> None:
        head: Row = {"time_s": time_s, "event": event, "line": explanation.line}
        self._write(head | explanation.to_dict())

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
        results = _results.setdefault(self._result, {})
        before, changes = results.get(self.name, (saved, 0))
        results[self.name] = saved.beside(before), changes + self._kept_changes
        try:
            write_whole(self._result, _text(results))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the files. Idempotent."""
        _tuned_names.discard(self.name)
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()

    def _catch_up(self) -> None:
        """Write the latest window, if it was left out so far."""
        row, self._skipped_row = self._skipped_row, None
        if row is not None:
            self._write(row)

    def _write(self, row: Row) -> None:
        if self._rows is None:
            return
        self._time_s = cast("float", row["time_s"])
        line = json.dumps({"pipeline": self.name, **row}) + "\n"
        self._written_bytes += len(line)
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
    return partial(_end_calls, listener)


def _end_calls(listener: Callable[[str, Explanation], object]) -> None:
    with suppress(ValueError):  # the user, or another pipeline's tuner, was first
        _listeners.remove(listener)


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
        handler = Shown()
        handler.setFormatter(logging.Formatter("[autotune] %(message)s"))
        LOGGER.addHandler(handler)
        if not (LOGGER.level or logging.getLogger("penstock").level):
            LOGGER.setLevel(logging.INFO)


def _free(name: str) -> str:
    """Return a name under which no other pipeline is being tuned."""
    numbered = (f"{name}-{number}" for number in count(2))
    free = next(label for label in chain([name], numbered) if label not in _tuned_names)
    if free:
        _tuned_names.add(free)
    return free


def _text(results: Mapping[str, tuple[Saved, int]]) -> str:
    """Return the result file of several pipelines."""
    pipelines = {
        name: {"summary": _summary(saved.knobs), "kept": changes, **saved.to_row()}
        for name, (saved, changes) in results.items()
    }
    changes = sum(changes for _, changes in results.values())
    remark = REMARK if changes else REMARK + UNCHANGED
    return (
        json.dumps(
            {"version": VERSION, "remark": remark, "pipelines": pipelines}, indent=2
        )
        + "\n"
    )


def _summary(knobs: Values) -> list[str]:
    """Return one line per operator, with all its knobs."""
    by_operator: dict[str, list[str]] = {}
    for (operator, name), value in knobs.items():
        by_operator.setdefault(operator, []).append(f"{name}: {value}")
    return [f"{op} ({', '.join(values)})" for op, values in by_operator.items()]


# The result, written and read

# The errors from reading JSON that autotune did not write.
UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, OverflowError),
    RecursionError,
)


def load_saved(
    path: str | os.PathLike[str], name: str, *, operators: Collection[str]
) -> Saved:
    """Read the values of one pipeline from a file.

    Args:
        path: path of the file.
        name: name of the pipeline. If the file has none of this name, the only one that
            has one of these operators is used.
        operators: operators of the pipeline that will start with the values.

    Raises:
        SpecError: there is no such file, it has no values for such a pipeline, or its
            run tuned nothing.
    """
    pipelines = read_saved(path)
    candidates = [pipelines[name]] if name in pipelines else list(pipelines.values())
    whose = repr(name) if name in pipelines else "any pipeline"
    check(
        any(saved.knobs for saved in candidates),
        f"{os.fspath(path)!r} has no values to start with: the run that wrote it tuned"
        f" nothing of {whose}, because no stage had workers that penstock may tune;"
        " leave load_autotune() out, or load the file of a run that tuned something",
    )
    if name in pipelines:
        return pipelines[name]
    matches = {n: s for n, s in pipelines.items() if s.operators & set(operators)}
    check(
        len(matches) == 1,
        f"{os.fspath(path)!r} has results of {', '.join(map(repr, pipelines))}, and"
        f" {'several' if matches else 'none'} of them could be of the pipeline {name!r}"
        f" with {', '.join(sorted(operators))}; choose one with"
        " load_autotune(path, name=...)",
    )
    return next(iter(matches.values()))


def read_saved(path: str | os.PathLike[str]) -> dict[str, Saved]:
    """Return the values of each pipeline in a file, by its name.

    Raises:
        SpecError: there is no such file, or it is not an autotune result.
    """
    path_text = os.fspath(path)
    try:
        with open(path_text, encoding="utf-8") as file:
            whole = json.load(file)
        check_version(whole, path_text)
        return {str(name): _saved(row) for name, row in whole["pipelines"].items()}
    except SpecError:
        raise
    except OSError as error:
        raise SpecError(
            f"cannot read an autotune result from {path_text!r} ({error.strerror}); a"
            " run with set_enable_autotune(True, filepath_prefix) writes one when it"
            " ends, as <prefix>_<rank>.json"
        ) from error
    except UNREADABLE as error:
        raise SpecError(
            f"{path_text!r} is not an autotune result ({type(error).__name__}:"
            f" {error}); load <prefix>_<rank>.json, not the .jsonl beside it"
        ) from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file completely or not at all, so that readers never see half of it.

    Several threads and processes may write the same file at once.
    """
    partial = f"{os.fspath(path)}.{os.getpid()}.{get_ident()}{PARTIAL}"
    try:
        with open(partial, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            os.remove(partial)


def check_version(row: Mapping[str, Any], path: str) -> None:
    """Check that this penstock can read the file that `row` is from.

    penstock 0.1.0 wrote no version; its files have version 1.

    Raises:
        SpecError: the file has another version.
    """
    version = row.get("version", VERSION)
    check(
        type(version) is int and version == VERSION,
        f"{path!r} has format version {version!r}, and this penstock reads {VERSION};"
        " use the penstock that wrote it",
    )


def _saved(row: dict[str, Any]) -> Saved:
    executors = {str(op): str(kind) for op, kind in row.get("executors", {}).items()}
    if strange := set(executors.values()) - EXECUTORS:
        raise ValueError(f"there is no executor {strange.pop()!r}")
    cores = row.get("machine", {}).get("cpu_cores")
    return Saved(
        _values(row["knobs"]),
        executors,
        {str(name): _values(rows) for name, rows in row.get("regimes", {}).items()},
        None if cores is None else float(cores),
    )


def _values(rows: Iterable[Mapping[str, Any]]) -> Values:
    values: dict[KnobKey, int] = {}
    for row in rows:
        name, value = row["knob"], row["value"]
        if name not in NAMES or type(value) is not int or value < 1:
            raise ValueError(f"{name!r} may not be {value!r}")
        values[str(row["op"]), name] = value
    return values


def _rows(values: Values) -> list[Row]:
    return [
        {"op": operator, "knob": name, "value": value}
        for (operator, name), value in values.items()
    ]
