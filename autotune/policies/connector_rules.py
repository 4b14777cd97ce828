"""`connector_rules`: MindSpore's rules as one pure policy, the honest baseline.

Its rules, thresholds and steps (MindSpore, `perf/auto_tune.cc`): where the trainer
waits and the final connector is less than 75 % full, each tunable segment, source
first,

1. gets 2 workers more if its input is fuller than its output by more than 0.35;
2. else 2 more if its workers are more than 75 % of the time on a CPU;
3. and prefetches 4 batches more if they are less than 35 % on a CPU and its input is
   less than half full, or its output fuller than its input by more than 0.35.

What differs, because there it is a defect or missing: it is asked several times a
second and never ends; wait is time, not a queue's length at one moment; steps shrink
and stop where the CPU budget is *predicted* to be used up (cores really busy: a worker
that waits for I/O costs none, so such a segment may go far beyond the core count) and
where the prefetched bytes would not fit; one segment at a time gets workers, and rule 3
has its turn where 1 and 2 find nothing, so that what came of it is known to have come
of it (two at once were rolled back together for the harm of one); what did not help is
rolled back and remembered; and what the trainer does not need is given back: idle
workers by Little's law (busy workers = run seconds a second), three quarters of the
excess at a time, then prefetched batches, a fifth at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from ...pipeline.observation import SegmentObservation, ratio
from .. import phrases
from ..decision import Decision
from ..situation import KnobKey, KnobView, Situation
from ..window import outbox, starving, wait_share
from .holds import Hold, allowed, learned

__all__ = ["ConnectorRules", "Memory"]

FINAL_UTILIZATION = 0.75
DIFFERENCE = 0.35
INPUT_LOW = 0.5
CPU_HIGH = 0.75
CPU_LOW = 0.35
WORKERS_STEP = 2
PREFETCH_STEP = 4
PREFETCH_MOST = 16
"""Batches; more only hides for longer that loading is too slow."""

WAIT_TOLERATED = 0.03
"""Below this share of the step there is nothing worth adding for."""
WAIT_NONE = 0.01
"""Below this share something may be given back."""
EASE_UTILIZATION = 0.5
EASE_WINDOWS = 3
HUNGRY_WINDOWS = 2
"""A short wait is seen twice before it is believed."""
RELEASED_SHARE = 0.75
"""Of the workers in excess: what is left of them is for work that comes in bursts."""
BUSY_SHARE = 0.8
"""Workers are to be busy so much of the time: the rest is for uneven work."""
PREFETCH_KEPT = 0.8
PREFETCH_LEAST = 2
CPU_EXCEEDED = 1.1
"""The budget with the noise of a measured core count."""
CPU_TO_SPARE = 0.9
"""Below this share of a whole machine, one worker more may use the rest of a core."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers from one window to the next."""

    hungry: int = 0
    """Windows in a row in which the trainer waited."""
    at_ease: int = 0
    """Windows in a row in which it did not, and batches were ready."""
    holds: tuple[Hold, ...] = ()


class ConnectorRules:
    """MindSpore's rules, bounded by the budget, and giving back."""

    name = "connector_rules"

    def start(self) -> Memory:
        """Nothing is known."""
        return Memory()

    def decide(
        self, situation: Situation, memory: Memory
    ) -> tuple[tuple[Decision, ...], Memory]:
        """Mend what breaks the budget, else add where it starves, else give back."""
        holds = learned(memory.holds, situation.outcomes, situation.observation)
        case = _Case(situation, holds)
        if mended := tuple(case.within_budget()):
            return mended, Memory(holds=holds)
        if case.hungry():
            hungry = memory.hungry + 1
            sure = hungry >= HUNGRY_WINDOWS or starving(situation.observation)
            grown = case.growth() if sure else ()
            return grown, Memory(hungry=hungry, holds=holds)
        at_ease = memory.at_ease + 1 if case.at_ease() else 0
        spared: tuple[Decision, ...] = ()
        if at_ease >= EASE_WINDOWS:
            spared = tuple(case.idle_workers()) or tuple(case.idle_queues())
        return spared, Memory(at_ease=at_ease, holds=holds)


@dataclass(frozen=True, slots=True)
class _Case:
    """One situation, with the questions the rules ask of it."""

    situation: Situation
    holds: tuple[Hold, ...]

    def hungry(self) -> bool:
        """Whether the trainer waits for batches that are not there."""
        seen = self.situation.observation
        return (
            wait_share(seen) >= WAIT_TOLERATED
            and outbox(seen).utilization < FINAL_UTILIZATION
        )

    def at_ease(self) -> bool:
        """Whether the trainer finds its batches ready."""
        seen = self.situation.observation
        return (
            seen.trainer.steps > 0
            and wait_share(seen) < WAIT_NONE
            and outbox(seen).utilization >= EASE_UTILIZATION
        )

    def within_budget(self) -> Iterator[Decision]:
        """Take a worker from the segment that uses most of too many cores."""
        seen, limit = self.situation.observation, self.situation.budget.cpu_cores
        if seen.cpu_cores <= CPU_EXCEEDED * limit:
            return
        for segment in sorted(seen.segments, key=lambda s: s.cpu_s, reverse=True):
            knob = self._knob(segment.name, "num_parallel_workers")
            if knob is None or knob.value <= knob.lower:
                continue
            yield Decision(
                operator=segment.name,
                knob="num_parallel_workers",
                old=knob.value,
                new=knob.value - 1,
                rule="cpu_budget",
                reason=phrases.cpu_over_budget(segment.name, seen.cpu_cores, limit),
                expected=min(1.0, limit / seen.cpu_cores),
                evidence={"cpu_cores": seen.cpu_cores, "budget_cores": limit},
                forced=True,
            )
            return

    def growth(self) -> tuple[Decision, ...]:
        """Rules 1 and 2 for the first segment they fit; where they fit none, 3."""
        segments = self.situation.observation.segments
        for segment in segments:
            decision = self._more_workers(segment)
            if decision is not None:
                return (decision,)
        queues = [self._more_prefetch(segment) for segment in segments]
        return tuple(decision for decision in queues if decision)

    def idle_workers(self) -> Iterator[Decision]:
        """Most of what each segment has beyond its busy workers and their reserve."""
        seen = self.situation.observation
        for segment in seen.segments:
            key: KnobKey = (segment.name, "num_parallel_workers")
            knob = self._knob(*key)
            if knob is None:
                continue
            busy = ratio(segment.run_s, seen.window_s)
            enough = max(knob.lower, ceil(busy / BUSY_SHARE), 1)
            fewer = knob.value - ceil(RELEASED_SHARE * (knob.value - enough))
            if fewer < knob.value and self._allowed(key, fewer):
                reason = phrases.idle(segment.name, busy, knob.value)
                evidence = {"busy_workers": busy}
                yield _release(key, knob.value, fewer, reason, evidence)

    def idle_queues(self) -> Iterator[Decision]:
        """A fifth of the batches each segment prefetches."""
        for segment in self.situation.observation.segments:
            key: KnobKey = (segment.queue_name, "prefetch_size")
            knob = self._knob(*key)
            if knob is None:
                continue
            fewer = max(knob.lower, PREFETCH_LEAST, int(PREFETCH_KEPT * knob.value))
            if fewer < knob.value and self._allowed(key, fewer):
                level = segment.output.utilization
                reason = phrases.queue_idle(segment.queue_name, level)
                yield _release(key, knob.value, fewer, reason, {"utilization": level})

    def _more_workers(self, segment: SegmentObservation) -> Decision | None:
        key: KnobKey = (segment.name, "num_parallel_workers")
        found = _short_of_workers(segment)
        more = self._affordable_workers(key) if found else None
        if found is None or more is None:
            return None
        rule, reason = found
        old, new = more
        evidence = {
            "input_utilization": segment.input_utilization,
            "output_utilization": segment.output.utilization,
            "cpu_utilization": segment.cpu_utilization,
            "run_s_per_row": segment.run_s_per_row,
            "cpu_s_per_row": segment.cpu_s_per_row,
        }
        expected = self._expected(new / old)
        return Decision(*key, old, new, rule, reason, expected, evidence)

    def _affordable_workers(self, key: KnobKey) -> tuple[int, int] | None:
        """The largest step up to `WORKERS_STEP` that nothing speaks against."""
        knob = self._knob(*key)
        if knob is None:
            return None
        seen, budget = self.situation.observation, self.situation.budget
        spare = budget.whole_machine and (
            seen.cpu_cores < CPU_TO_SPARE * budget.cpu_cores
        )
        for step in range(WORKERS_STEP, 0, -1):
            new = knob.value + step
            # More rows a second cost every segment more CPU, not this one alone.
            cores = seen.cpu_cores * self._expected(new / knob.value)
            fits = cores <= CPU_EXCEEDED * budget.cpu_cores or (spare and step == 1)
            if fits and new <= knob.upper and self._allowed(key, new):
                return knob.value, new
        return None

    def _more_prefetch(self, segment: SegmentObservation) -> Decision | None:
        key: KnobKey = (segment.queue_name, "prefetch_size")
        knob = self._knob(*key)
        cpu = segment.cpu_utilization
        feeding, output = segment.input_utilization, segment.output.utilization
        starved = feeding < INPUT_LOW or output - feeding > DIFFERENCE
        if knob is None or cpu >= CPU_LOW or not starved:
            return None
        new = min(knob.value + PREFETCH_STEP, knob.upper, PREFETCH_MOST)
        nbytes = (new - knob.value) * self._batch_bytes(segment)
        held = self.situation.observation.held_bytes
        fits = held + nbytes <= self.situation.budget.memory_bytes
        if new <= knob.value or not fits or not self._allowed(key, new):
            return None
        reason = phrases.cpu_low(segment.queue_name, cpu, CPU_LOW)
        evidence = {
            "cpu_utilization": cpu,
            "input_utilization": feeding,
            "output_utilization": output,
            "predicted_bytes": nbytes,
        }
        expected = self._expected(new / knob.value)
        return Decision(*key, knob.value, new, "cpu_low", reason, expected, evidence)

    def _expected(self, factor: float) -> float:
        """A gain of `factor`, but no more than loading for free would bring."""
        seen = self.situation.observation
        gap = 1.0 - wait_share(seen) if seen.trainer.steps else 0.0
        return min(factor, 1.0 / gap) if gap > 0 else factor

    def _batch_bytes(self, segment: SegmentObservation) -> float:
        """Bytes one more prefetched batch will hold, by those that wait now."""
        seen = self.situation.observation
        rows = ratio(segment.output.capacity, segment.prefetch_size)
        if segment.output.occupancy >= 1.0:
            return rows * segment.output.nbytes / segment.output.occupancy
        waiting = sum(
            s.output.occupancy + s.num_parallel_workers for s in seen.segments
        )
        return rows * ratio(seen.held_bytes, waiting)

    def _knob(self, *key: *KnobKey) -> KnobView | None:
        knob = self.situation.knobs.get(key)
        return knob if knob is not None and knob.tunable else None

    def _allowed(self, key: KnobKey, value: int) -> bool:
        return allowed(self.holds, key, value, self.situation.observation.time_s)


def _short_of_workers(segment: SegmentObservation) -> tuple[str, str] | None:
    """Which of rules 1 and 2 it meets, and the evidence in words."""
    feeding, output = segment.input_utilization, segment.output.utilization
    if feeding - output > DIFFERENCE:
        return "slow", phrases.slow(segment.name, feeding, output, DIFFERENCE)
    cpu = segment.cpu_utilization
    if cpu > CPU_HIGH:
        return "cpu_high", phrases.cpu_high(segment.name, cpu, CPU_HIGH)
    return None


def _release(
    key: KnobKey, old: int, new: int, reason: str, evidence: dict[str, float]
) -> Decision:
    return Decision(*key, old, new, "release", reason, 1.0, evidence)
