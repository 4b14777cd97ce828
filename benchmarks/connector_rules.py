"""`connector_rules`: MindSpore's rules as one pure policy, as a fair baseline.

Rules, thresholds and steps are MindSpore's (`perf/auto_tune.cc`). If the trainer waits
and the final connector is less than 75 % full, each tunable segment, source first,

1. gets 2 workers more if its input is fuller than its output by more than 0.35;
2. otherwise gets 2 more if its workers are on a CPU more than 75 % of the time;
3. and prefetches 4 batches more if they are on a CPU less than 35 % of the time and its
   input is less than half full, or if its output is fuller than its input by more than
   0.35.

The policy differs from MindSpore where MindSpore has a defect or a gap:

- It runs several times a second, and never ends.
- Wait is a time, not the length of a queue at one moment.
- Steps shrink, and stop before the *predicted* use of CPU exceeds the budget. Only busy
  cores count. A worker that waits for I/O uses none, so such a segment may have far
  more workers than there are cores. Steps also stop before prefetched bytes exceed the
  budget.
- One segment at a time gets workers, and rule 3 applies only if rules 1 and 2 do not,
  so that each effect has one cause. (Two changes at once were both rolled back if one
  of them did harm.)
- Changes that do not help are rolled back and remembered.
- Resources that the trainer does not need are released. First idle workers, by Little's
  law (busy workers = run seconds per second), three quarters of the excess at a time;
  then prefetched batches, a fifth at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.autotune import phrases
from penstock.autotune.explain import CPU_HIGH, CPU_LOW, DIFFERENCE
from penstock.autotune.policies.policy import (
    CPU_EXCEEDED,
    NO_BACKOFFS,
    Backoffs,
    Case,
    KnobKey,
    Situation,
)
from penstock.autotune.trial import Decision
from penstock.autotune.window import WORTH, outbox, starving, wait_share
from penstock.engine.observe.observation import SegmentObservation

INPUT_LOW = 0.5
FINAL_UTILIZATION = 0.75
WORKERS_STEP = 2
PREFETCH_STEP = 4
MAX_PREFETCH = 16
"""Batches. More of them would only hide for longer that loading is too slow."""

EASE_WINDOWS = 3
HUNGRY_WINDOWS = 2
"""A short wait must be seen twice before it counts."""
CPU_TO_SPARE = 0.9
"""Below this share of the machine, one more worker may use the rest of a core."""


@dataclass(frozen=True, slots=True)
class RulesMemory:
    """What the policy remembers from one window to the next."""

    hungry: int = 0
    """Windows in a row in which the trainer waited."""
    at_ease: int = 0
    """Windows in a row in which it did not, and batches were ready."""
    backoffs: Backoffs = NO_BACKOFFS


class ConnectorRules:
    """MindSpore's rules, bounded by the budget, that also release resources."""

    def start(self) -> RulesMemory:
        """Return the state in which nothing is known."""
        return RulesMemory()

    def decide(
        self, situation: Situation, memory: RulesMemory
    ) -> tuple[tuple[Decision, ...], RulesMemory]:
        """Keep to the budget first, then add workers, then release some."""
        backoffs = memory.backoffs.learned(situation.outcomes, situation.observation)
        case = _Rules(situation, backoffs)
        if mended := tuple(case.within_budget()):
            return mended, RulesMemory(backoffs=backoffs)
        if is_hungry(case):
            hungry = memory.hungry + 1
            sure = hungry >= HUNGRY_WINDOWS or starving(situation.observation)
            growth = case.growth() if sure else ()
            return growth, RulesMemory(hungry=hungry, backoffs=backoffs)
        at_ease = memory.at_ease + 1 if case.at_ease() else 0
        spared: tuple[Decision, ...] = ()
        if at_ease >= EASE_WINDOWS:
            spared = tuple(case.idle_workers()) or tuple(case.idle_queues())
        return spared, RulesMemory(at_ease=at_ease, backoffs=backoffs)


def is_hungry(case: Case) -> bool:
    """Whether the trainer waits for batches that are not ready."""
    observation = case.situation.observation
    return (
        wait_share(observation) >= WORTH
        and outbox(observation).utilization < FINAL_UTILIZATION
    )


class _Rules(Case):
    """MindSpore's three rules, applied to one situation."""

    __slots__ = ()

    def growth(self) -> tuple[Decision, ...]:
        """Apply rule 1 or 2 to the first segment that it fits; if there is none, 3."""
        segments = self.situation.observation.segments
        for segment in segments:
            decision = self._more_workers(segment)
            if decision is not None:
                return (decision,)
        queues = [self._more_prefetch(segment) for segment in segments]
        return tuple(decision for decision in queues if decision)

    def _more_workers(self, segment: SegmentObservation) -> Decision | None:
        key: KnobKey = (segment.name, "num_parallel_workers")
        diagnosis = _short_of_workers(segment)
        more = self._affordable_workers(key) if diagnosis else None
        if diagnosis is None or more is None:
            return None
        rule, reason = diagnosis
        old, new = more
        evidence = {
            "input_utilization": segment.input_utilization,
            "output_utilization": segment.output.utilization,
            "cpu_utilization": segment.cpu_utilization,
            "run_s_per_row": segment.run_s_per_row,
            "cpu_s_per_row": segment.cpu_s_per_row,
        }
        expected = self.expected(new / old)
        return Decision(*key, old, new, rule, reason, expected, evidence)

    def _affordable_workers(self, key: KnobKey) -> tuple[int, int] | None:
        """Return the largest step, up to `WORKERS_STEP`, that is allowed."""
        knob = self.knob(*key)
        if knob is None:
            return None
        observation, budget = self.situation.observation, self.situation.budget
        spare = budget.whole_machine and (
            observation.cpu_cores < CPU_TO_SPARE * budget.cpu_cores
        )
        for step in range(WORKERS_STEP, 0, -1):
            new = knob.value + step
            # More rows per second cost every segment more CPU, not only this one.
            cores = observation.cpu_cores * self.expected(new / knob.value)
            fits = cores <= CPU_EXCEEDED * budget.cpu_cores or (spare and step == 1)
            if fits and new <= knob.upper and self.backoffs.allows(key, new):
                return knob.value, new
        return None

    def _more_prefetch(self, segment: SegmentObservation) -> Decision | None:
        key: KnobKey = (segment.queue_name, "prefetch_size")
        knob = self.knob(*key)
        cpu = segment.cpu_utilization
        feeding, output = segment.input_utilization, segment.output.utilization
        starved = feeding < INPUT_LOW or output - feeding > DIFFERENCE
        if knob is None or cpu >= CPU_LOW or not starved:
            return None
        new = min(knob.value + PREFETCH_STEP, knob.upper, MAX_PREFETCH)
        observation = self.situation.observation
        nbytes = (new - knob.value) * observation.batch_bytes
        fits = observation.held_bytes + nbytes <= self.situation.budget.memory_bytes
        if new <= knob.value or not fits or not self.backoffs.allows(key, new):
            return None
        reason = phrases.cpu(segment.queue_name, cpu, CPU_LOW)
        evidence = {
            "cpu_utilization": cpu,
            "input_utilization": feeding,
            "output_utilization": output,
            "predicted_bytes": nbytes,
        }
        expected = self.expected(new / knob.value)
        return Decision(*key, knob.value, new, "cpu_low", reason, expected, evidence)


def _short_of_workers(segment: SegmentObservation) -> tuple[str, str] | None:
    """Return which of rules 1 and 2 a segment meets, and the evidence in words."""
    feeding, output = segment.input_utilization, segment.output.utilization
    if feeding - output > DIFFERENCE:
        return "slow", phrases.slow(segment.name, feeding, output, DIFFERENCE)
    cpu = segment.cpu_utilization
    if cpu > CPU_HIGH:
        return "cpu_high", phrases.cpu(segment.name, cpu, CPU_HIGH)
    return None
