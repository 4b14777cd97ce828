"""Noise: how much windows differ while nothing is changed, and so how many it takes.

One sample in a hundred that takes fifty times as long makes one half second twice as
slow as the next. Who decided on one of them would follow the dice. What two windows in
a row differ by tells their noise without a trend (J. von Neumann, 1941: the mean square
successive difference), and the mean of `n` is noisy by a square root of `n` less.
"""

from __future__ import annotations

from collections import deque
from math import ceil, isfinite

from ..pipeline.observation import Observation
from .window import cost_s

__all__ = ["MOST_WINDOWS", "Noise"]

AIM = 0.1
"""The standard error, relative, of what is decided on."""
MOST_WINDOWS = 12
JUMP = 0.15
"""Difference between two windows, relative, from which the load may have changed."""
JUMP_ERRORS = 3.0
"""The same in standard errors."""
REMEMBERED = 16
"""Differences."""
PRIOR = 2
"""Differences of nothing that are taken for seen, before there are many."""


class Noise:
    """Estimates the noise of a window's cost from windows as they come."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._squares: deque[float] = deque(maxlen=REMEMBERED)

    def see(self, window: Observation) -> bool:
        """One more window under the values of the one before.

        Returns:
            Whether it differs from that by more than noise: the load has changed, and
            this window may show some of either.
        """
        cost = cost_s(window)
        if not isfinite(cost):
            return False
        last, self._last = self._last, cost
        if last is None:
            return False
        difference = (cost - last) / (0.5 * (cost + last))
        known = JUMP_ERRORS**2 * 2.0 * self._variance
        self._squares.append(difference**2)
        return difference**2 > max(JUMP**2, known)

    def cut(self) -> None:
        """Something is changed: the next window has none before it."""
        self._last = None

    @property
    def windows(self) -> int:
        """How many windows are evidence, at least one."""
        return max(1, min(MOST_WINDOWS, ceil(self._variance / AIM**2)))

    @property
    def _variance(self) -> float:
        """Of one window, relative."""
        return sum(self._squares) / 2.0 / (PRIOR + len(self._squares))

    def __repr__(self) -> str:
        return f"<Noise: {self.windows} windows are evidence>"
