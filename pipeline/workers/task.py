"""What crosses the pipe between the trainer and a worker process."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from ..chunk import Chunk, Failure
from ..errors import WorkerError
from ..layout import Layout

__all__ = ["Placement", "RemoteTraceback", "Task", "recall", "travel"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker may write its rows: a batch's slab, and how rows lie in it."""

    key: int
    nbytes: int
    sent: bool
    """Whether the slab's descriptor comes with this message."""
    layout: Layout | None
    """None: that of the task before."""
    rows: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.key, self.nbytes, self.sent, self.layout, self.rows)


@dataclass(frozen=True, slots=True)
class Task:
    """A lease, or the first rows of one, as a worker process needs it.

    It and what it holds say themselves how they are pickled, as that is done for each
    lease: what dataclasses do by themselves takes six times as long.
    """

    number: int
    """Told back with the outcome: a worker may have several at a time."""
    chunk: Chunk
    inputs: list[Any] | None
    placement: Placement | None
    forget: frozenset[int] = frozenset()
    """Keys of slabs that are the trainer's alone now: to be unmapped."""

    def __reduce__(self) -> tuple[Any, ...]:
        rest = self.number, self.chunk, self.inputs, self.placement
        return Task, (*rest, self.forget) if self.forget else rest


class RemoteTraceback(Exception):
    """The traceback of an exception raised in a worker process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def travel(failure: Failure) -> Failure:
    """In the worker: make a failure fit to be pickled, its traceback kept as text.

    An exception that does not come out of pickle as what went in (many with arguments
    of their own do not) travels as a `WorkerError` that quotes it.
    """
    error = failure.error
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 our own exception
    except Exception:  # noqa: BLE001 whatever it raises, it cannot travel
        copy = None
    if type(copy) is not type(error):
        error = WorkerError(f"{type(error).__qualname__}: {error}")
    error.__cause__ = error.__context__ = None
    remote = Failure(error, failure.stage, failure.index, failure.row)
    error.add_note(TRACEBACK + text)
    return remote


TRACEBACK = "penstock: traceback in the worker process:\n"


def recall(failure: Failure) -> Failure:
    """In the trainer: hang the worker's traceback on the exception, as its cause."""
    notes = getattr(failure.error, "__notes__", [])
    for note in [note for note in notes if note.startswith(TRACEBACK)]:
        notes.remove(note)
        failure.error.__cause__ = RemoteTraceback(note.removeprefix(TRACEBACK))
    return failure
