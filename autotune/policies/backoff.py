"""Backoffs: values that were tried and did not do, remembered under the load they met.

They keep a policy from trying the same again and again. A hold ends when the load has
clearly changed; until then the value may be tried once more after a minute, after a
second failure two minutes later, then four: the tuner settles, yet one noisy trial is
not forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...engine.observe.observation import Observation, ratio
from ..situation import DecisionOutcome, KnobKey
from ..window import cost_s, demand_rows_per_s, wait_share
from .curve import faster

BACKOFF_S = 60.0
MAX_DOUBLINGS = 10
DRIFT = 1.5
"""A load so many times larger or smaller is another load (Cachew's constant)."""
LEARNING = 0.25
"""Weight of the latest window in a load: one that holds a slow sample shows a load
that is soon gone again; one twice as large is known for another in a few."""
INSATIABLE = 0.9
"""Share of its step that a trainer waits, from which what it could take is noise."""
TRAINER, RATE = "", "rate"
"""In place of an operator."""

Loads = dict[str, float]
"""Worker-seconds a sample takes, by operator; samples a second that the trainer would
take, and that it gets: less than a change was compared with, and that lived on what was
in stock."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """A bound on one knob in one direction, found by trial."""

    key: KnobKey
    upward: bool
    """True: no more than `limit`; False: no less."""
    limit: int
    tried: int
    """What did not do: what lies between it and `limit` is not known."""
    loads: tuple[tuple[str, float], ...]
    """The trainer's and the operator's, as they were, and the rate that was
    to last: without the change, or with it where it was kept."""
    until_s: float
    failures: int = 1

    def forbids(self, value: int) -> bool:
        """Whether it speaks against this value."""
        return value > self.limit if self.upward else value < self.limit

    def refutes(self, value: int) -> bool:
        """Whether this value, or one nearer to what does, was tried in vain."""
        return value >= self.tried if self.upward else value <= self.tried

    def stands(self, loads: Loads) -> bool:
        """Whether the loads are what they were."""
        return not any(drifted(then, loads.get(name, 0.0)) for name, then in self.loads)


@dataclass(frozen=True, slots=True)
class Backoffs:
    """All that stand now."""

    all: tuple[Backoff, ...] = ()
    loads: tuple[tuple[str, float], ...] = ()
    """As they are now, smoothed."""
    now_s: float = 0.0

    def without(self, operators: Iterable[str]) -> Backoffs:
        """The holds but those on these operators."""
        gone = set(operators)
        return replace(self, all=tuple(h for h in self.all if h.key[0] not in gone))

    def learned(
        self, outcomes: tuple[DecisionOutcome, ...], seen: Observation
    ) -> Backoffs:
        """Backoffs after these outcomes; those made under other conditions are gone.

        Rolled back: the old value was the limit. Kept and more, and faster for it:
        less than this was too little.
        """
        loads = smoothed(dict(self.loads), loads_of(seen))
        moved = {outcome.decision.key for outcome in outcomes if gained(outcome)}
        kept = {
            (backoff.key, backoff.upward): backoff
            for backoff in self.all
            if backoff.stands(loads)
            # A gain elsewhere moves the bottleneck, perhaps to where more gained none.
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
        """Whether no hold speaks against it."""
        return not any(backoff.forbids(value) for backoff in self._on(key))

    def refutes(self, key: KnobKey, value: int) -> bool:
        """Whether it, or one that changes less, was tried in vain."""
        return any(backoff.refutes(value) for backoff in self._on(key))

    def most(self, key: KnobKey, upper: int) -> int:
        """Return the most that is allowed, of `upper`."""
        return min(
            [upper, *(backoff.limit for backoff in self._on(key) if backoff.upward)]
        )

    def _on(self, key: KnobKey) -> Iterable[Backoff]:
        return (h for h in self.all if h.key == key and self.now_s < h.until_s)


NO_BACKOFFS = Backoffs()


def made(outcome: DecisionOutcome, loads: Loads, now_s: float) -> Backoff | None:
    """Return the hold that follows from an outcome, if one does."""
    decision = outcome.decision
    if decision.forced or (outcome.kept and not gained(outcome)):
        return None
    if outcome.kept and not (outcome.in_step or faster(outcome)):
        return None  # what lived on stock, or on luck, does not speak against less
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
    """The same has failed again: it is held for twice as long."""
    failures = min(known.failures + 1, MAX_DOUBLINGS)
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
    """Return the loads of one window: a segment's queue has its segment's."""
    insatiable = wait_share(seen) > INSATIABLE
    loads = {TRAINER: 0.0 if insatiable else demand_rows_per_s(seen)}
    loads[RATE] = ratio(1.0, cost_s(seen))
    for segment in seen.segments:
        for name in {segment.name, segment.queue_name}:
            loads[name] = loads.get(name, 0.0) + segment.run_s_per_row
    return loads


def smoothed(before: Loads, now: Loads) -> Loads:
    """Return the loads with a window more; one that tells nothing changes none."""
    loads = dict(before)
    for name, load in now.items():
        known = before.get(name, load)
        if load > 0:
            loads[name] = known + LEARNING * (load - known)
    return loads
