"""The exceptions penstock raises. Each text names the value, the rule and the cure.

    PenstockError
    ├── SpecError     the pipeline cannot be built             (also a ValueError)
    ├── SampleError   a function broke its contract            (also a TypeError)
    ├── BudgetError   a budget is too small for the pipeline   (also a ValueError)
    ├── StateError    a saved state does not fit               (also a ValueError)
    └── WorkerError   a worker died, here or in a Ray cluster  (also a RuntimeError)

An exception raised by the user's own function keeps its type. It is re-raised as it is,
with a note (PEP 678) that names the stage, the sample and the step. A cache refuses
samples with errors of its own: `RandomUpstreamError`, a SpecError, and
`UnstorableError`, a SampleError.
"""

from __future__ import annotations

import logging
import operator
from types import FrameType, TracebackType
from typing import Any

__all__ = [
    "CLOSED",
    "LOGGER",
    "BudgetError",
    "ExitError",
    "PenstockError",
    "SampleError",
    "SpecError",
    "StateError",
    "WorkerError",
    "check",
    "checked_seed",
    "whole_number",
]


class PenstockError(Exception):
    """The base class of penstock's own exceptions."""


class SpecError(PenstockError, ValueError):
    """The pipeline as described cannot be built."""


class SampleError(PenstockError, TypeError):
    """A function returned what cannot become part of a batch, or reach the trainer."""


class BudgetError(PenstockError, ValueError):
    """A budget is below the minimum that the pipeline needs."""


class StateError(PenstockError, ValueError):
    """A saved state does not fit this pipeline, or is damaged."""


class WorkerError(PenstockError, RuntimeError):
    """A worker died and its work could not be repeated.

    It also stands for an exception that could not be sent from a worker as it was.
    """


class ExitError(WorkerError):
    """A sample's function would have ended its worker: by SystemExit or the like."""


def add_note(error: BaseException, text: str) -> None:
    """Add a note like `error.add_note`, even if the class forbids attributes."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes.append(text)
    else:
        set_on(error, "__notes__", [text])


# Set an attribute of an exception, bypassing any `__setattr__` of its class.
set_on = BaseException.__setattr__


# Start of the note that says where in a pipeline an exception was raised.
NOTE = "penstock: in "
PACKAGE = __name__.partition(".")[0] + "."


class SampleNote(str):
    """The note of an error that samples caused; a `collate_fn`'s text may be the same.

    Samples can be made again, as can a batch of them that torch's default collates.
    """

    __slots__ = ()


def users_frames(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without the frames of this package.

    Readers then see their own loop, followed by their own line that failed. An
    exception that no user function raised keeps all its frames.
    """
    traceback, frames = error.__traceback__, []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    of_users = any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))
    if of_users or (frames and not is_own(frames[-1].tb_frame)):
        frames = [entry for entry in frames if not is_own(entry.tb_frame)]
    chain = None
    for entry in reversed(frames):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain


def is_own(frame: FrameType) -> bool:
    """Whether a frame runs code of this package."""
    return str(frame.f_globals.get("__name__", "")).startswith(PACKAGE)


# Where penstock warns of what is no error.
LOGGER = logging.getLogger("penstock")
CLOSED = "this pipeline was closed; iterate it again to start over"


def check(condition: object, text: str) -> None:
    """Raise `SpecError` with this text unless the condition holds.

    Raises:
        SpecError: the condition is false.
    """
    if not condition:
        raise SpecError(text)


def whole_number(name: str, value: Any, low: int, cure: str) -> int:
    """Return an argument as an int >= `low`.

    Raises:
        SpecError: it is not one.
    """
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    check(number >= low, f"`{name}` must be an int >= {low}, got {value!r}; {cure}")
    return number


def checked_seed(seed: int) -> int:
    """Return `seed` as an int in [0, 2**64).

    Raises:
        SpecError: it is not an integer, or out of that range.
    """
    try:
        value = operator.index(seed)
    except TypeError:
        value = -1
    check(
        0 <= value < 2**64,
        f"`seed` must be an int, >= 0 and < 2**64, got {seed!r}; "
        "pass, for example, seed=0",
    )
    return value
