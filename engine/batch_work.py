"""Work on whole batches: what happens to a batch once its rows are there.

Segments after the one that places rows get one batch at a time, in any order. The first
of them may be the user's `collate_fn`. It runs in the trainer's thread, one batch after
another, until it has proved to keep no state, and workers that make whole batches call
it themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import NOTE, add_note
from .batch.buffer import Collate as Collating
from .batch.buffer import FailedBatch, Finished, Gathered
from .core.chunk import Chunk, Failure, InFlightBatch, Onward
from .plan import AssignedPlan, BatchPlan
from .program.program import Operation, Work
from .program.randomness import SampleRandom
from .program.seeding import SeededCalls
from .recipe import Recipe

Made = Onward | Finished | Gathered | FailedBatch


class Collate(Operation):
    """Calls the user's `collate_fn` on the rows of a batch; the batch seeds its draws.

    Args:
        stage: the stage that makes batches.
        collate: the user's function.
        seed: seed of the pipeline.
    """

    def __init__(self, stage: str, collate: Collating | None, seed: int) -> None:
        self.stage = stage
        self._seed = seed
        self.calls = SeededCalls(collate)
        """Know whether calls change the `collate_fn`."""
        self.apart = False
        """Whether this is a worker process, whose threads may draw meanwhile."""

    def run(self, work: Work) -> None:
        (gathered,) = work.samples
        plan = gathered.plan
        # Workers of other segments may draw at the same time.
        seeds = self._seed, plan.epoch, plan.batch
        made = self.calls.call(gathered.collate, *seeds, apart=self.apart)
        work.samples = [made.data if isinstance(made, Finished) else made]


class BatchWork:
    """Sends batches through the segments that work on whole ones, and out.

    Args:
        recipe: what the engine runs.
        collates: called once the `collate_fn` has proved to keep no state.
        judge: called with the first batch that an inline segment has made.
    """

    def __init__(
        self,
        recipe: Recipe,
        collates: Callable[[], None],
        judge: Callable[[int, Any], None],
    ) -> None:
        self._segments = segments = recipe.segments
        self._buffers = recipe.buffers
        self._collates = collates
        self._looked = False
        self._judge = judge
        self._unknown = {
            at
            for at, each in enumerate(segments)
            if each.per_batch and each.executor in ("auto", "inline")
        }
        """Inline segments that have made no batch yet."""
        self._first = sum(not each.per_batch for each in segments)
        for each in segments:
            (operation, *_) = each.program.operations
            if isinstance(operation, Collate):
                operation.apart = isinstance(recipe.plan, AssignedPlan)

    def finisher(self, at: int) -> Callable[[InFlightBatch], Made]:
        """Return the function to call on a batch when segment `at` has finished it."""
        return partial(self._worked, at) if at >= self._first else self._filled

    def _filled(self, in_flight: InFlightBatch) -> Made:
        """Handle a batch whose rows are all finished, or have failed."""
        made = self._buffers.finish(in_flight)
        if not in_flight.whole:
            return made
        if self._first == len(self._segments) or isinstance(made, FailedBatch):
            return self._pinned(in_flight, made)
        in_flight.substituted = made.failures
        if isinstance(made, Gathered):
            return Onward(self._first, made)
        in_flight.buffer.let_go()
        return Onward(self._first + self._segments[self._first].in_order, made.data)

    def _worked(self, at: int, in_flight: InFlightBatch) -> Made:
        """Handle a batch that a segment has worked on."""
        outputs, in_flight.made = in_flight.made, None
        failures = in_flight.failures
        if failures:
            failed = FailedBatch(batch_error(failures[0], in_flight.plan))
            failures.clear()  # breaks a cycle: the traceback's frames hold it
            return failed
        (data,) = outputs
        if self._segments[at].in_order:
            in_flight.buffer.let_go()
            self._look(self._segments[at].program.operations[0])
        if isinstance(data, FailedBatch):
            return data
        if at in self._unknown:
            self._unknown.remove(at)
            self._judge(at, data)
        if at + 1 < len(self._segments):
            return Onward(at + 1, data)
        return self._pinned(in_flight, Finished(data, in_flight.substituted))

    def _pinned(self, in_flight: InFlightBatch, made: Made) -> Made:
        """Move a batch that is made to pinned memory, if it belongs there."""
        buffers = self._buffers
        if buffers.pin is None or buffers.keep or not isinstance(made, Finished):
            return made
        data = buffers.pin(made.data)
        if data is made.data:
            return made
        in_flight.buffer.let_go()
        in_flight.made = None
        return replace(made, data=data)

    def _look(self, collate: Operation) -> None:
        assert isinstance(collate, Collate)
        if collate.calls.keeps:
            self._unknown.discard(self._first)
        elif not self._looked:
            self._looked = True
            self._collates()


def batch_error(failure: Failure, plan: BatchPlan) -> BaseException:
    """Return a function's exception, with a note that identifies the batch."""
    where = f"the batch of epoch {plan.epoch}, step {plan.step}"
    add_note(failure.error, f"{NOTE}{failure.stage}, {where}")
    return failure.error


def worked_late(
    recipe: Recipe, plan: BatchPlan, made: Finished | FailedBatch
) -> Finished | FailedBatch:
    """Do the work on whole batches that worker processes have not done."""
    if isinstance(made, FailedBatch):
        return made
    try:
        return replace(made, data=worked(recipe, plan, made.data))
    except Exception as error:  # noqa: BLE001 the trainer raises it
        return FailedBatch(error)


def worked(recipe: Recipe, plan: BatchPlan, data: Any) -> Any:
    """Apply the maps of whole batches here and now.

    Raises:
        Exception: whatever a function raises.
    """
    if not recipe.batch_work:
        return data
    nothing = np.zeros(1, np.int64)
    chunk = Chunk(plan.step, 0, nothing, nothing, plan.ctx)
    random = SampleRandom(recipe.seed)
    for segment in recipe.batch_work:
        outcome = segment.program.run(chunk, [data], None, random)
        if outcome.failures:
            raise batch_error(outcome.failures[0], plan)
        (data,) = outcome.outputs or [None]
    return data
