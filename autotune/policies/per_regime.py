"""What a policy knows, kept separately for each regime that the plan announces.

A schedule that changes the batch or image size changes the work of a pipeline: what was
learned for one size misleads for the other. So each regime has its own memory, and the
values it was left with. They are restored at once when it returns, in this run or in
one that starts with an earlier run's results.
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
"""Values of knobs."""
RULE = "regime"


@dataclass(frozen=True, slots=True)
class Regimes(Generic[M]):
    """The memory from one window to the next."""

    now: str
    """The current regime; empty before the first window."""
    memories: Mapping[str, M]
    """The policy's own memory of each regime that was met."""
    values: Mapping[str, Values]
    """The values with which each regime was left, in this run or an earlier one."""


class PerRegime(Generic[M]):
    """Runs a policy that knows only one regime, the current one.

    Args:
        policy: the policy to run.
        found: values of an earlier run, for each regime.
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
        return Regimes("", {}, self._found)

    def decide(
        self, situation: Situation, memory: Regimes[M]
    ) -> tuple[tuple[Decision, ...], Regimes[M]]:
        """Restore what is known of a new regime; otherwise ask the policy."""
        regime = situation.observation.regime
        if memory.now not in ("", regime):
            values = memory.values.get(regime, {})
            return tuple(restoring(situation, values)), replace(memory, now=regime)
        outcomes = tuple(o for o in situation.outcomes if o.decision.rule != RULE)
        asked = replace(situation, outcomes=outcomes)
        known = memory.memories.get(regime, self._policy.start())
        decisions, inner = self._policy.decide(asked, known)
        knobs = situation.knobs.items()
        values = {key: knob.value for key, knob in knobs if not knob.kind}
        memories = {**memory.memories, regime: inner}
        return decisions, Regimes(regime, memories, {**memory.values, regime: values})


def restoring(situation: Situation, values: Values) -> Iterator[Decision]:
    """Yield the decisions that restore these values, within the user's bounds."""
    reason = phrases.regime(situation.observation.regime)
    for key, value in values.items():
        knob = situation.knobs.get(key)
        if knob is None or not knob.tunable:
            continue
        new = min(max(value, knob.lower), knob.upper)
        if new != knob.value:
            yield Decision(*key, knob.value, new, RULE, reason, 1.0, forced=True)
