"""What a tuned run ended with, from the file that `AutotuneLog.result` wrote."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ..pipeline.errors import SpecError
from .situation import KnobKey

__all__ = ["Saved", "load_saved"]

EXECUTORS = {"inline", "thread", "process"}
NAMES = {"num_parallel_workers", "prefetch_size"}


@dataclass(frozen=True, slots=True)
class Saved:
    """Values to begin with."""

    path: str
    knobs: dict[KnobKey, int]
    executors: dict[str, str]
    """By operator."""


def load_saved(path: str | os.PathLike[str]) -> Saved:
    """Read such a file.

    Raises:
        SpecError: there is none, or it is not one.
    """
    shown = os.fspath(path)
    try:
        with open(shown, encoding="utf-8") as file:
            return _saved(shown, json.load(file))
    except OSError as error:
        raise SpecError(
            f"no autotune result can be read from {shown!r} ({error.strerror}); a run"
            " with set_enable_autotune(True, filepath_prefix) writes"
            " <prefix>_<rank>.json when it ends"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"{shown!r} is not an autotune result ({type(error).__name__}: {error});"
            " <prefix>_<rank>.json is one, not the .jsonl beside it"
        ) from error


def _saved(path: str, row: dict[str, Any]) -> Saved:
    knobs: dict[KnobKey, int] = {}
    for knob in row["knobs"]:
        name, value = knob["knob"], knob["value"]
        if name not in NAMES or type(value) is not int or value < 1:
            raise ValueError(f"{name!r} may not be {value!r}")
        knobs[str(knob["op"]), name] = value
    executors = {str(op): str(kind) for op, kind in row.get("executors", {}).items()}
    if strange := set(executors.values()) - EXECUTORS:
        raise ValueError(f"there is no executor {strange.pop()!r}")
    return Saved(path, knobs, executors)
