"""The input and output of a policy, and their form in the JSON log.

A policy decides on its situation and nothing else, so repeating a log's situations to
the same policy yields the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..engine.observe.observation import Knob, KnobName, Observation, Value
from ..errors import SpecError
from ..system.resources import Budget

Row = dict[str, object]
"""One line of the JSON log."""


CHEAPER: tuple[Value, ...] = ("inline", "thread", "process")
"""Kinds of workers, by the resources they take."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of one knob, with the evidence for it."""

    operator: str
    """Its name in the log: `Map(ID:2) decode`."""
    knob: KnobName
    old: Value
    new: Value
    rule: str
    """The rule of the policy that requested it, in one word."""
    reason: str
    """The observation behind it, as a sentence of the log."""
    expected: float
    """Expected samples per second, as a multiple of the present; 1 if something is
    released."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind the reason, as measured."""
    forced: bool = False
    """True if a budget demands it: measured, but never rolled back."""

    @property
    def key(self) -> tuple[str, KnobName]:
        """The knob that it sets."""
        return (self.operator, self.knob)

    @property
    def added(self) -> int:
        """How much it raises a number; 0 for a kind."""
        old, new = self.old, self.new
        return new - old if isinstance(old, int) and isinstance(new, int) else 0

    @property
    def frees(self) -> bool:
        """Whether it releases something: fewer of something, or a cheaper kind."""
        if self.old in CHEAPER and self.new in CHEAPER:
            return CHEAPER.index(self.new) < CHEAPER.index(self.old)
        return self.added < 0 or self.new == "trainer"

    def to_row(self, time_s: float) -> Row:
        """Return the decision as a row of the JSON log."""
        return {
            "time_s": time_s,
            "event": "decision",
            "op": self.operator,
            "knob": self.knob,
            "old": self.old,
            "new": self.new,
            "reason": self.reason,
            "expected": self.expected,
            "rule": self.rule,
            "evidence": dict(self.evidence),
            "forced": self.forced,
        }


@dataclass(frozen=True, slots=True)
class Measure:
    """How training went over some windows."""

    rows_per_s: float
    """Samples per second, loaded and trained on."""
    wait_share: float
    """Exposed wait as a share of the step, 0 to 1."""
    step_s: float
    """Seconds of a step, including the wait; 0 if none was finished."""


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """What a decision did, and whether it stays."""

    decision: Decision
    kept: bool
    """False: rolled back."""
    before: Measure
    after: Measure
    in_step: bool = False
    """Whether the trainer may have waited for others, so that its rate says little."""

    def to_row(self, time_s: float) -> Row:
        """Return the outcome as a row of the JSON log."""
        return {
            "time_s": time_s,
            "event": "outcome",
            "op": self.decision.operator,
            "knob": self.decision.knob,
            "old": self.decision.old,
            "new": self.decision.new,
            "kept": self.kept,
            "before": asdict(self.before),
            "after": asdict(self.after),
        }


KnobKey = tuple[str, KnobName]
"""Operator and name of a knob."""


@dataclass(frozen=True, slots=True)
class KnobView:
    """What a policy may know about a knob: nothing that could set it."""

    value: int
    """0 for a kind."""
    lower: int
    upper: int
    tunable: bool
    kind: str = ""
    """The value of a knob that is one of a few kinds."""
    choices: tuple[str, ...] = ()
    """The possible kinds."""

    @classmethod
    def of(cls, knob: Knob) -> KnobView:
        """Return the present state of a knob."""
        value = knob.value
        if isinstance(value, str):
            return cls(0, 0, 0, knob.tunable, value, knob.choices)
        return cls(value, knob.lower, knob.upper, knob.tunable)


@dataclass(frozen=True, slots=True)
class Situation:
    """One window, the knobs and limits, and the results of earlier decisions."""

    observation: Observation
    knobs: Mapping[KnobKey, KnobView]
    budget: Budget
    outcomes: tuple[DecisionOutcome, ...] = ()
    """Outcomes of the decisions verified since the policy was last called."""

    def to_row(self) -> Row:
        """Return it as a row of the JSON log, without caches, which decide nothing."""
        return {
            "time_s": self.observation.time_s,
            "event": "observation",
            "observation": asdict(replace(self.observation, caches=())),
            "knobs": [
                {"op": operator, "knob": name, **asdict(view)}
                for (operator, name), view in self.knobs.items()
            ],
            "budget": asdict(self.budget),
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Situation:
        """Return the situation that `to_row` wrote.

        Raises:
            SpecError: another version of penstock wrote it.
        """
        try:
            knobs = {
                (knob.pop("op"), knob.pop("knob")): _rebuilt(KnobView, knob)
                for knob in map(dict, row["knobs"])
            }
            return cls(
                _rebuilt(Observation, row["observation"]),
                knobs,
                _rebuilt(Budget, row["budget"]),
                _rebuilt(tuple[DecisionOutcome, ...], row["outcomes"]),
            )
        except (KeyError, TypeError) as error:
            raise SpecError(
                "the log is of another version of penstock"
                f" ({error}); record the run again"
            ) from error


def _rebuilt(kind: Any, row: Any) -> Any:
    """Return the value of this type that `asdict` and JSON made `row` of."""
    of = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: _rebuilt(kinds[name], row[name]) for name in row})
    if get_origin(kind) is tuple:
        return tuple(_rebuilt(of[0], each) for each in row)
    if get_origin(kind) is UnionType and row is not None:
        return _rebuilt(of[0], row)
    return row
