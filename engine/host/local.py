"""What a run needs of an engine's host, and the host in the trainer's own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..core.byte_budget import ByteBudget
from ..engine import Engine
from ..far.pools import FarPools
from ..feed import Delivery, DrawnFeed, Feed, PlannedFeed, RepackFeed
from ..observe.knob import Knob
from ..observe.observation import Observation
from ..observe.trainer_meter import TrainerMeter
from ..plan import Cursor
from ..recipe import Recipe


class Host(Protocol):
    """An engine with its feed, in this process or another.

    `next`, `begin`, `glance` and `cursor` belong to the trainer's thread. Any thread
    may call `read` and `knobs`, at the same time.
    """

    @property
    def engine(self) -> Engine | None:
        """The engine; None if the trainer makes the batches by itself."""

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, not yet stamped; None at its end.

        Raises:
            Exception: as `Feed.next`.
            WorkerError: a process that was needed died repeatedly.
        """

    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`, dropping everything in flight for other positions."""

    def read(self) -> Observation:
        """Return the window since the run began."""

    def glance(self) -> Observation | None:
        """Return totals about once a second, if they cost the trainer nothing."""

    def knobs(self) -> tuple[Knob, ...]:
        """Return everything that may be set."""

    def is_free(self) -> bool:
        """Whether no thread, this one included, is stuck holding a lock of ours."""

    def close(self) -> None:
        """Stop everything. Idempotent in each of its steps."""


NOTE_NS = 1_000_000_000
"""A reading a second is enough for figures over the last ten seconds."""


class TrainerHost:
    """One engine with its feed.

    Args:
        recipe: what to run.
        byte_budget: the bytes it may hold.
        cursor: where the first batch starts.
        trainer: the meter of whoever calls `next`.
        feed: a feed that has begun, and continues with this engine; None makes one.
    """

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        cursor: Cursor,
        trainer: TrainerMeter,
        feed: RepackFeed | None = None,
    ) -> None:
        step = cursor.step if feed is None else feed.engine.head
        engine: Engine | None = None
        try:
            engine = Engine(recipe, byte_budget, step, trainer=trainer, pools=FarPools)
            self.engine = engine
            self._feed: Feed = feed or _feed(recipe)(self.engine, cursor)
            if feed is None:
                self._feed.begin(cursor)
            else:
                self.engine.begin_epoch(feed.cursor.epoch)
            self.engine.__enter__()
            if feed is not None:  # only now: had it failed, the maker would go on
                feed.engine = self.engine
            self._noted_ns = time.perf_counter_ns()
        except BaseException:  # Ctrl-C, and nobody knows of this engine yet
            if engine is not None:
                engine.close()
            raise

    @property
    def cursor(self) -> Cursor:
        return self._feed.cursor

    def next(self) -> Delivery | None:
        delivery = self._feed.next()
        if delivery is None:
            self.engine.end_epoch()
            if _begins_ahead(self.engine.recipe):
                self.engine.suspension.rest()
        return delivery

    def begin(self, cursor: Cursor) -> None:
        self.engine.suspension.resume()
        self._feed.begin(cursor)

    def read(self) -> Observation:
        return self.engine.monitor.read()

    def glance(self) -> Observation | None:
        now_ns = time.perf_counter_ns()
        if now_ns - self._noted_ns < NOTE_NS:
            return None
        self._noted_ns = now_ns
        return self.read()

    def knobs(self) -> tuple[Knob, ...]:
        return tuple(k for segment in self.engine.segments for k in segment.knobs())

    def is_free(self) -> bool:
        return self.engine.is_free()

    def close(self) -> None:
        self.engine.suspension.leave()
        self.engine.close()

    def __repr__(self) -> str:
        return f"<TrainerHost at {self.cursor}: {self.engine!r}>"


def _begins_ahead(recipe: Recipe) -> bool:
    """Whether the next epoch starts before it is requested, and may be dropped.

    Dropping it would lose the place of an iterable.
    """
    planned = not (recipe.drawn or recipe.iterable)
    return planned and recipe.options.persistent_workers


def _feed(recipe: Recipe) -> Callable[[Engine, Cursor], Feed]:
    """Return the feed for a pipeline of this kind."""
    if recipe.drawn:
        return DrawnFeed
    return RepackFeed if recipe.repack else PlannedFeed
