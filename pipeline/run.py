"""A run: one engine with its feed, from the first batch to its close."""

from __future__ import annotations

import time
from collections import deque

from .compile import Recipe
from .credits import Purse
from .engine import Engine
from .feed import Delivery, Feed, PlannedFeed
from .knob import Knob
from .monitor import Reading, Window, difference
from .observation import Observation
from .plan import Cursor
from .repack import RepackFeed

__all__ = ["Run"]

HISTORY = 10
NOTE_NS = 1_000_000_000
"""One reading a second is kept, for `recent`."""


class Run:
    """What iterating a pipeline starts, and keeps between epochs.

    `next` and `begin` belong to the trainer's thread; `observe`, `knobs` and `steps` to
    the tuner's; `close` may be called from any.
    """

    def __init__(self, recipe: Recipe, purse: Purse, cursor: Cursor) -> None:
        self.engine = Engine(recipe, purse, cursor.step)
        make = RepackFeed if recipe.repack else PlannedFeed
        self.feed: Feed = make(self.engine, cursor)
        self.feed.begin(cursor)
        self.engine.__enter__()
        self._trainer = self.engine.trainer
        self._window = Window(self.engine.monitor)
        self._history = deque((self.read(),), HISTORY)
        self._noted_ns = time.perf_counter_ns()

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`; free where that is what has been prefetched."""
        self.feed.begin(cursor)
        self._history.clear()
        self._note(time.perf_counter_ns())

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end; measured."""
        trainer = self._trainer
        trainer.ask(time.perf_counter_ns())
        delivery = self.feed.next()
        now_ns = time.perf_counter_ns()
        if delivery is None:
            self._note(now_ns)
            trainer.stop()
            return None
        if now_ns - self._noted_ns > NOTE_NS:
            self._note(now_ns)
        plan = delivery.plan
        trainer.get(now_ns, plan.n_rows, plan.epoch, plan.step)
        return delivery

    # The tuner's side: this is the plant it tunes

    @property
    def steps(self) -> int:
        """Batches handed over since the start."""
        return self._trainer.steps

    def observe(self) -> Observation | None:
        """Return the window since the last call; None if the trainer is elsewhere."""
        observation = self._window.observe()
        return observation if self._trainer.training else None

    def knobs(self) -> tuple[Knob, ...]:
        """Return everything that may be turned."""
        return self.engine.knobs()

    def recent(self) -> Observation:
        """Return the last ten seconds or so of training, however long ago they were."""
        readings = list(self._history)
        if self._trainer.training:
            readings.append(self.read())
        return difference(readings[0], readings[-1])

    def read(self) -> Reading:
        """Return all totals as of now."""
        return self.engine.monitor.read()

    def close(self) -> None:
        """Stop everything. Idempotent."""
        self.engine.close()

    def _note(self, now_ns: int) -> None:
        self._noted_ns = now_ns
        self._history.append(self.read())

    def __repr__(self) -> str:
        return f"<Run at {self.feed.cursor}: {self.engine!r}>"
