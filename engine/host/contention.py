"""What loading beside the trainer costs it: its gap while the engine works, and not.

Threads of the engine take the GIL from the trainer, and the caches, so what the trainer
does between two batches takes longer than it would alone. How much cannot be told from
how busy either is; it is measured: every few steps the engine holds still for one.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, quantiles

__all__ = [
    "Contention",
    "Trial",
]

CYCLES = 12
"""Comparisons that make a finding."""
MIN_GROWTH = 0.05
"""From which a process of its own is tried: it takes memory, and a copy of each
batch."""
STEPS = 40
"""Of either host that make a verdict."""
SETTLING_STEPS = 20
"""Left out at first: the new host starts with nothing in stock."""


@dataclass(frozen=True, slots=True)
class Contention:
    """The trainer's gaps in cycles of a few steps, the last of them left in peace."""

    cycles: tuple[tuple[float, float], ...] = ()
    """Seconds: the mean gap of a cycle, and the one in peace."""

    def seen(self, gaps: Sequence[float]) -> Contention:
        """The same with one more cycle."""
        return replace(self, cycles=(*self.cycles, (mean(gaps), gaps[-1])))

    @property
    def whole(self) -> bool:
        """Whether there are enough of them."""
        return len(self.cycles) >= CYCLES

    @property
    def gaps(self) -> tuple[float, float]:
        """Medians, in seconds: with the engine at work, and without."""
        at_work, in_peace = zip(*self.cycles, strict=True)
        return median(at_work), median(in_peace)

    @property
    def growth(self) -> float:
        """By what share the gap grows with the engine's work."""
        return median(self._growths)

    @property
    def costly(self) -> bool:
        """Whether it grows by enough, and in nearly all cycles, for a move to pay."""
        lowest, _, _ = quantiles(self._growths, n=4)
        return self.growth >= MIN_GROWTH and lowest > 0

    @property
    def _growths(self) -> list[float]:
        return [at_work / in_peace - 1 for at_work, in_peace in self.cycles]


@dataclass(frozen=True, slots=True)
class Trial:
    """Whole steps, wait and gap, in seconds, before and after a move."""

    before: tuple[float, ...]
    after: tuple[float, ...] = ()
    skipped: int = 0

    def seen(self, step_s: float) -> Trial:
        """The same with one more step under the new host."""
        if self.skipped < SETTLING_STEPS:
            return replace(self, skipped=self.skipped + 1)
        return replace(self, after=(*self.after, step_s))

    @property
    def whole(self) -> bool:
        """Whether it can be judged."""
        return len(self.after) >= STEPS

    @property
    def steps(self) -> tuple[float, float]:
        """Means, before and after: what counts is how long all of them take."""
        return _middle(self.before), _middle(self.after)

    @property
    def kept(self) -> bool:
        """Whether the trainer's steps got shorter."""
        before, after = self.steps
        return after < before


def _middle(steps: Sequence[float]) -> float:
    """Return the mean without the tenth at either end: a pause is not the host's."""
    cut = len(steps) // 10
    return mean(sorted(steps)[cut : len(steps) - cut])
