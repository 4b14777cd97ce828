"""`bottleneck_law`: what is possible, who is short of workers for it, and by how many.

Operational analysis (P. Denning and J. Buzen, 1978) answers that in closed form. A row
takes a segment `S` worker-seconds, `C` of them on a CPU, so with `n` workers it puts
out at most `n / S` rows a second, all segments together at most `cores / sum(C)`, and
the trainer takes at most `rows / gap`. Nothing is gained beyond the least of these. A
rate `X` keeps `X S` workers busy (Little's law), and so that is what each segment gets,
with some to spare: usually right after one or two seconds of watching.

The law does not know what is not linear: a lock, a disk or the GIL makes `S` grow with
`n`, and then fewer workers may be faster. Each change is verified (trial.py), and what
rate came of which number is remembered. Where workers brought much less than they
should, the best number is looked for between those tried, as for any curve with one
peak.

In order: mend what breaks the budget; where the trainer waits, try another kind of
workers if measurements speak for it (kinds.py), else add by the law, with rows ahead
for workers that mostly wait; else look for the peak, or widen the queues that hold
workers back; and give back what does nothing, by Little's law, also while the trainer
waits for something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from ...engine.observe.knob import KnobName
from ...engine.observe.observation import Observation, SegmentObservation, ratio
from .. import phrases
from ..situation import Decision, KnobKey, KnobView, Situation
from ..window import cost_s, demand_rows_per_s, outbox, staff, starving, wait_share
from .backoff import NO_BACKOFFS, Backoffs
from .case import CPU_USED, Case, cores_of, cpu_bound, spent
from .curve import WORTH, Curve, efficiency, is_steady, probe, remembered
from .kinds import ALONE_LAST, ALONE_NOW, NO_KINDS, Kinds

WORKERS: KnobName = "num_parallel_workers"
JUMP = 4.0
"""Most by which workers are multiplied at once while little is known of a segment."""
BUSY_SHARE = 0.85
"""Workers are to be busy so much of the time: the rest is for uneven work."""
WORTH_MUCH = 1.06
"""The same where little CPU is left, of which the rest may not be had."""
SATURATED = 0.8
"""Share of their time that a segment's workers are busy where it holds others up."""
EFFICIENT = 0.3
"""Share of the rate it should have brought below which growth met a limit."""
CPU_SPENT = 0.95
"""Share from which on no number of workers could make more of it."""
CPU_HEAVY = 0.75
"""Share from which on it may be, if workers did not hinder each other."""
CROWD = 2.0
"""Workers a core from which on they may."""
EASE_WINDOWS = 2
PATIENCE_WINDOWS = 3
"""That the GIL probe has to look before more threads are tried."""
CHEAPER = 1.5
"""So many times less CPU a row may take at most where fewer workers crowd the caches
and the cores less: who needs more cores than these could keep busy is not tried."""
HELD_BACK = 0.1
"""Share of a segment's workers' time."""
MAX_PREFETCH = 16
ROWS_EACH = 4
"""Rows ahead for each worker where rows mostly wait."""
WAIT_TOLERATED = 0.02
"""Below this share of the step there is nothing worth adding for."""
EMPTY = 0.02
"""Share of the time with no batch ready from which on the trainer can starve."""


@dataclass(frozen=True, slots=True)
class LawMemory:
    """What the policy remembers from one window to the next."""

    at_ease: int = 0
    """Windows in a row in which the trainer did not wait."""
    hungry: int = 0
    """Windows in a row in which it did."""
    backoffs: Backoffs = NO_BACKOFFS
    curves: tuple[tuple[str, Curve], ...] = ()
    """What came of which number of workers, by operator."""
    staff: tuple[tuple[str, str], ...] = ()
    """Kinds of workers, by operator: what came of one says nothing of another."""
    kinds: Kinds = NO_KINDS
    """What came of other kinds of workers, and of another host."""
    waited: int = 0
    """Windows in a row in which the GIL had yet to be looked at."""


class BottleneckLaw:
    """Jumps to what the law says, then looks for what it does not know."""

    name = "bottleneck_law"

    def start(self) -> LawMemory:
        return LawMemory()

    def decide(
        self, situation: Situation, memory: LawMemory
    ) -> tuple[tuple[Decision, ...], LawMemory]:
        """Mend what breaks the budget, else add, else look, else give back."""
        kinds = memory.kinds.learned(situation.outcomes, situation.observation)
        workers = staff(situation.observation)
        new = {name for name, _ in set(workers) - set(memory.staff)}
        numbers = tuple(o for o in situation.outcomes if o.decision.rule != "executor")
        backoffs = memory.backoffs.without(new)
        backoffs = backoffs.learned(numbers, situation.observation)
        curves = {name: curve for name, curve in memory.curves if name not in new}
        curves = current(remembered(curves, numbers), situation.observation)
        known = replace(
            memory,
            backoffs=backoffs,
            curves=tuple(curves.items()),
            staff=workers,
            kinds=kinds,
        )
        case = _Law(situation, backoffs, curves)
        if mended := tuple(case.within_budget()):
            return mended, replace(known, hungry=0, at_ease=0)
        if case.starved():
            return _fed(case, replace(known, hungry=memory.hungry + 1, at_ease=0))
        known = replace(known, hungry=0, waited=0)
        moved = tuple(kinds.collated_elsewhere(situation))
        if moved or (moved := tuple(kinds.other_host(situation))):
            return moved, known
        at_ease = memory.at_ease + 1 if case.at_ease() else 0
        spared: tuple[Decision, ...] = ()
        if at_ease >= EASE_WINDOWS:
            spared = case.spared() or tuple(case.idle_queues())
        return spared, replace(known, at_ease=at_ease)


def _fed(case: _Law, known: LawMemory) -> tuple[tuple[Decision, ...], LawMemory]:
    """Feed a trainer that waits: by another kind of workers, or by more of them."""
    situation = case.situation
    if known.hungry < 2 and not starving(situation.observation):
        return (), replace(known, waited=0)
    if known.waited < PATIENCE_WINDOWS and known.kinds.unprobed(situation):
        return (), replace(known, waited=known.waited + 1)
    decisions = (
        tuple(known.kinds.alone(situation, ALONE_NOW))
        or tuple(known.kinds.other_executor(situation))
        or case.improved()
        or tuple(known.kinds.alone(situation, ALONE_LAST))
        or tuple(known.kinds.other_host(situation))
    )
    return decisions, replace(known, waited=0)


@dataclass(frozen=True, slots=True)
class _Law(Case):
    """One situation, and what the law says of it."""

    curves: Mapping[str, Curve]

    def starved(self) -> bool:
        """Whether the trainer waits, and not for the hand-over of what is there."""
        seen = self.situation.observation
        return wait_share(seen) >= WAIT_TOLERATED and outbox(seen).empty >= EMPTY

    def improved(self) -> tuple[Decision, ...]:
        """What may make the trainer wait less, or spare what does not."""
        return (
            self.thinned()
            or self.jump()
            or tuple(self.search())
            or tuple(self.wider_queues())
            or self.spared()
        )

    # What is possible

    @property
    def rate(self) -> float:
        """Rows a second now."""
        return ratio(1.0, cost_s(self.situation.observation))

    def possible(self) -> float:
        """Rows a second that CPU, GIL, trainer and bounded segments allow.

        Where workers wait in turns for a core, or at the GIL, more of them bring
        nothing, whoever uses the rest.
        """
        seen, rate = self.situation.observation, self.rate
        demand = demand_rows_per_s(seen) or inf
        cores = self.situation.budget.cpu_cores
        cpu_s_per_row = ratio(seen.cpu_cores, rate)
        cpu = cores / cpu_s_per_row if cpu_s_per_row > 0 else inf
        bounds = [
            self._most(segment) / segment.run_s_per_row
            for segment in seen.segments
            if segment.run_s_per_row > 0
        ]
        none_left = rate if spent(self.situation.observation) else inf
        return min(demand, cpu, none_left, *bounds)

    def _most(self, segment: SegmentObservation) -> int:
        """Workers a segment may have."""
        knob = self.knob(segment.name, WORKERS)
        if knob is None:
            return segment.num_parallel_workers
        return max(knob.value, self.backoffs.most((segment.name, WORKERS), knob.upper))

    # What to add

    def thinned(self) -> tuple[Decision, ...]:
        """Fewer where many more compute than there are cores, and none knows better."""
        segment = self._bottleneck()
        if segment is None or len(self.curves.get(segment.name, ())) > 1:
            return ()
        crowd = segment.num_parallel_workers > CROWD * cores_of(self.situation, segment)
        return tuple(self._crowded(CPU_HEAVY)) if crowd else ()

    def jump(self) -> tuple[Decision, ...]:
        """Give every segment the workers that the possible rate keeps busy."""
        if self.rate <= 0:
            return ()
        target = min(self.possible(), JUMP * self.rate)
        worth = WORTH_MUCH if cpu_bound(self.situation, CPU_HEAVY) else WORTH
        if target < worth * self.rate or self._inefficient():
            return ()
        return tuple(self._grown(target))

    def _grown(self, target: float) -> Iterator[Decision]:
        for segment in self.situation.observation.segments:
            key: KnobKey = (segment.name, WORKERS)
            knob = self.knob(*key)
            if knob is None:
                continue
            busy = target * segment.run_s_per_row
            needed = ceil(busy / BUSY_SHARE - 0.01)
            needed = min(needed, self._most(segment))
            if needed <= knob.value:
                continue
            yield from self._further_ahead(segment, needed)
            yield Decision(
                *key,
                old=knob.value,
                new=needed,
                rule="law",
                reason=phrases.law(
                    segment.name, segment.run_s_per_row, busy, target, knob.value
                ),
                expected=target / self.rate,
                evidence=self._evidence(segment, target),
            )

    def _further_ahead(
        self, segment: SegmentObservation, workers: int
    ) -> Iterator[Decision]:
        """Rows ahead for so many workers to have some each, where rows mostly wait.

        Fewer hand-overs then carry as many rows (`lease_rows` in core.py).
        """
        key: KnobKey = (segment.queue_name, "prefetch_size")
        knob = self.knob(*key)
        rows = ratio(segment.output.capacity, segment.prefetch_size)
        if knob is None or not mostly_waits(segment) or rows <= 0:
            return
        new, nbytes = self._wider(segment, knob, ceil(ROWS_EACH * workers / rows))
        if new > knob.value:
            reason = phrases.few_ahead(segment.queue_name, knob.value, workers)
            evidence = {"workers": workers, "predicted_bytes": nbytes}
            yield Decision(*key, knob.value, new, "ahead", reason, 1.0, evidence)

    def _wider(
        self, segment: SegmentObservation, knob: KnobView, wanted: int
    ) -> tuple[int, float]:
        """How many batches ahead may be had of those wanted, and for how many bytes."""
        new = min(wanted, knob.upper, MAX_PREFETCH)
        nbytes = (new - knob.value) * self.batch_bytes(segment)
        held_bytes = self.situation.observation.held_bytes
        fits = held_bytes + nbytes <= self.situation.budget.memory_bytes
        key: KnobKey = (segment.queue_name, "prefetch_size")
        return (new, nbytes) if fits and self.allowed(key, new) else (knob.value, 0.0)

    def _evidence(self, segment: SegmentObservation, target: float) -> dict[str, float]:
        return {
            "run_s_per_row": segment.run_s_per_row,
            "cpu_s_per_row": segment.cpu_s_per_row,
            "rows_per_s": self.rate,
            "target_rows_per_s": target,
        }

    # Where the law does not hold

    def _inefficient(self) -> bool:
        """Whether more workers of the busiest segment are known to bring too little."""
        segment = self._bottleneck()
        if segment is None:
            return False
        curve, workers = self.curves.get(segment.name, ()), segment.num_parallel_workers
        here = dict(curve).get(workers, self.rate)
        return efficiency(curve, workers) < EFFICIENT or any(
            more > workers and rate < WORTH * here for more, rate in curve
        )

    def _bottleneck(self) -> SegmentObservation | None:
        """The segment whose workers are always busy, or would be on another machine."""
        segments = self.situation.observation.segments
        busiest = max(segments, key=_busy)
        return (
            busiest
            if _busy(busiest) >= SATURATED or spent(self.situation.observation)
            else None
        )

    def search(self) -> Iterator[Decision]:
        """Try the number of workers that tells most about where the peak is."""
        segment = self._bottleneck()
        knob = self.knob(segment.name, WORKERS) if segment else None
        if segment is None or knob is None or cpu_bound(self.situation, CPU_SPENT):
            return
        curve = self.curves.get(segment.name, ())
        key: KnobKey = (segment.name, WORKERS)
        waits = mostly_waits(segment)
        cores = ratio(segment.cpu_s, self.situation.observation.window_s)
        lower = min(knob.value, max(knob.lower, ceil(cores / CHEAPER)))
        new = probe(curve, knob.value, lower, knob.upper, waits=waits)
        if new is None or self.backoffs.refutes(key, new):
            return
        yield Decision(
            *key,
            old=knob.value,
            new=new,
            rule="peak",
            reason=phrases.peak(segment.name, segment.run_s_per_row, knob.value, new),
            expected=1.1,
            evidence=self._evidence(segment, self.rate),
        )

    def wider_queues(self) -> Iterator[Decision]:
        """Twice as many batches ahead where workers are held back and none is busy."""
        if self._bottleneck() is not None:
            return
        for segment in self.situation.observation.segments:
            key: KnobKey = (segment.queue_name, "prefetch_size")
            knob = self.knob(*key)
            held_back = ratio(segment.wait_credit_s, segment.worker_s)
            if knob is None or held_back < HELD_BACK:
                continue
            new, nbytes = self._wider(segment, knob, 2 * knob.value)
            if new > knob.value:
                reason = phrases.held_back(segment.queue_name, held_back)
                evidence = {"held_back": held_back, "predicted_bytes": nbytes}
                expected = self.expected(new / knob.value)
                yield Decision(
                    *key, knob.value, new, "held_back", reason, expected, evidence
                )

    # What to give back

    def spared(self) -> tuple[Decision, ...]:
        """Workers that the rate of now does not keep busy; where CPU binds, half."""
        idle = tuple(self.idle_workers())
        return idle or tuple(self._crowded())

    def _crowded(self, share: float = CPU_USED) -> Iterator[Decision]:
        """More workers on the CPU than there are cores, all busy waiting for one."""
        segment = self._bottleneck()
        if segment is None or not cpu_bound(self.situation, share):
            return
        cores = cores_of(self.situation, segment)
        key: KnobKey = (segment.name, WORKERS)
        knob = self.knob(*key)
        if knob is None:
            return
        many = spent(self.situation.observation) and knob.value >= CROWD**3 * cores
        fewer = max(knob.lower, ceil(cores), knob.value // (4 if many else 2))
        while fewer < knob.value and not self.allowed(key, fewer):
            fewer = ceil((fewer + knob.value + 1) / 2)
        if fewer < knob.value:
            reason = phrases.crowded(segment.name, knob.value, cores)
            evidence = self._evidence(segment, self.rate)
            yield Decision(*key, knob.value, fewer, "crowded", reason, 1.0, evidence)


def current(curves: dict[str, Curve], seen: Observation) -> dict[str, Curve]:
    """Return the curves that agree with what is seen."""
    rate = ratio(1.0, cost_s(seen))
    counts = {segment.name: segment.num_parallel_workers for segment in seen.segments}
    return {
        name: curve
        for name, curve in curves.items()
        if is_steady(curve, counts.get(name, 0), rate)
    }


def mostly_waits(segment: SegmentObservation) -> bool:
    """Whether a row keeps its worker waiting for longer than computing."""
    return segment.cpu_s_per_row < segment.run_s_per_row / 2


def _busy(segment: SegmentObservation) -> float:
    """Share of its workers' time spent working."""
    return ratio(segment.run_s, segment.worker_s)
