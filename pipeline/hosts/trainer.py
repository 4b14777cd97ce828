"""`host="trainer"`: the engine and its threads run in this very process."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..credits import Purse
from ..drawn_feed import DrawnFeed
from ..engine import Engine
from ..feed import Delivery, Feed, PlannedFeed
from ..knob import Knob
from ..monitor import Reading, TrainerMeter
from ..plan import Cursor, DrawnPlan
from ..recipe import Recipe
from ..repack import RepackFeed
from ..workers.slabs import SlabPool

__all__ = ["NOTE_NS", "TrainerHost"]

NOTE_NS = 1_000_000_000
"""One reading a second is enough for what is told of the last ten."""


class TrainerHost:
    """One engine with its feed.

    Args:
        recipe: what to run.
        purse: the bytes it may hold.
        cursor: where the first batch starts.
        trainer: the instrument of whoever calls `next`.
        slabs: where batches' memory comes from, if another process is to have them.
    """

    era = 0

    def __init__(
        self,
        recipe: Recipe,
        purse: Purse,
        cursor: Cursor,
        trainer: TrainerMeter,
        slabs: SlabPool | None = None,
    ) -> None:
        self.engine = Engine(recipe, purse, cursor.step, trainer=trainer, slabs=slabs)
        self._feed: Feed = _feed(recipe)(self.engine, cursor)
        self._feed.begin(cursor)
        self.engine.__enter__()
        self._noted_ns = time.perf_counter_ns()

    @property
    def cursor(self) -> Cursor:
        return self._feed.cursor

    def next(self) -> Delivery | None:
        delivery = self._feed.next()
        if delivery is None and _begins_ahead(self.engine.recipe):
            self.engine.gate.rest()
        return delivery

    def begin(self, cursor: Cursor) -> None:
        self.engine.gate.rouse()
        self._feed.begin(cursor)

    def read(self) -> Reading:
        return self.engine.monitor.read()

    def glance(self) -> Reading | None:
        now_ns = time.perf_counter_ns()
        if now_ns - self._noted_ns < NOTE_NS:
            return None
        self._noted_ns = now_ns
        return self.read()

    def knobs(self) -> tuple[Knob, ...]:
        return self.engine.knobs()

    def is_free(self) -> bool:
        return self.engine.is_free()

    def close(self) -> None:
        self.engine.gate.leave()
        self.engine.close()

    def __repr__(self) -> str:
        return f"<TrainerHost at {self.cursor}: {self.engine!r}>"


def _begins_ahead(recipe: Recipe) -> bool:
    """Whether the next epoch is begun before it is asked for, and may be dropped.

    An iterable's place would be lost.
    """
    planned = not isinstance(recipe.plan, DrawnPlan) and not recipe.iterable
    return planned and recipe.options.persistent_workers


def _feed(recipe: Recipe) -> Callable[[Engine, Cursor], Feed]:
    """Return what feeds a pipeline of its kind."""
    if isinstance(recipe.plan, DrawnPlan):
        return DrawnFeed
    return RepackFeed if recipe.repack else PlannedFeed
