"""A rest: for a moment, an engine takes nothing from the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .core.connector import EngineLock
from .segment import Segment

BESIDE = ("thread", "async", "process")
"""Kinds of workers that take something from a trainer on this machine."""


class Rest:
    """Lets the workers of an engine rest. For the trainer's thread.

    Args:
        engine_lock: hands out their work.
        segments: whose workers they are.
    """

    def __init__(self, engine_lock: EngineLock, segments: Sequence[Segment]) -> None:
        self._engine_lock, self._segments = engine_lock, segments
        self._alarm: threading.Timer | None = None
        """Ends a rest that lasts too long; None: they do not rest."""

    @property
    def beside(self) -> bool | None:
        """Whether others load beside the trainer; None while that is changing."""
        if any(segment.moving for segment in self._segments):
            return None
        return any(segment.executor in BESIDE for segment in self._segments)

    @property
    def ready(self) -> bool:
        """Whether the next batch is there."""
        return self._engine_lock.peek() is not None

    @property
    def fed(self) -> bool:
        """Whether the trainer does a part of the work itself."""
        return any(segment.inline is not None for segment in self._segments)

    @property
    def resting(self) -> bool:
        """Whether they rest, and nobody takes anything from the trainer."""
        with self._engine_lock.lock:
            # Actors take nothing from the trainer.
            pools = (s.pool for s in self._segments if s.executor != "ray")
            at_work = any(pool.at_work() for pool in pools)
            return self._alarm is not None and not at_work

    def pause(self, until_ns: int) -> None:
        """Hand out no more work. Batches that are ready may still be taken.

        Args:
            until_ns: when they go on by themselves, by the monotonic clock: the
                trainer may do something else, or wait for what a sample does.
        """
        seconds = (until_ns - time.monotonic_ns()) / 1e9
        alarm = threading.Timer(max(0.0, seconds), self._wake)
        alarm.name, alarm.daemon = "penstock rest", True
        with self._engine_lock.lock:
            self._alarm = alarm  # first: Ctrl-C may come between the two
            self._engine_lock.core.pause()
        for segment in self._segments:
            segment.pool.rest(until_ns)  # within leases, where these are long
        alarm.start()

    def resume(self) -> None:
        """Hand out work again."""
        for segment in self._segments:
            segment.pool.rest(0)
        if (alarm := self._wake()) is not None:
            alarm.cancel()

    def _wake(self) -> threading.Timer | None:
        """End the rest, if it goes on: a fork may have paused the engine since."""
        with self._engine_lock.lock:
            alarm, self._alarm = self._alarm, None
            if alarm is not None:
                self._engine_lock.core.unpause()
                self._engine_lock.wake()
        return alarm
