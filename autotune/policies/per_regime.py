"""What a policy knows, kept apart for each regime that the plan announces.

A schedule that changes the batch or the image size makes other work of the same
pipeline: what was learned of the one size misleads in the other. So each regime has its
own memory, and the values that it was left with. They are in force again at once where
it comes back, in this run or in one that begins with what an earlier one found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from .. import phrases
from ..situation import Decision, KnobKey, Situation
from .policy import Policy

M = TypeVar("M")

Values = Mapping[KnobKey, int]
"""Of knobs."""
RULE = "regime"


@dataclass(frozen=True, slots=True)
class Known(Generic[M]):
    """What is known of one regime."""

    values: Values
    """In force when it was left."""
    memory: M | None = None
    """None: another run found these values."""


@dataclass(frozen=True, slots=True)
class Regimes(Generic[M]):
    """What is remembered from one window to the next."""

    now: str
    """The regime; empty before the first window."""
    memory: M
    """The policy's own, of this regime."""
    known: Mapping[str, Known[M]]


class PerRegime(Generic[M]):
    """Asks a policy that knows of one regime alone, the one now in force.

    Args:
        policy: that is asked.
        found: by an earlier run, for each regime.
    """

    def __init__(
        self, policy: Policy[M], found: Mapping[str, Values] | None = None
    ) -> None:
        self._policy = policy
        self._found = found or {}

    @property
    def name(self) -> str:
        return self._policy.name

    def start(self) -> Regimes[M]:
        known: dict[str, Known[M]] = {
            regime: Known(values) for regime, values in self._found.items()
        }
        return Regimes("", self._policy.start(), known)

    def decide(
        self, situation: Situation, memory: Regimes[M]
    ) -> tuple[tuple[Decision, ...], Regimes[M]]:
        """Restore what is known of a regime that begins here; else ask the policy."""
        regime = situation.observation.regime
        if memory.now not in ("", regime):
            return self._enter(situation, memory)
        outcomes = tuple(o for o in situation.outcomes if o.decision.rule != RULE)
        asked = replace(situation, outcomes=outcomes)
        decisions, inner = self._policy.decide(asked, memory.memory)
        knobs = situation.knobs.items()
        values = {key: knob.value for key, knob in knobs if not knob.kind}
        known = {**memory.known, regime: Known(values, inner)}
        return decisions, Regimes(regime, inner, known)

    def _enter(
        self, situation: Situation, memory: Regimes[M]
    ) -> tuple[tuple[Decision, ...], Regimes[M]]:
        regime = situation.observation.regime
        known = memory.known.get(regime)
        inner = known.memory if known is not None else None
        if inner is None:
            inner = self._policy.start()
        restored = () if known is None else tuple(restoring(situation, known.values))
        return restored, replace(memory, now=regime, memory=inner)


def restoring(situation: Situation, values: Values) -> Iterator[Decision]:
    """Yield what puts these values in force again, within the user's bounds."""
    reason = phrases.regime(situation.observation.regime)
    for key, value in values.items():
        knob = situation.knobs.get(key)
        if knob is None or not knob.tunable:
            continue
        new = min(max(value, knob.lower), knob.upper)
        if new != knob.value:
            yield Decision(*key, knob.value, new, RULE, reason, 1.0, forced=True)
