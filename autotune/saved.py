"""The final values of a tuned run, written to and read from `<prefix>_<rank>.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isclose
from threading import get_ident
from typing import Any

from ..errors import SpecError, check
from .policies.policy import KnobKey, Values
from .trial import CHEAPER

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
        known = self.cpu_cores
        return known is None or isclose(known, cpu_cores, rel_tol=SAME_CORES)

    def beside(self, other: Saved) -> Saved:
        """Return these values, plus another run's for operators that these lack."""
        regimes = {
            name: {**other.regimes.get(name, {}), **self.regimes.get(name, {})}
            for name in {**other.regimes, **self.regimes}
        }
        return Saved(
            {**other.knobs, **self.knobs},
            {**other.executors, **self.executors},
            regimes,
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
    found = read_saved(path)
    meant = [found[name]] if name in found else list(found.values())
    whose = repr(name) if name in found else "any pipeline"
    check(
        any(saved.knobs for saved in meant),
        f"{os.fspath(path)!r} has no values to start with: the run that wrote it tuned"
        f" nothing of {whose}, because no stage had workers that penstock may tune;"
        " leave load_autotune() out, or load the file of a run that tuned something",
    )
    if name in found:
        return found[name]
    fitting = {n: s for n, s in found.items() if s.operators & set(operators)}
    check(
        len(fitting) == 1,
        f"{os.fspath(path)!r} has results of {', '.join(map(repr, found))}, and"
        f" {'several' if fitting else 'none'} of them could be of the pipeline {name!r}"
        f" with {', '.join(sorted(operators))}; choose one with"
        " load_autotune(path, name=...)",
    )
    return next(iter(fitting.values()))


def read_saved(path: str | os.PathLike[str]) -> dict[str, Saved]:
    """Return the values of each pipeline in a file, by its name.

    Raises:
        SpecError: there is no such file, or it is not an autotune result.
    """
    shown = os.fspath(path)
    try:
        with open(shown, encoding="utf-8") as file:
            whole = json.load(file)
        check_version(whole, shown)
        return {str(name): _saved(row) for name, row in whole["pipelines"].items()}
    except SpecError:
        raise
    except OSError as error:
        raise SpecError(
            f"cannot read an autotune result from {shown!r} ({error.strerror}); a run"
            " with set_enable_autotune(True, filepath_prefix) writes one when it ends,"
            " as <prefix>_<rank>.json"
        ) from error
    except UNREADABLE as error:
        raise SpecError(
            f"{shown!r} is not an autotune result ({type(error).__name__}: {error});"
            " load <prefix>_<rank>.json, not the .jsonl beside it"
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
