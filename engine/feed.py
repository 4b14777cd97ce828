"""The trainer's end of an engine: batches leave it in order, each with its plan.

A feed takes them out of the engine, and a host is an engine with its feed. The trainer
itself may be the host, too (`DirectHost`, in `makers.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..errors import WorkerError, add_note
from .batch.buffer import BatchBuffer, FailedBatch, Finished, Gathered
from .core.connector import ReaderLost
from .core.in_flight import ByteBudget, Chunk, Failure, InFlightBatch
from .engine import Engine
from .far.pools import FarPools
from .observe.observation import Knob, Move, Observation
from .plan import BatchPlan, Cursor, PlannedBatch
from .program.randomness import SampleRandom, SeededCalls
from .recipe import Recipe
from .segment import worked, worked_late
from .trainer_cost import TrainerMeter

# How often the process that reads an iterable may die with no batch in between.
LOSSES = 5
# How many samples before a tail are tried if all of the tail's own failed.
NEAR = 16


class Delivery(NamedTuple):
    """One batch and its plan; a run stamps it and copies it to the device."""

    data: Any
    plan: BatchPlan


class Faults:
    """Counts the samples that failed and were replaced against a budget.

    A sample counts once in a pass over the data, also if it is made again: by another
    host, or because an iterable is read again.

    Args:
        share: share of an epoch's samples that may fail, 0 to 1; one more raises.
        length: length of an epoch; None if unknown: then the share is of the samples
            read so far, and of at least a thousand.
        block: whether batches are formed later of what is counted.
    """

    def __init__(
        self, share: float, length: int | None, *, block: bool = False
    ) -> None:
        self._share, self._length, self._block = share, length, block
        self.begin()

    def begin(self) -> None:
        """Begin a pass over the data."""
        # Failures, and the position in the epoch after the last one.
        self._count = self._stop = 0

    def add(self, failures: tuple[Failure, ...], plan: BatchPlan) -> None:
        """Count the failures of a batch.

        Raises:
            BaseException: the first failure's, if they exceed the budget of the epoch.
        """
        positions = [plan.start + failure.row for failure in failures]
        self._count += sum(position >= self._stop for position in positions)
        self._stop = max(self._stop, positions[-1] + 1)
        limit = int(self._share * (self._length or max(1000, plan.start + plan.n_rows)))
        if self._count > limit:
            error = failures[0].annotated(plan, block=self._block)
            add_note(
                error,
                f"penstock: {self._count} samples of epoch {plan.epoch} have failed, "
                f"but the error budget allows {limit}; repair them, leave them out "
                "with select(), or raise batch(error_budget=...)",
            )
            raise error


class PlannedFeed:
    """Delivers the batches of a pipeline whose plan knows all of them.

    Args:
        engine: makes them ahead; or whoever makes them here and now.
    """

    def __init__(self, engine: Engine) -> None:
        recipe = engine.recipe
        # Makes the batches; another one may go on with the one that is due next.
        self.engine = engine
        self._plan = plan = recipe.planned
        self.faults = Faults(recipe.error_budget, plan.order.epoch_length)

    @property
    def cursor(self) -> Cursor:
        last = self._last
        return self._start if last is None else self._plan.cursor_after(last)

    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`; free if prefetching is already there."""
        self.faults.begin()
        self.engine.begin_epoch(cursor.epoch)
        if cursor.step != self.engine.head:
            self.engine.restart(cursor.step)
        self._start = cursor
        self._last: BatchPlan | None = None
        # The step after the epoch's last one.
        self._stop = cursor.step - cursor.batch + self._plan.steps_in(cursor.epoch)

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end.

        Raises:
            Exception: whatever the dataset, a stage's function or collate_fn raised for
                this batch, or for too many samples of the epoch. The next call
                continues with the batch after it; after a `BudgetError` with the same.
        """
        if self.engine.head == self._stop:
            return None
        batch, finished = self.engine.pop()
        plan = batch.plan
        if isinstance(finished, FailedBatch) and finished.failures:
            finished = self._filled(batch, finished)
        if isinstance(finished, FailedBatch):
            try:
                raise finished.error
            finally:  # the exception holds this frame, so this must not hold it
                del finished, batch
        if finished.failures:
            self.faults.add(finished.failures, plan)
            plan = plan._replace(substituted=tuple(f.row for f in finished.failures))
        self._last = plan
        return Delivery(finished.data, plan)

    def _filled(
        self, tail: PlannedBatch, failed: FailedBatch
    ) -> Finished | FailedBatch:
        """Fill an epoch's short tail whose rows all failed, from the batches before it.

        A tail may have a single row, so its failure says little about the data; a
        regular batch that fails completely is raised. The sample that fills it follows
        from the plan and the data.
        """
        plan, recipe = tail.plan, self.engine.recipe
        whole = self._plan.batch(max(plan.step - 1, 0)).n_rows
        if not (plan.last and plan.batch and plan.n_rows < whole):
            return failed
        with self.engine.still():  # nobody else uses the dataset meanwhile
            for position in range(plan.start - 1, -1, -1)[:NEAR]:
                if sample := self._sample(position, plan):
                    buffer = BatchBuffer(recipe.buffers, plan)
                    buffer.place(range(plan.n_rows), [*sample] * plan.n_rows)
                    batch = recipe.buffers.finish(
                        InFlightBatch(plan, tail.rows, buffer=buffer, remaining=[])
                    )
                    finished = batch.collate() if isinstance(batch, Gathered) else batch
                    return replace(
                        worked_late(recipe, plan, finished), failures=failed.failures
                    )
        return failed

    def _sample(self, position: int, plan: BatchPlan) -> Sequence[Any] | None:
        """Make one sample as its workers would; None or empty if that fails."""
        recipe = self.engine.recipe
        rows = self._plan.order.at(plan.epoch, np.array([position]))
        chunk = Chunk(plan.step, 0, rows.indices, rows.rounds, context=plan.ctx)
        samples: Sequence[Any] | None = None
        for segment in recipe.segments:
            if segment.executor == "async":  # it needs their event loop
                return None
            if segment.per_batch:
                continue
            samples = segment.program.run(
                chunk, samples, None, SampleRandom(recipe.seed)
            ).outputs
            if not samples:
                break
        return samples


class RepackFeed:
    """The feed of a pipeline with a filter, or over an iterable.

    A ticket is a position of the epoch, whether or not a sample comes of it. The engine
    loads blocks of planned tickets. Here, the samples that survived are dealt into
    batches of the requested size, in ticket order. So batches do not depend on where
    blocks begin, and a state only needs the number of tickets used.
    """

    def __init__(self, engine: Engine) -> None:
        recipe = engine.recipe
        # Makes the blocks; another one may go on with the one that is due next.
        self.engine = engine
        self._plan = recipe.planned
        assert recipe.batch_size is not None
        self._size, self._drop_last = recipe.batch_size, recipe.drop_last
        self._buffers = replace(recipe.buffers, keep=False)
        self._calls = SeededCalls(recipe.buffers.collate)
        self.faults = Faults(
            recipe.error_budget,
            length=None if recipe.iterable else recipe.planned.order.epoch_length,
            block=True,
        )
        # Tickets of the samples that are left over.
        self._tickets: list[int] = []
        self._samples: list[Any] = []
        self._over, self._clean = False, True
        # How often the process that reads has died since the last batch.
        self._losses = 0

    def begin(self, cursor: Cursor) -> None:
        self.faults.begin()
        self.engine.begin_epoch(cursor.epoch)
        self.cursor = cursor
        # An iterable has no index: what was read before is read again and skipped.
        there = (
            self._clean and cursor.position == 0
            if self.engine.recipe.iterable
            else self._block(cursor)[0] == self.engine.head
        )
        if not there:
            self._restart()
        self._clean = False
        self._drop()
        self._over = cursor.position >= self._plan.order.epoch_length

    def next(self) -> Delivery | None:
        size = self._size
        while len(self._samples) < size and not self._over:
            self._pull()
        samples = self._samples[:size]
        if not samples or (len(samples) < size and self._drop_last):
            self._drop()
            return None
        tickets = self._tickets[:size]
        del self._samples[:size], self._tickets[:size]
        return self._deliver(tickets[0], tickets[-1] + 1, samples)

    def _drop(self) -> None:
        self._samples.clear()
        self._tickets.clear()

    def _pull(self) -> None:
        """Take the survivors of one block."""
        try:
            in_flight, finished = self.engine.pop()
        except ReaderLost as error:
            self._losses += 1
            if self._losses > LOSSES:
                times, self._losses = self._losses, 0
                raise WorkerError(
                    f"the process that reads the iterable died {times} times with no"
                    " batch in between; look for a crash in native code, or for the"
                    " system's out-of-memory killer"
                ) from error
            self._restart()
            return
        self._over = in_flight.plan.last or in_flight.ended
        if isinstance(finished, FailedBatch):
            try:
                raise finished.error
            finally:  # the exception holds this frame, so this must not hold it
                del finished, in_flight
        if finished.failures:
            self.faults.add(finished.failures, in_flight.plan)
        tickets = [in_flight.plan.start + row for row in finished.data]
        fresh = bisect_left(tickets, self.cursor.position)
        self._tickets += tickets[fresh:]
        self._samples += list(finished.data.values())[fresh:]

    def _restart(self) -> None:
        """Continue at the cursor: an iterable is read again without what was used."""
        self._drop()
        step, skip = self._block(self.cursor)
        self.engine.restart(step, self.cursor.position - skip)

    def _block(self, cursor: Cursor) -> tuple[int, int]:
        """Return the block of a cursor's tickets, and how many of its tickets are used.

        A block has as many tickets as a batch was requested to have samples.
        """
        block, skip = divmod(cursor.position, self._plan.batch(0).n_rows)
        return self._plan.first_step(cursor.epoch) + block, skip

    def _deliver(self, start: int, stop: int, samples: list[Any]) -> Delivery:
        """Deliver samples of the tickets from `start` to before `stop`."""
        cursor, recipe, count = self.cursor, self.engine.recipe, len(samples)
        self._losses = 0
        plan = BatchPlan(
            epoch=cursor.epoch,
            step=cursor.step,
            batch=cursor.batch,
            start=start,
            last=False,
            n_global=count,
            n_rows=count,
            n_local=count,
            loss_weight=1.0,
            image_size=None,
            lr_mult=1.0,
            momentum=None,
        )
        self.cursor = Cursor(cursor.epoch, cursor.batch + 1, cursor.step + 1, stop)
        make = partial(self._buffers.together, plan, samples)
        with self.engine.trainer.collating():
            if recipe.buffers.collate is None:
                data = make()
            else:
                data = self._calls.call(
                    make, samples, recipe.seed, plan.epoch, plan.batch
                )
            data = worked(recipe, plan, data)
        return Delivery(data, plan)


class DrawnFeed:
    """The feed of a `DrawnPlan`, which the loader begins before each epoch."""

    def __init__(self, engine: Engine) -> None:
        plan = engine.recipe.drawn
        assert plan is not None
        plan.ahead = max(1, plan.most)
        self._engine, self._plan = engine, plan

    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`, where the plan has begun."""
        self._engine.begin_epoch(cursor.epoch)
        self._engine.restart(cursor.step)
        self._extend()
        self.cursor = cursor

    def next(self) -> Delivery | None:
        self._draw()
        plan = self._plan
        if self._engine.head == plan.stop:
            return None
        in_flight, finished = self._engine.pop()
        stamp = in_flight.plan
        self.cursor = plan.cursor_after(stamp)
        if plan.most:
            self._draw()  # as torch's workers, once a batch is here: before the loop
        if isinstance(finished, FailedBatch):
            try:
                raise finished.error
            finally:  # the exception holds this frame, so this must not hold it
                del finished, in_flight
        if plan.exhausted and self._engine.head == plan.stop:
            stamp = stamp._replace(last=True)
        return Delivery(finished.data, stamp)

    def _draw(self) -> None:
        if self._plan.draw(self._engine.head):
            self._extend()

    def _extend(self) -> None:
        engine_lock = self._engine.engine_lock
        with engine_lock.lock:
            engine_lock.core.extend(self._plan.stop)
            engine_lock.wake()


class Host(ABC):
    """What makes the batches, with its feed.

    `next`, `begin` and `cursor` belong to the trainer's thread. Any thread may call
    `read` and `knobs`, at the same time.
    """

    # The engine; None if the trainer makes the batches by itself.
    engine: Engine | None = None
    # The feed; None if the trainer draws the batches by itself.
    feed: PlannedFeed | RepackFeed | DrawnFeed | None = None
    # The latest moves of its work between kinds of workers, and their reasons.
    moves: deque[Move]
    kind = "trainer"  # or "process", if all of its work is in worker processes

    @property
    @abstractmethod
    def cursor(self) -> Cursor:
        """Where the next batch starts."""

    @abstractmethod
    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`, dropping everything in flight for other positions."""

    @abstractmethod
    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, not yet stamped; None at its end.

        Raises:
            Exception: as `PlannedFeed.next`, or what a sampler raised.
            WorkerError: a process that was needed died repeatedly.
        """

    @abstractmethod
    def read(self) -> Observation:
        """Return the window since the run began."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything. Idempotent in each of its steps."""

    def knobs(self) -> tuple[Knob, ...]:
        """Return everything that may be set."""
        segments = () if self.engine is None else self.engine.segments
        return tuple(chain.from_iterable(segment.knobs() for segment in segments))


class EngineHost(Host):
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
        feed: PlannedFeed | RepackFeed | None = None,
    ) -> None:
        step = cursor.step if feed is None else feed.engine.head
        engine: Engine | None = None
        try:
            engine = Engine(recipe, byte_budget, step, trainer=trainer, pools=FarPools)
            self.engine: Engine = engine
            planned_feed = RepackFeed if recipe.repack else PlannedFeed
            make_feed = DrawnFeed if recipe.drawn else planned_feed
            self.feed: PlannedFeed | RepackFeed | DrawnFeed = feed or make_feed(engine)
            if feed is None:
                self.feed.begin(cursor)
            else:
                engine.begin_epoch(feed.cursor.epoch)
            engine.__enter__()
            self.moves = engine.segments[0].moves
            if feed is not None:  # only now: had it failed, the maker would go on
                feed.engine = engine
        except BaseException:  # Ctrl-C, and nobody knows of this engine yet
            if engine is not None:
                engine.close()
            raise

    @property
    def cursor(self) -> Cursor:
        return self.feed.cursor

    def begin(self, cursor: Cursor) -> None:
        self.feed.begin(cursor)

    def next(self) -> Delivery | None:
        delivery = self.feed.next()
        if delivery is None:
            self.engine.end_epoch()
        return delivery

    def read(self) -> Observation:
        return self.engine.monitor.read()

    def close(self) -> None:
        self.engine.close()
