"""Backoffs: values that were tried without success, remembered under the load they met.

They keep a policy from trying the same value again and again. A backoff ends when the
load has clearly changed. Until then, the value may be tried once more after a minute,
after a second failure two minutes later, then four. So the tuner settles, yet a single
noisy trial does not last forever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ...engine.observe.observation import Observation, ratio
from ..situation import DecisionOutcome, KnobKey
from ..thresholds import wait_share
from ..window import cost_s, demand_rows_per_s
from .curve import faster

BACKOFF_S = 60.0
DRIFT = 1.5
"""A load this many times larger or smaller is another load (Cachew's constant)."""
LEARNING = 0.25
"""Weight of the latest window in a load. A window with a slow sample shows a load that
soon passes; one twice as large is recognised as another load within a few windows."""
INSATIABLE = 0.9
"""Share of its step that a trainer waits above which its demand is only noise."""
TRAINER, RATE = "", "rate"
"""Stand in for an operator's name."""

Loads = dict[str, float]
"""Worker-seconds of a sample, by operator; also the samples per second that the trainer
would take and those it gets. A rate below the one a change was compared with lived on
what was in stock."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """A bound on one knob in one direction, found by trial."""

    key: KnobKey
    upward: bool
    """True: no more than `limit`; False: no less."""
    limit: int
    tried: int
    """The value that failed; those between it and `limit` are unknown."""
    loads: tuple[tuple[str, float], ...]
    """The loads of the trainer and the operator at the time, and the rate that was to
    last: without the change, or with it if it was kept."""
    until_s: float
    failures: int = 1

    def forbids(self, value: int) -> bool:
        """Whether it rules out this value."""
        return value > self.limit if self.upward else value < self.limit

    def refutes(self, value: int) -> bool:
        """Whether this value, or one nearer to a good one, was tried in vain."""
        return value >= self.tried if self.upward else value <= self.tried

    def stands(self, loads: Loads) -> bool:
        """Whether the loads are still the same."""
        return not any(drifted(then, loads.get(name, 0.0)) for name, then in self.loads)


@dataclass(frozen=True, slots=True)
class Backoffs:
    """All backoffs in force."""

    all: tuple[Backoff, ...] = ()
    loads: tuple[tuple[str, float], ...] = ()
    """The present loads, smoothed."""
    now_s: float = 0.0

    def learned(
        self,
        outcomes: tuple[DecisionOutcome, ...],
        seen: Observation,
        changed: Collection[str] = (),
    ) -> Backoffs:
        """Return the backoffs after these outcomes, without those of other loads.

        After a rollback, the old value was the limit. If more was kept because it was
        faster, less than this was too little.

        Args:
            outcomes: of the decisions that were judged since.
            seen: the latest window.
            changed: operators whose workers are of another kind now.
        """
        loads = smoothed(dict(self.loads), loads_of(seen))
        moved = {outcome.decision.key for outcome in outcomes if gained(outcome)}
        kept = {
            (backoff.key, backoff.upward): backoff
            for backoff in self.all
            if backoff.stands(loads)
            and backoff.key[0] not in changed
            # A gain elsewhere moves the bottleneck, perhaps to where more was useless.
            and not (backoff.upward and moved - {backoff.key})
        }
        for outcome in outcomes:
            backoff = made(outcome, loads, seen.time_s)
            if backoff is None:
                continue
            known = kept.get((backoff.key, backoff.upward))
            if known is not None and known.limit == backoff.limit and not outcome.kept:
                backoff = again(backoff, known, seen.time_s)
            kept[backoff.key, backoff.upward] = backoff
        return Backoffs(tuple(kept.values()), tuple(loads.items()), seen.time_s)

    def allows(self, key: KnobKey, value: int) -> bool:
        """Whether no backoff rules out this value."""
        return not any(backoff.forbids(value) for backoff in self._on(key))

    def refutes(self, key: KnobKey, value: int) -> bool:
        """Whether this value, or one that changes less, was tried in vain."""
        return any(backoff.refutes(value) for backoff in self._on(key))

    def most(self, key: KnobKey, upper: int) -> int:
        """Return the largest allowed value up to `upper`."""
        return min(
            [upper, *(backoff.limit for backoff in self._on(key) if backoff.upward)]
        )

    def _on(self, key: KnobKey) -> Iterable[Backoff]:
        return (h for h in self.all if h.key == key and self.now_s < h.until_s)


NO_BACKOFFS = Backoffs()


def made(outcome: DecisionOutcome, loads: Loads, now_s: float) -> Backoff | None:
    """Return the backoff that follows from an outcome, if any."""
    decision = outcome.decision
    if decision.forced or (outcome.kept and not gained(outcome)):
        return None
    if outcome.kept and not (outcome.in_step or faster(outcome)):
        return None  # a rate from stock, or from luck, is no argument against less
    if isinstance(decision.old, str) or isinstance(decision.new, str):
        return None  # a kind: see kinds.py
    about = (TRAINER, decision.operator)
    lasting = outcome.after if outcome.kept else outcome.before
    then = [(name, loads.get(name, 0.0)) for name in about]
    return Backoff(
        key=decision.key,
        upward=decision.added > 0 and not outcome.kept,
        limit=decision.old + 1 if outcome.kept else decision.old,
        tried=decision.old if outcome.kept else decision.new,
        loads=(*then, (RATE, lasting.rows_per_s)),
        until_s=now_s + BACKOFF_S,
    )


def again(backoff: Backoff, known: Backoff, now_s: float) -> Backoff:
    """Return the backoff after a repeated failure: it lasts twice as long."""
    failures = known.failures + 1
    nearer = min if backoff.upward else max
    return replace(
        backoff,
        failures=failures,
        until_s=now_s + BACKOFF_S * 2 ** (failures - 1),
        tried=nearer(backoff.tried, known.tried),
    )


def gained(outcome: DecisionOutcome) -> bool:
    """Whether more of something was kept."""
    return outcome.kept and outcome.decision.added > 0


def drifted(then: float, now: float) -> bool:
    """Whether a load is another one, if both are known."""
    return then > 0 and now > 0 and not 1 / DRIFT <= now / then <= DRIFT


def loads_of(seen: Observation) -> Loads:
    """Return the loads of one window; a segment's queue has its segment's load."""
    insatiable = wait_share(seen) > INSATIABLE
    loads = {TRAINER: 0.0 if insatiable else demand_rows_per_s(seen)}
    loads[RATE] = ratio(1.0, cost_s(seen))
    for segment in seen.segments:
        for name in {segment.name, segment.queue_name}:
            loads[name] = loads.get(name, 0.0) + segment.run_s_per_row
    return loads


def smoothed(before: Loads, now: Loads) -> Loads:
    """Return the loads updated by a window; one without information changes none."""
    loads = dict(before)
    for name, load in now.items():
        known = before.get(name, load)
        if load > 0:
            loads[name] = known + LEARNING * (load - known)
    return loads
