"""What loading beside the trainer costs it: its own part of a step, with and without.

Threads of the engine compete with the trainer for the GIL and the caches, so what the
trainer does between two batches takes longer than it would alone. How busy each is does
not show how much longer, so it is measured. In cycles of four steps, the engine is
paused for the last two: it comes to rest in the third, and the trainer has the fourth
to itself. Batches that are ready bridge the pause.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median, quantiles
from typing import Protocol

from .observation import ContentionObservation

WARM_STEPS = 20
"""Steps before the first cycle."""
CYCLE = 4
PAUSED_FROM = 2
"""The step of a cycle from which the engine is paused."""
CYCLES = 12
"""Comparisons that make up a finding."""
REST_S = 60.0
"""Pause after a finding, in seconds; doubled each time."""


class Pausable(Protocol):
    """An engine that can stop loading for a moment."""

    @property
    def steady(self) -> bool:
        """Whether the next batch is ready, and threads load in this process."""

    @property
    def resting(self) -> bool:
        """Whether no worker is working."""

    def pause(self) -> None:
        """Hand out no more work."""

    def resume(self) -> None:
        """Continue."""


def compare(cycles: Sequence[tuple[float, float]]) -> ContentionObservation:
    """Compare the trainer's steps while the engine loads with those while it rests.

    Args:
        cycles: for each cycle, the mean of its steps and its last step, when loading
            was paused, in seconds. Pausing loads nothing less: what two of the steps
            leave undone, the other two load. So their mean is a step's true cost.
    """
    loading, paused = zip(*cycles, strict=True)
    lowest, _, _ = quantiles([a / b for a, b in cycles], n=4)
    return ContentionObservation(median(loading), median(paused), lowest > 1.0)


class ContentionMeter:
    """Measures one trainer, in its own thread, while it is `armed`.

    The tuner's thread writes `armed`; any thread may read `found`.
    """

    def __init__(self) -> None:
        self.armed = False
        """Whether a cycle may begin: no trial is running."""
        self.found: ContentionObservation | None = None
        self._cycles: list[tuple[float, float]] = []
        # The trainer's own part of each step of the current cycle, in seconds.
        self._gaps: list[float] = []
        self._paused: Pausable | None = None
        # Steps until the next cycle may begin.
        self._left = WARM_STEPS
        self._findings = 0
        self._due_s = 0.0

    def asked(self, gap_s: float) -> None:
        """Note that the trainer asks for a batch, `gap_s` after it got the last."""
        if gap_s == 0:
            self.reset()
        elif self._paused is not None:
            self._gaps.append(gap_s)
            if len(self._gaps) == CYCLE:
                self._end_cycle()
            elif not self._paused.resting:
                self.reset()
        elif self._gaps or (self.armed and self._left == 0):
            self._gaps.append(gap_s)

    def given(self, engine: Pausable | None) -> None:
        """Note that `engine` gives it a batch; None if the engine runs elsewhere."""
        if engine is None or time.monotonic() < self._due_s:
            return
        if self._left:
            self._left -= 1
        elif len(self._gaps) == PAUSED_FROM and self._paused is None:
            if engine.steady:
                self._paused = engine
                engine.pause()
            else:
                self._gaps.clear()

    def reset(self) -> None:
        """Drop an unfinished cycle: the trainer leaves its loop, or moves elsewhere."""
        self._gaps.clear()
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.resume()

    def forget(self) -> None:
        """Drop the findings: the engine is a new one."""
        self.reset()
        self.found = None
        self._cycles.clear()

    def _end_cycle(self) -> None:
        self._cycles.append((mean(self._gaps), self._gaps[-1]))
        self.reset()
        if len(self._cycles) < CYCLES:
            return
        self.found = compare(self._cycles)
        self._cycles.clear()
        self._left = WARM_STEPS
        self._due_s = time.monotonic() + REST_S * 2.0**self._findings
        self._findings += 1
