"""A hill climb with Cachew's constants, as a simple policy to compare with.

While the trainer waits, it adds a worker to the busiest segment and keeps it if the
gain is at least 7 %; otherwise it does nothing for 20 windows. If the trainer does not
wait, it removes a worker. (Cachew, ATC'22: `scaling_utils.cc`, for remote workers.)
"""

from __future__ import annotations

from dataclasses import dataclass

from connector_rules import is_hungry

from penstock.autotune.policies.policy import NO_BACKOFFS, Case, Situation
from penstock.autotune.trial import Decision
from penstock.engine.observe.observation import KnobName, SegmentObservation, ratio

__all__ = ["HillClimb"]

GAIN = 0.07
ASKED_SHARE = 0.1
"""The share of a promised gain that a trial requires (`trial.MIN_SHARE`)."""
HELD_WINDOWS = 20
WORKERS: KnobName = "num_parallel_workers"


@dataclass(frozen=True)
class Memory:
    """The policy's memory."""

    held: int = 0
    """Windows left in which it tries nothing."""


class HillClimb:
    """Takes one step at a time."""

    name = "hill_climb"

    def start(self) -> Memory:
        """Return the empty memory."""
        return Memory()

    def decide(
        self, situation: Situation, memory: Memory
    ) -> tuple[tuple[Decision, ...], Memory]:
        """Step up, or down, or wait."""
        if not all(outcome.kept for outcome in situation.outcomes):
            return (), Memory(HELD_WINDOWS)
        if memory.held:
            return (), Memory(memory.held - 1)
        case = Case(situation, NO_BACKOFFS)
        if is_hungry(case):
            return self._step(case, +1), memory
        return (self._step(case, -1) if case.at_ease() else ()), memory

    def _step(self, case: Case, step: int) -> tuple[Decision, ...]:
        segments = case.situation.observation.segments
        for segment in sorted(segments, key=busy, reverse=step > 0):
            knob = case.knob(segment.name, WORKERS)
            if knob is None or not knob.lower <= knob.value + step <= knob.upper:
                continue
            expected = 1.0 + GAIN / ASKED_SHARE if step > 0 else 1.0
            old, new = knob.value, knob.value + step
            decision = Decision(
                segment.name,
                WORKERS,
                old,
                new,
                rule="hill",
                reason="as it climbs",
                expected=expected,
            )
            return (decision,)
        return ()


def busy(segment: SegmentObservation) -> float:
    """Return the share of their time that a segment's workers are busy."""
    return ratio(segment.run_s, segment.worker_s)
