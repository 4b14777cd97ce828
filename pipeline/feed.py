"""The feed: the engine's end. Takes batches in order, and says what each one is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from .buffers import Failed, Finished
from .chunk import Failure
from .engine import Engine
from .plan import BatchPlan, Cursor

__all__ = ["Delivery", "Faults", "Feed", "PlannedFeed"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One batch, and what it is; stamped and on its device once a run has it."""

    data: Any
    plan: BatchPlan


class Feed(Protocol):
    """Hands over one epoch's batches after the other."""

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end."""
        ...

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`; what is in flight for elsewhere is dropped."""
        ...

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        ...


class Faults:
    """The samples that failed and were replaced, held against a budget.

    Args:
        share: of an epoch's samples that may fail, 0 to 1; the next one is raised.
        length: of an epoch; None where nobody knows: then the share is of what was read
            so far, and of a thousand samples at least.
    """

    def __init__(self, share: float, length: int | None) -> None:
        self._share = share
        self._length = length
        self._epoch = -1
        self._count = 0

    def add(self, failures: tuple[Failure, ...], plan: BatchPlan) -> None:
        """Note failures; raise the first one's exception if the budget is spent."""
        if plan.epoch != self._epoch:
            self._epoch, self._count = plan.epoch, 0
        self._count += len(failures)
        length = self._length or max(1000, plan.start + plan.n_rows)
        allowed = int(self._share * length)
        if self._count > allowed:
            error = failures[0].annotated(plan.epoch, plan.step)
            error.add_note(
                f"penstock: {self._count} samples of epoch {plan.epoch} have failed, "
                f"the error budget allows {allowed}; mend them, leave them out "
                "with select(), or raise batch(error_budget=...)"
            )
            raise error


class PlannedFeed:
    """The feed of a pipeline whose batches are all known in the plan."""

    def __init__(self, engine: Engine, cursor: Cursor) -> None:
        recipe = engine.recipe
        self._engine = engine
        self._plan = recipe.planned
        length = recipe.planned.order.epoch_length
        self.faults = Faults(recipe.batch.error_budget, length)
        self._start = cursor
        self._last: BatchPlan | None = None
        self._left = self._plan.steps_in(cursor.epoch) - cursor.batch

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        last = self._last
        return self._start if last is None else self._plan.cursor_after(last)

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`; free when that is where the prefetching already is."""
        self._engine.begin_epoch(cursor.epoch)
        if cursor.step != self._engine.head:
            self._engine.restart(cursor.step)
        self._start, self._last = cursor, None
        self._left = self._plan.steps_in(cursor.epoch) - cursor.batch

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end.

        Raises:
            Exception: whatever a stage's function raised for a sample of this batch. A
                further call goes on with the batch after it.
        """
        if self._left == 0:
            return None
        flight, finished = self._engine.pop()
        self._left -= 1
        plan = flight.plan
        if isinstance(finished, Failed):
            try:
                raise finished.error
            finally:  # the exception keeps this frame, which must not keep it in turn
                del finished, flight
        plan = self._note(plan, finished)
        self._last = plan
        return Delivery(finished.data, plan)

    def _note(self, plan: BatchPlan, finished: Finished) -> BatchPlan:
        if not finished.failures:
            return plan
        self.faults.add(finished.failures, plan)
        rows = tuple(failure.row for failure in finished.failures)
        return replace(plan, substituted=rows)
