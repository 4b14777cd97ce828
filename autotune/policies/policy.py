"""The interface of a policy, and what any policy asks of its situation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Protocol, TypeVar

from ...engine.observe.observation import ratio
from .. import phrases
from ..situation import Decision, KnobKey, KnobView, Situation
from ..thresholds import BUSY, WORTH, always_ready, outbox, wait_share
from .backoff import Backoffs

WAIT_NONE = 0.01
"""Share of a step that the trainer waits, below which something may be released."""
EASE_UTILIZATION = 0.5
RELEASED_SHARE = 0.75
"""Share of the excess workers to release: the rest is for work that comes in bursts."""
PREFETCH_KEPT = 0.8
MIN_PREFETCH = 2
CPU_EXCEEDED = 1.1
"""The budget with a margin for the noise of a measured core count."""

M = TypeVar("M")


class Policy(Protocol[M]):
    """Decides from a situation and its own memory, and does nothing else.

    `M` is an immutable value. From the same start, the same situations give the same
    decisions, whether live, simulated or replayed from a log. So a policy reads no
    clock, draws no random numbers and keeps no state in itself.
    """

    @property
    def name(self) -> str:
        """Its name in the log."""

    def start(self) -> M:
        """Return the memory to start with."""

    def decide(self, situation: Situation, memory: M) -> tuple[tuple[Decision, ...], M]:
        """Return the changes to make now, verified together, and the new memory.

        No decision means that all is well, or that nothing within the budget helps.
        """


@dataclass(frozen=True, slots=True)
class Case:
    """One situation, with what any policy asks about it, or does about it."""

    situation: Situation
    backoffs: Backoffs

    def at_ease(self) -> bool:
        """Whether the trainer finds its batches ready."""
        seen = self.situation.observation
        ready = outbox(seen)
        # If one is always there, the trainer waits for the hand-over.
        fed = wait_share(seen) < WAIT_NONE or always_ready(seen)
        return seen.trainer.steps > 0 and fed and ready.utilization >= EASE_UTILIZATION

    def within_budget(self) -> Iterator[Decision]:
        """Remove a worker from the segment that uses most of too many cores."""
        seen, limit = self.situation.observation, self.situation.budget.cpu_cores
        fits = seen.cpu_cores <= CPU_EXCEEDED * limit
        if self.situation.budget.whole_machine or fits:
            return
        for segment in sorted(seen.segments, key=lambda s: s.cpu_s, reverse=True):
            knob = self.knob(segment.name, "num_parallel_workers")
            if knob is None or knob.value <= knob.lower or not segment.is_here:
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

    def idle_workers(self) -> Iterator[Decision]:
        """Release most of each segment's workers beyond the busy ones and a reserve.

        If the trainer lives on stock, the workers that will have to produce what it
        takes count as busy.
        """
        seen = self.situation.observation
        for segment in seen.segments:
            key: KnobKey = (segment.name, "num_parallel_workers")
            knob = self.knob(*key)
            if knob is None or (segment.rows == 0 < seen.trainer.rows):
                continue
            taken_s = seen.trainer.rows * segment.run_s_per_row
            busy = ratio(max(segment.run_s, taken_s), seen.window_s)
            enough = max(knob.lower, ceil(busy / BUSY), 1)
            fewer = knob.value - ceil(RELEASED_SHARE * (knob.value - enough))
            if fewer < knob.value and self.backoffs.allows(key, fewer):
                waiting = wait_share(seen) >= WORTH
                reason = phrases.idle(segment.name, busy, knob.value, waiting=waiting)
                evidence = {"busy_workers": busy}
                yield Decision(
                    *key, knob.value, fewer, "release", reason, 1.0, evidence
                )

    def idle_queues(self) -> Iterator[Decision]:
        """Release a fifth of the batches that each segment prefetches."""
        for segment in self.situation.observation.segments:
            key: KnobKey = (segment.queue_name, "prefetch_size")
            knob = self.knob(*key)
            if knob is None:
                continue
            fewer = max(knob.lower, MIN_PREFETCH, int(PREFETCH_KEPT * knob.value))
            if fewer < knob.value and self.backoffs.allows(key, fewer):
                level = segment.output.utilization
                reason = phrases.queue_idle(segment.queue_name, level)
                evidence = {"utilization": level}
                yield Decision(
                    *key, knob.value, fewer, "release", reason, 1.0, evidence
                )

    def expected(self, factor: float) -> float:
        """Return a gain of `factor`, limited to what free loading would bring."""
        seen = self.situation.observation
        gap = 1.0 - wait_share(seen) if seen.trainer.steps else 0.0
        return min(factor, 1.0 / gap) if gap > 0 else factor

    def knob(self, *key: *KnobKey) -> KnobView | None:
        """Return a knob if it exists and may be tuned."""
        knob = self.situation.knobs.get(key)
        return knob if knob is not None and knob.tunable else None
