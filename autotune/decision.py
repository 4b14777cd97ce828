"""Decisions: what a policy wants changed, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..pipeline.knob import KnobName

__all__ = ["Decision", "Measure", "Outcome", "Row"]

Row = dict[str, object]
"""One line of the JSON log."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of one knob, with the evidence for it."""

    operator: str
    """As the log shows it: `Map(ID:2) decode`."""
    knob: KnobName
    old: int
    new: int
    rule: str
    """The rule of the policy that asked for it, in one word."""
    reason: str
    """What was seen, as a sentence of the log."""
    expected: float
    """Samples a second after it, as a multiple of those before; 1 where something is
    given back."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind the reason, as measured."""
    forced: bool = False
    """True where a budget demands it: measured, but never rolled back."""

    @property
    def key(self) -> tuple[str, KnobName]:
        """Which knob it turns."""
        return (self.operator, self.knob)

    def to_row(self, time_s: float) -> Row:
        """The decision as a row of the JSON log."""
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
    """Samples a second, loaded and trained on."""
    wait_share: float
    """Exposed wait as a share of the step, 0 to 1."""
    step_s: float
    """Seconds a step takes, wait included; 0 where none was finished."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a decision did, and whether it stands."""

    decision: Decision
    kept: bool
    """False: rolled back."""
    before: Measure
    after: Measure

    def to_row(self, time_s: float) -> Row:
        """The outcome as a row of the JSON log."""
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
