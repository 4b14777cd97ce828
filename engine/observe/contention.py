"""What loading beside the trainer costs it: its own part of a step, beside and alone.

Workers compete with the trainer for the GIL, the cores and the caches, so what it does
between two batches takes longer than it would alone. How busy each is does not show how
much longer, so it is measured. While the trainer makes its batches itself, its steps
are alone anyway. Later, loading rests for a step now and then, once the batch for that
step is there: a look. Looks take at most `SHARE` of a run.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from .observation import ContentionObservation

SHARE = 0.005
"""Largest part of a run that may be spent on looks."""
WARM_STEPS = 5
"""The first steps of a run are slow by nature: they do not count."""
KEPT = 64
"""Steps beside loading that are compared: the latest."""
MIN_BESIDE, MIN_FREE = 10, 3
"""Steps of each sort that are enough, if no look has been taken."""
KNOWN = 8
"""Looks after which the next ones are rare."""
RARE_S = 60.0
"""Pause between looks then, in seconds."""
REST_S, MAX_REST_S = 0.002, 0.05
"""How long the trainer waits until loading rests, at first and at most, in seconds:
twice as long after each look that failed."""
POLL_S = 0.0002
ODD = 3.0
"""A step that takes this many times the usual one does something else, too."""
SURE = 0.85
"""Share of all pairs of a step beside loading and one alone in which the first must be
the longer one, to be certain (the statistic of Mann and Whitney, 1947, which a single
odd step hardly changes)."""
FEW, MUCH = 3, 1.15
"""Fewer steps alone than this must be this many times shorter."""


class Pausable(Protocol):
    """An engine that can stop loading for a moment."""

    @property
    def beside(self) -> bool | None:
        """Whether others load beside the trainer; None while that is changing."""

    @property
    def resting(self) -> bool:
        """Whether no worker is working."""

    def pause(self, until_ns: int) -> None:
        """Load nothing; children go on at this moment of the monotonic clock."""

    def resume(self) -> None:
        """Continue."""


def compare(
    beside: Sequence[float], alone: Sequence[float]
) -> ContentionObservation | None:
    """Compare the trainer's own part of steps beside loading and of steps alone.

    Args:
        beside: the latest steps beside loading, in seconds.
        alone: the latest steps alone, in seconds.

    Returns:
        None if there are too few.
    """
    if len(beside) < MIN_BESIDE or not alone:
        return None
    ordered, factor = sorted(beside), 1.0 if len(alone) >= FEW else MUCH
    longer = sum(len(beside) - bisect_left(ordered, factor * each) for each in alone)
    certain = longer >= SURE * len(beside) * len(alone)
    return ContentionObservation(median(beside), median(alone), certain)


class ContentionMeter:
    """Measures one trainer, in its own thread.

    The tuner's thread writes `armed`; any thread may read `found`, or `renew`.
    """

    def __init__(self) -> None:
        self.armed = True
        """Whether a look may be taken: no trial is running."""
        self._began_s = time.monotonic()
        # The trainer's own part of steps, in seconds. `_free` ones were alone anyway.
        self._beside: deque[float] = deque(maxlen=KEPT)
        self._alone: deque[float] = deque(maxlen=2 * KNOWN)
        self._free: deque[float] = deque(maxlen=KEPT)
        self._now: deque[float] | None = None
        """Where the present step belongs; None: nowhere."""
        self._left = WARM_STEPS
        self._paused: Pausable | None = None
        self._look_s = self._spent_s = self._due_s = 0.0
        self._looks = self._failed = 0

    @property
    def found(self) -> ContentionObservation | None:
        """What is known of loading as it is now; None if that is too little."""
        alone, free = list(self._alone), list(self._free)
        if not alone and len(free) >= MIN_FREE:
            alone = free
        return compare(list(self._beside), alone)

    def asked(self, gap_s: float) -> None:
        """Note that the trainer asks for a batch, `gap_s` after it got the last."""
        if gap_s == 0:
            self.reset()
        elif self._paused is not None:
            if self._paused.resting and gap_s < ODD * median(self._beside):
                self._alone.append(gap_s)
                self._looks, self._failed = self._looks + 1, 0
            self.reset()
        elif self._left:
            self._left -= 1
        elif self._now is not None:
            self._now.append(gap_s)

    def given(self, engine: Pausable | None) -> None:
        """Note that `engine` gives it a batch; None if the trainer made it itself."""
        loads = False if engine is None else engine.beside
        self._now = (
            (self._beside if loads else self._free) if loads is not None else None
        )
        if not loads or engine is None or not self.armed:
            return
        now_s = time.monotonic()
        if now_s < self._due_s or len(self._beside) < MIN_BESIDE:
            return
        step_s = median(self._beside)
        rest_s = min(MAX_REST_S, REST_S * 2.0**self._failed)
        left_s = SHARE * (now_s - self._began_s) - self._spent_s
        if left_s >= rest_s + step_s:
            self._look(engine, now_s, rest_s, step_s)
        else:
            self._due_s = now_s + (rest_s + step_s - left_s) / SHARE

    def reset(self) -> None:
        """End a look: its step is over, or the trainer leaves its loop."""
        paused, self._paused = self._paused, None
        if paused is None:
            return
        paused.resume()
        now_s = time.monotonic()
        cost_s = now_s - self._look_s
        self._spent_s += cost_s
        next_s = self._began_s + (self._spent_s + cost_s * 2.0**self._failed) / SHARE
        self._due_s = max(next_s, now_s + RARE_S * (self._looks >= KNOWN))

    def forget(self) -> None:
        """Drop the steps beside loading as it was: it has changed."""
        self._beside.clear()

    def renew(self) -> None:
        """Drop all that was measured: the trainer's steps have become other ones."""
        self._looks = 0
        for steps in self._beside, self._alone, self._free:
            steps.clear()

    def _look(
        self, engine: Pausable, now_s: float, rest_s: float, step_s: float
    ) -> None:
        """Let loading rest for the step that begins, if it comes to rest in time."""
        self._paused, self._look_s = engine, now_s
        self._failed += 1  # until it has succeeded
        until_s = now_s + rest_s
        engine.pause(int(1e9 * (until_s + ODD * step_s)))
        while not engine.resting:
            if time.monotonic() > until_s:
                self.reset()
                return
            time.sleep(POLL_S)
