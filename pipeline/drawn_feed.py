"""The feed of batches that torch's samplers draw: it draws, and knows the end."""

from __future__ import annotations

from dataclasses import replace

from .buffers import Failed
from .engine import Engine
from .feed import Delivery
from .plan import Cursor, DrawnPlan

__all__ = ["DrawnFeed"]


class DrawnFeed:
    """The feed of a `DrawnPlan`, which the face begins before each epoch."""

    def __init__(self, engine: Engine, cursor: Cursor) -> None:
        plan = engine.recipe.plan
        assert isinstance(plan, DrawnPlan)
        self._engine = engine
        self._plan = plan
        self._cursor = cursor

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        return self._cursor

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`, where the plan has begun."""
        self._engine.begin_epoch(cursor.epoch)
        self._engine.restart(cursor.step)
        self._engine.gate.extend(self._plan.stop)
        self._cursor = cursor

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end.

        Raises:
            Exception: whatever the data set, its sampler or its collate_fn raised. A
                further call goes on with the batch after it.
        """
        self._draw()
        plan = self._plan
        if self._engine.head == plan.stop:
            return None
        flight, finished = self._engine.pop()
        stamp = flight.plan
        self._cursor = plan.cursor_after(stamp)
        if isinstance(finished, Failed):
            try:
                raise finished.error
            finally:  # the exception keeps this frame, which must not keep it in turn
                del finished, flight
        if plan.exhausted and self._engine.head == plan.stop:
            stamp = replace(stamp, last=True)
        return Delivery(finished.data, stamp)

    def _draw(self) -> None:
        if self._plan.draw(self._engine.head):
            self._engine.gate.extend(self._plan.stop)
