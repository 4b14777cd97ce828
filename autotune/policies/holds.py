"""Holds: values that were tried and did not do, remembered under the load they met.

They keep a policy from trying the same again and again. A hold ends when the load has
clearly changed; until then the value may be tried once more after a minute, after a
second failure two minutes later, then four: the tuner settles, yet one noisy trial is
not for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...pipeline.observation import Observation, SegmentObservation
from ..decision import Outcome
from ..situation import KnobKey
from ..window import demand_rows_per_s

__all__ = ["Hold", "allowed", "learned"]

HOLD_S = 60.0
MOST_DOUBLINGS = 10
DRIFT = 1.5
"""A load so many times larger or smaller is another load (Cachew's constant)."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A bound on one knob in one direction, found by trial."""

    key: KnobKey
    upward: bool
    """True: no more than `limit`; False: no less."""
    limit: int
    load: tuple[float, float]
    """Samples a second the trainer would take, and worker-seconds a sample takes."""
    until_s: float
    failures: int = 1

    def forbids(self, key: KnobKey, value: int, now_s: float) -> bool:
        """Whether it speaks against turning `key` to `value`."""
        if key != self.key or now_s >= self.until_s:
            return False
        return value > self.limit if self.upward else value < self.limit


def allowed(holds: tuple[Hold, ...], key: KnobKey, value: int, now_s: float) -> bool:
    """Whether no hold speaks against it."""
    return not any(hold.forbids(key, value, now_s) for hold in holds)


def learned(
    holds: tuple[Hold, ...], outcomes: tuple[Outcome, ...], observation: Observation
) -> tuple[Hold, ...]:
    """Holds after these outcomes; those made under other conditions are gone.

    Rolled back: the old value was the limit. Kept and more: less than this was too
    little.
    """
    moved = {outcome.decision.key for outcome in outcomes if _gained(outcome)}
    kept = {
        (hold.key, hold.upward): hold
        for hold in holds
        if _stands(hold, observation)
        # A gain elsewhere moves the bottleneck, perhaps to where more gained nothing.
        and not (hold.upward and moved - {hold.key})
    }
    for outcome in outcomes:
        hold = _hold(outcome, observation)
        if hold is None:
            continue
        known = kept.get((hold.key, hold.upward))
        if known is not None and known.limit == hold.limit and not outcome.kept:
            failures = min(known.failures + 1, MOST_DOUBLINGS)
            until_s = observation.time_s + HOLD_S * 2 ** (failures - 1)
            hold = replace(hold, failures=failures, until_s=until_s)
        kept[hold.key, hold.upward] = hold
    return tuple(kept.values())


def _hold(outcome: Outcome, observation: Observation) -> Hold | None:
    decision = outcome.decision
    if decision.forced or (outcome.kept and not _gained(outcome)):
        return None
    return Hold(
        key=decision.key,
        upward=decision.new > decision.old and not outcome.kept,
        limit=decision.old + 1 if outcome.kept else decision.old,
        load=_load(decision.operator, observation),
        until_s=observation.time_s + HOLD_S,
    )


def _gained(outcome: Outcome) -> bool:
    return outcome.kept and outcome.decision.new > outcome.decision.old


def _stands(hold: Hold, observation: Observation) -> bool:
    now = _load(hold.key[0], observation)
    return not any(_drifted(a, b) for a, b in zip(hold.load, now, strict=True))


def _drifted(then: float, now: float) -> bool:
    return then > 0 and now > 0 and not 1 / DRIFT <= now / then <= DRIFT


def _load(operator: str, observation: Observation) -> tuple[float, float]:
    demand = demand_rows_per_s(observation)
    return demand, sum(
        segment.run_s_per_row
        for segment in observation.segments
        if _belongs(segment, operator)
    )


def _belongs(segment: SegmentObservation, operator: str) -> bool:
    return operator in {segment.name, segment.queue_name}
