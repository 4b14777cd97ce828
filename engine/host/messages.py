"""What crosses the two pipes between the trainer and the child that hosts its engine.

    data      Begin, BatchesTaken ─▶          ◀─ Batch, FailureMessage, End, Said
    control   (number, question) ─▶    ◀─ (number, answer)

`turn` counts the calls of `begin`: what was on its way before one is told from what
answers it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from ..observe.knob import Knob, KnobName, Value
from ..observe.reading import Reading
from ..plan import BatchPlan, Cursor
from .handover import Packed
from .local import TrainerHost

__all__ = [
    "Batch",
    "BatchesTaken",
    "Begin",
    "End",
    "FailureMessage",
    "Knobs",
    "Question",
    "ReadCounters",
    "Said",
    "SetKnob",
    "View",
]

FACTS = attrgetter(*(field.name for field in fields(BatchPlan)))
POSITION = attrgetter(*(field.name for field in fields(Cursor)))


class Begin(NamedTuple):
    """Go on at `cursor`."""

    round_: int
    cursor: Cursor


class BatchesTaken(NamedTuple):
    """The trainer has so many batches more, so there is room for others."""

    round_: int
    batches: int
    keys: tuple[int, ...]
    """Slabs whose arrays have died."""


class Batch(NamedTuple):
    """One batch, its arrays in slabs."""

    round_: int
    facts: tuple[Any, ...]
    """The fields of its plan: these are unpickled ten times faster than a dataclass."""
    position: tuple[int, ...]
    """Where the next batch starts: the fields of a cursor."""
    packed: Packed
    reading: Reading | None

    @classmethod
    def of(
        cls,
        round_: int,
        plan: BatchPlan,
        cursor: Cursor,
        packed: Packed,
        reading: Reading | None,
    ) -> Batch:
        """Make it of what it says."""
        return cls(round_, FACTS(plan), POSITION(cursor), packed, reading)

    @property
    def plan(self) -> BatchPlan:
        """What it is."""
        return BatchPlan(*self.facts)

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        return Cursor(*self.position)


class FailureMessage(NamedTuple):
    """A batch that cannot be had."""

    round_: int
    error: BaseException


class End(NamedTuple):
    """The epoch is over."""

    round_: int
    cursor: Cursor
    reading: Reading


class Said(NamedTuple):
    """What was logged in the child, for the trainer to log."""

    logger: str
    level: int
    text: str


class Question(Protocol):
    """What may be asked of the child, at any time."""

    def answer(self, host: TrainerHost) -> Any:
        """In the child: find the answer."""
        ...


@dataclass(frozen=True, slots=True)
class ReadCounters:
    """How do all counters stand?"""

    def answer(self, host: TrainerHost) -> Reading:
        """Return a reading; its trainer is the child's own, not the one that asks."""
        return host.read()


class View(NamedTuple):
    """A knob, as it can be sent."""

    operator: str
    name: KnobName
    lower: int
    upper: int
    tunable: bool
    value: Value
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Knobs:
    """Which knobs are there, and how do they stand?"""

    def answer(self, host: TrainerHost) -> tuple[View, ...]:
        """Return them all."""
        return tuple(map(_view, host.knobs()))


def _view(knob: Knob) -> View:
    return View(
        knob.operator,
        knob.name,
        knob.lower,
        knob.upper,
        knob.tunable,
        knob.value,
        knob.choices,
    )


@dataclass(frozen=True, slots=True)
class SetKnob:
    """SetKnob a knob to `value`; None: only look at it."""

    operator: str
    name: KnobName
    value: Value | None = None

    def answer(self, host: TrainerHost) -> Value | None:
        """Return where it stands then; None if there is no such knob any more."""
        for knob in host.knobs():
            if (knob.operator, knob.name) == (self.operator, self.name):
                return knob.value if self.value is None else knob.set(self.value)
        return None
