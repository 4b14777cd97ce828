"""What a policy is given and returns, and what any policy may share with others.

A policy decides on its situation and its memory, and nothing else, so repeating a log's
situations to the same policy yields the same decisions, if the log has them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from math import ceil
from types import UnionType
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

from ...engine.observe.observation import (
    Knob,
    KnobName,
    Observation,
    SegmentObservation,
    ratio,
)
from ...errors import SpecError
from ...system.resources import Budget
from .. import phrases
from ..trial import Decision, DecisionOutcome
from ..window import (
    BUSY,
    WORTH,
    always_ready,
    cost_s,
    demand_rows_per_s,
    outbox,
    wait_share,
)

# Share of a step that the trainer waits, below which something may be released.
WAIT_NONE = 0.01
EASE_UTILIZATION = 0.5
# Share of the excess workers to release: the rest is for work that comes in bursts.
RELEASED_SHARE = 0.75
PREFETCH_KEPT, MIN_PREFETCH = 0.8, 2
# The budget with a margin for the noise of a measured core count.
CPU_EXCEEDED = 1.1

BACKOFF_S = 60.0
# A load this many times larger or smaller is another load (Cachew's constant).
DRIFT = 1.5
# Weight of the latest window in a load. A window with a slow sample shows a load that
# soon passes; one twice as large is recognised as another load within a few windows.
LEARNING = 0.25
# Share of its step that a trainer waits above which its demand is only noise.
INSATIABLE = 0.9
# Stand in for an operator's name.
TRAINER, RATE = "", "rate"
RULE = "regime"

M = TypeVar("M")

# Operator and name of a knob.
KnobKey = tuple[str, KnobName]
# Values of knobs.
Values = Mapping[KnobKey, int]
# Worker-seconds of a sample, by operator; also the samples per second that the trainer
# would take and those it gets. A rate below the one a change was compared with lived on
# what was in stock.
Loads = Mapping[str, float]


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
            return cls(0, 0, 0, knob.tunable, kind=value, choices=knob.choices)
        return cls(value, knob.lower, knob.upper, knob.tunable)


@dataclass(frozen=True, slots=True)
class Situation:
    """One window, the knobs and limits, and the results of earlier decisions."""

    observation: Observation
    knobs: Mapping[KnobKey, KnobView]
    budget: Budget
    outcomes: tuple[DecisionOutcome, ...] = ()
    """Outcomes of the decisions verified since the policy was last called."""

    def to_row(self) -> dict[str, object]:
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
        return tuple(_rebuilt(of[0], value) for value in row)
    if get_origin(kind) is UnionType and row is not None:
        return _rebuilt(of[0], row)
    return row


class Policy(Protocol[M]):
    """Decides from a situation and its own memory, and does nothing else.

    `M` is an immutable value. From the same start, the same situations give the same
    decisions, whether live, simulated or replayed from a log. So a policy reads no
    clock, draws no random numbers and keeps no state in itself.
    """

    def start(self) -> M:
        """Return the memory to start with."""

    def decide(self, situation: Situation, memory: M) -> tuple[tuple[Decision, ...], M]:
        """Return the changes to make now, verified together, and the new memory.

        No decision means that all is well, or that nothing within the budget helps.
        """


# What a policy knows, kept separately for each regime that the plan announces. A
# schedule that changes the batch or image size changes the work of a pipeline: what was
# learned for one size misleads for the other. So each regime has its own memory, and
# the values it was left with. They are restored at once when it returns, in this run or
# in one that starts with an earlier run's results.


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
        values: of an earlier run, for each regime.
    """

    def __init__(
        self, policy: Policy[M], values: Mapping[str, Values] | None = None
    ) -> None:
        self._policy = policy
        self._values = values or {}

    def start(self) -> Regimes[M]:
        return Regimes("", {}, self._values)

    def decide(
        self, situation: Situation, memory: Regimes[M]
    ) -> tuple[tuple[Decision, ...], Regimes[M]]:
        """Restore what is known of a new regime; otherwise ask the policy."""
        regime = situation.observation.regime
        if memory.now not in ("", regime):
            values = memory.values.get(regime, {})
            return tuple(restoring(situation, values)), replace(memory, now=regime)
        outcomes = tuple(o for o in situation.outcomes if o.decision.rule != RULE)
        decisions, inner = self._policy.decide(
            replace(situation, outcomes=outcomes),
            memory.memories.get(regime, self._policy.start()),
        )
        values = {
            key: knob.value for key, knob in situation.knobs.items() if not knob.kind
        }
        return decisions, Regimes(
            regime,
            {**memory.memories, regime: inner},
            {**memory.values, regime: values},
        )


def restoring(situation: Situation, values: Values) -> Iterator[Decision]:
    """Yield the decisions that restore these values, within the user's bounds."""
    case = Case(situation, NO_BACKOFFS)
    reason = phrases.regime(situation.observation.regime)
    for key, value in values.items():
        if (knob := case.knob(*key)) is not None:
            new = min(max(value, knob.lower), knob.upper)
            yield from case.change(key, new, RULE, reason, forced=True)


# Backoffs: values that were tried without success, remembered under the load they met.
# They keep a policy from trying the same value again and again. A backoff ends when the
# load has clearly changed. Until then, the value may be tried once more after a minute,
# after a second failure two minutes later, then four. So the tuner settles, yet a
# single noisy trial does not last forever.


@dataclass(frozen=True, slots=True)
class Backoff:
    """A bound on one knob in one direction, found by trial."""

    key: KnobKey
    upward: bool
    """True: no more than `limit`; False: no less."""
    limit: int
    tried: int
    """The value that failed; those between it and `limit` are unknown."""
    loads: Loads
    """The loads of the trainer and the operator at the time, and the rate that was to
    last: without the change, or with it if it was kept."""
    until_s: float
    failures: int = 1

    def stands(self, loads: Loads) -> bool:
        """Whether the loads are still the same."""
        return not any(
            drifted(then, loads.get(name, 0.0)) for name, then in self.loads.items()
        )


@dataclass(frozen=True, slots=True)
class Backoffs:
    """All backoffs in force."""

    all: tuple[Backoff, ...] = ()
    loads: Loads = field(default_factory=dict)
    """The present loads, smoothed."""
    now_s: float = 0.0

    def learned(
        self,
        outcomes: tuple[DecisionOutcome, ...],
        window: Observation,
        operators: Collection[str] = (),
    ) -> Backoffs:
        """Return the backoffs after these outcomes, without those of other loads.

        After a rollback, the old value was the limit. If more was kept because it was
        faster, less than this was too little.

        Args:
            outcomes: of the decisions that were judged since.
            window: the latest one.
            operators: those whose workers are of another kind now.
        """
        loads = smoothed(self.loads, window)
        gains = {outcome.decision.key for outcome in outcomes if gained(outcome)}
        backoffs = {
            (backoff.key, backoff.upward): backoff
            for backoff in self.all
            if backoff.stands(loads)
            and backoff.key[0] not in operators
            # A gain elsewhere moves the bottleneck, perhaps to where more was useless.
            and not (backoff.upward and gains - {backoff.key})
        }
        for outcome in outcomes:
            backoff = backoff_of(outcome, backoffs, loads, window.time_s)
            if backoff is not None:
                backoffs[backoff.key, backoff.upward] = backoff
        return Backoffs(tuple(backoffs.values()), loads, window.time_s)

    def allows(self, key: KnobKey, value: int) -> bool:
        """Whether no backoff rules out this value."""
        return all(
            value <= backoff.limit if backoff.upward else value >= backoff.limit
            for backoff in self._on(key)
        )

    def refutes(self, key: KnobKey, value: int) -> bool:
        """Whether this value, or one that changes less, was tried in vain."""
        return any(
            value >= backoff.tried if backoff.upward else value <= backoff.tried
            for backoff in self._on(key)
        )

    def most(self, key: KnobKey, upper: int) -> int:
        """Return the largest allowed value up to `upper`."""
        return min(
            [upper, *(backoff.limit for backoff in self._on(key) if backoff.upward)]
        )

    def _on(self, key: KnobKey) -> Iterable[Backoff]:
        return (h for h in self.all if h.key == key and self.now_s < h.until_s)


NO_BACKOFFS = Backoffs()


def backoff_of(
    outcome: DecisionOutcome,
    backoffs: Mapping[tuple[KnobKey, bool], Backoff],
    loads: Loads,
    now_s: float,
) -> Backoff | None:
    """Return the backoff that follows from an outcome and those known, if any."""
    decision, kept, old = outcome.decision, outcome.kept, outcome.decision.old
    if isinstance(old, str) or isinstance(decision.new, str) or decision.forced:
        return None  # about kinds, see kinds.py
    # A rate from stock, or from luck, is no argument against less.
    if kept and not (gained(outcome) and (outcome.in_step or faster(outcome))):
        return None
    upward, limit = decision.added > 0 and not kept, old + 1 if kept else old
    tried, failures = old if kept else decision.new, 1
    before = backoffs.get((decision.key, upward))
    if before is not None and before.limit == limit and not kept:
        tried = min(tried, before.tried) if upward else max(tried, before.tried)
        failures = before.failures + 1  # it lasts twice as long
    lasting = outcome.after if kept else outcome.before
    then = {name: loads.get(name, 0.0) for name in (TRAINER, decision.operator)}
    return Backoff(
        key=decision.key,
        upward=upward,
        limit=limit,
        tried=tried,
        loads={**then, RATE: lasting.rows_per_s},
        until_s=now_s + BACKOFF_S * 2 ** (failures - 1),
        failures=failures,
    )


def gained(outcome: DecisionOutcome) -> bool:
    """Whether more of something was kept."""
    return outcome.kept and outcome.decision.added > 0


def drifted(then: float, now: float, factor: float = DRIFT) -> bool:
    """Whether a load or a rate is another one, if both are known."""
    return then > 0 and now > 0 and not 1 / factor <= now / then <= factor


def smoothed(before: Loads, window: Observation) -> Loads:
    """Return the loads updated by a window; one without information changes none.

    A segment's queue has its segment's load.
    """
    now = {
        TRAINER: 0.0 if wait_share(window) > INSATIABLE else demand_rows_per_s(window),
        RATE: ratio(1.0, cost_s(window)),
    }
    for segment in window.segments:
        for name in {segment.name, segment.queue_name}:
            now[name] = now.get(name, 0.0) + segment.run_s_per_row
    loads = {name: before.get(name, load) for name, load in now.items() if load > 0}
    fresh = {name: load + LEARNING * (now[name] - load) for name, load in loads.items()}
    return {**before, **fresh}


def faster(outcome: DecisionOutcome) -> bool:
    """Whether the rate grew by enough to be worth a change."""
    return outcome.after.rows_per_s > (1.0 + WORTH) * outcome.before.rows_per_s


@dataclass(frozen=True, slots=True)
class Case:
    """One situation, with what any policy asks about it, or does about it."""

    situation: Situation
    backoffs: Backoffs

    @property
    def window(self) -> Observation:
        """The window."""
        return self.situation.observation

    @property
    def cores(self) -> float:
        """The cores that the pipeline may use."""
        return self.situation.budget.cpu_cores

    def at_ease(self) -> bool:
        """Whether the trainer finds its batches ready."""
        # If one is always there, the trainer waits for the hand-over.
        fed = wait_share(self.window) < WAIT_NONE or always_ready(self.window)
        stocked = outbox(self.window).utilization >= EASE_UTILIZATION
        return self.window.trainer.steps > 0 and fed and stocked

    def within_budget(self) -> Iterator[Decision]:
        """Remove a worker from the segment that uses most of too many cores."""
        cores = self.window.cpu_cores
        if self.situation.budget.whole_machine or cores <= CPU_EXCEEDED * self.cores:
            return
        above = [
            (segment, knob)
            for segment, _, knob in self.tunable("num_parallel_workers")
            if knob.value > knob.lower and segment.is_here
        ]
        for segment, knob in sorted(above, key=lambda s: s[0].cpu_s, reverse=True)[:1]:
            yield Decision(
                operator=segment.name,
                knob="num_parallel_workers",
                old=knob.value,
                new=knob.value - 1,
                rule="cpu_budget",
                reason=phrases.cpu_over_budget(segment.name, cores, self.cores),
                expected=min(1.0, self.cores / cores),
                evidence={"cpu_cores": cores, "budget_cores": self.cores},
                forced=True,
            )

    def idle_workers(self) -> Iterator[Decision]:
        """Release most of each segment's workers beyond the busy ones and a reserve.

        If the trainer lives on stock, the workers that will have to produce what it
        takes count as busy.
        """
        window, waiting = self.window, wait_share(self.window) >= WORTH
        for segment, key, knob in self.tunable("num_parallel_workers"):
            if segment.rows == 0 < window.trainer.rows:
                continue
            taken_s = window.trainer.rows * segment.run_s_per_row
            busy = ratio(max(segment.run_s, taken_s), window.window_s)
            enough = min(knob.value, max(knob.lower, ceil(busy / BUSY), 1))
            fewer = knob.value - ceil(RELEASED_SHARE * (knob.value - enough))
            reason = phrases.idle(segment.name, busy, knob.value, waiting=waiting)
            yield from self.change(
                key, fewer, "release", reason, evidence={"busy_workers": busy}
            )

    def idle_queues(self) -> Iterator[Decision]:
        """Release a fifth of the batches that each segment prefetches."""
        for segment, key, knob in self.tunable("prefetch_size"):
            fewer = max(knob.lower, MIN_PREFETCH, int(PREFETCH_KEPT * knob.value))
            fewer, level = min(knob.value, fewer), segment.output.utilization
            reason = phrases.queue_idle(segment.queue_name, level)
            yield from self.change(
                key, fewer, "release", reason, evidence={"utilization": level}
            )

    def change(
        self,
        key: KnobKey,
        new: int,
        rule: str,
        reason: str,
        *,
        evidence: Mapping[str, float] | None = None,
        expected: float = 1.0,
        forced: bool = False,
    ) -> Iterator[Decision]:
        """Set a knob, unless it has this value already or a backoff forbids it."""
        old = self.situation.knobs[key].value
        if new != old and self.backoffs.allows(key, new):
            yield Decision(
                *key,
                old=old,
                new=new,
                rule=rule,
                reason=reason,
                expected=expected,
                evidence=evidence or {},
                forced=forced,
            )

    def expected(self, factor: float) -> float:
        """Return a gain of `factor`, limited to what free loading would bring."""
        gap = 1.0 - wait_share(self.window) if self.window.trainer.steps else 0.0
        return min(factor, 1.0 / gap) if gap > 0 else factor

    def tunable(
        self, name: KnobName
    ) -> Iterator[tuple[SegmentObservation, KnobKey, KnobView]]:
        """Yield each segment whose knob of this name may be tuned, its key, and it."""
        for segment in self.window.segments:
            of_queue = name == "prefetch_size"
            key: KnobKey = (segment.queue_name if of_queue else segment.name, name)
            if (knob := self.knob(*key)) is not None:
                yield segment, key, knob

    def knob(self, *key: *KnobKey) -> KnobView | None:
        """Return a knob if it exists and may be tuned."""
        knob = self.situation.knobs.get(key)
        return knob if knob is not None and knob.tunable else None
