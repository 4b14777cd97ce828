"""What penstock raises. Each text names the value, the rule and the cure.

    PenstockError
    ├── SpecError     a pipeline that cannot be built          (also a ValueError)
    ├── SampleError   a function broke its contract            (also a TypeError)
    ├── BudgetError   a budget too small for what was asked    (also a ValueError)
    ├── StateError    a saved state of another pipeline        (also a ValueError)
    └── WorkerError   a worker process that died               (also a RuntimeError)

An exception raised by the user's own function keeps its type: it is re-raised as it is,
with a note (PEP 678) that names the stage, the sample and the step.
"""

from __future__ import annotations

import operator
from types import TracebackType

__all__ = [
    "CLOSED",
    "BudgetError",
    "PenstockError",
    "SampleError",
    "SpecError",
    "StateError",
    "WorkerError",
    "check",
    "checked_seed",
]


class PenstockError(Exception):
    """The root of everything penstock raises on its own account."""


class SpecError(PenstockError, ValueError):
    """The pipeline as described cannot be built."""


class SampleError(PenstockError, TypeError):
    """A stage's function returned what no batch can be made of."""


class BudgetError(PenstockError, ValueError):
    """A budget is smaller than the least that the pipeline needs."""


class StateError(PenstockError, ValueError):
    """A state does not fit this pipeline, or is damaged."""


class WorkerError(PenstockError, RuntimeError):
    """A worker process died and its work could not be done again."""


def add_note(error: BaseException, text: str) -> None:
    """Do as `error.add_note`, also where its class lets nobody change it."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes.append(text)
    else:
        set_on(error, "__notes__", [text])


set_on = BaseException.__setattr__
"""Sets an attribute of an exception, as `setattr`, whatever its class says."""


NOTE = "penstock: in "
"""What a note begins with that says where in a pipeline an exception was raised."""
PACKAGE = __name__.partition(".")[0] + "."


def users_frames(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without frames of this package.

    So whoever reads it sees their loop and then the line of theirs that failed. What no
    function of the user's has raised keeps all of them.
    """
    traceback, frames = error.__traceback__, []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    notes = getattr(error, "__notes__", ())
    users = any(note.startswith(NOTE) for note in notes)
    kept = frames
    if users or (frames and not _is_own(frames[-1])):
        kept = [each for each in frames if not _is_own(each)]
    found = None
    for each in reversed(kept):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _is_own(traceback: TracebackType) -> bool:
    return str(traceback.tb_frame.f_globals.get("__name__", "")).startswith(PACKAGE)


CLOSED = "this pipeline was closed; iterate it again to start over"


def check(condition: object, text: str) -> None:
    """Raise `SpecError` with this text unless the condition holds."""
    if not condition:
        raise SpecError(text)


def checked_seed(seed: int) -> int:
    """Return `seed` as an int of 64 bits, or raise `SpecError`."""
    try:
        value = operator.index(seed)
    except TypeError:
        value = -1
    check(
        0 <= value < 2**64,
        f"`seed` must be an int, >= 0 and < 2**64, got {seed!r}; "
        "pass for instance seed=0",
    )
    return value
