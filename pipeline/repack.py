"""Batches from what is left over at run time: after a filter, or from an iterable.

The engine loads blocks of planned tickets; here the samples that survived are dealt
into batches of the size asked for, in ticket order. So batches do not depend on where
blocks begin, and a state needs nothing but the number of tickets used up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from .buffers import BatchBuffer, Buffers, Failed
from .engine import Engine
from .feed import Delivery, Faults
from .plan import BatchPlan, Cursor, Plan

__all__ = ["RepackFeed"]


class RepackFeed:
    """The feed of a pipeline with a filter, or over an iterable."""

    def __init__(self, engine: Engine, cursor: Cursor) -> None:
        recipe = engine.recipe
        self._engine = engine
        self._plan = recipe.planned
        self._batch = recipe.batch
        assert recipe.batch.size is not None
        self._size = recipe.batch.size
        self._buffers: Buffers = replace(recipe.buffers, keep=False)
        length = None if recipe.iterable else recipe.planned.order.epoch_length
        self.faults = Faults(recipe.batch.error_budget, length)
        self._samples: deque[tuple[int, Any]] = deque()
        self._over = False
        self._clean = True
        self._cursor = cursor

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts: `position` counts tickets, `batch` batches."""
        return self._cursor

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`."""
        self._engine.begin_epoch(cursor.epoch)
        recipe = self._engine.recipe
        length = recipe.planned.order.epoch_length
        step, skip = place(self._plan, cursor)
        if recipe.iterable:
            # An iterable has no index: what was read before is read again, and left
            # out.
            if not (self._clean and cursor.position == 0):
                self._engine.restart(step, cursor.position - skip)
        elif step != self._engine.head:
            self._engine.restart(step)
        self._clean = False
        self._samples.clear()
        self._over = cursor.position >= length
        self._cursor = cursor

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end.

        Raises:
            Exception: whatever a stage's function raised for a sample.
        """
        while len(self._samples) < self._size and not self._over:
            self._pull()
        count = min(self._size, len(self._samples))
        short = count < self._size
        if count == 0 or (short and self._batch.drop_last):
            self._samples.clear()
            return None
        taken = [self._samples.popleft() for _ in range(count)]
        return self._deliver(taken)

    def _pull(self) -> None:
        """Take the survivors of one block."""
        flight, finished = self._engine.pop()
        self._over = flight.plan.last or flight.ended
        if isinstance(finished, Failed):
            try:
                raise finished.error
            finally:  # the exception keeps this frame, which must not keep it in turn
                del finished, flight
        if finished.failures:
            self.faults.add(finished.failures, flight.plan)
        start, used = flight.plan.start, self._cursor.position
        self._samples.extend(
            (start + row, sample)
            for row, sample in finished.data.items()
            if start + row >= used
        )

    def _deliver(self, taken: list[tuple[int, Any]]) -> Delivery:
        cursor, count = self._cursor, len(taken)
        plan = BatchPlan(
            epoch=cursor.epoch,
            step=cursor.step,
            batch=cursor.batch,
            start=taken[0][0],
            last=False,
            n_global=count,
            n_rows=count,
            n_local=count,
            loss_weight=1.0,
            image_size=None,
            lr_mult=1.0,
            momentum=None,
        )
        self._cursor = Cursor(
            cursor.epoch, cursor.batch + 1, cursor.step + 1, taken[-1][0] + 1
        )
        data = self._collate(plan, [sample for _, sample in taken])
        return Delivery(data, plan)

    def _collate(self, plan: BatchPlan, samples: list[Any]) -> Any:
        buffer: BatchBuffer = self._buffers.of(plan)
        buffer.place(range(len(samples)), samples)
        try:
            return buffer.collect(())
        except (
            Exception
        ) as error:  # whatever collate raises, with the odd samples named
            error.add_note(buffer.blame(plan, None))
            raise


def block_rows(plan: Plan) -> int:
    """Tickets in a block: the batch size asked for."""
    return plan.batch(0).n_rows


def place(plan: Plan, cursor: Cursor) -> tuple[int, int]:
    """Return the block that a cursor's tickets lie in, and how many of it are used."""
    block, skip = divmod(cursor.position, block_rows(plan))
    return plan.first_step(cursor.epoch) + block, skip
