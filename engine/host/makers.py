"""Making batches in the trainer's own thread, from torch's samplers or from a plan.

There is no queue, no lock and no thread here, and nothing is made ahead.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, Protocol

from ...errors import SampleError
from ..batch.buffer import Collate, FailedBatch, Finished, Gathered
from ..batch.layout import size_of, size_of_all
from ..core.chunk import Chunk, Failure, InFlightBatch
from ..feed import Delivery, PlannedFeed, RepackFeed, place
from ..plan import BatchPlan, Cursor, Plan, Rows
from ..program.program import STOPPED, Read, Work
from ..program.randomness import SampleRandom
from ..program.seeding import (
    SeededCalls,
    SeededRead,
    Undrawn,
    mixed,
    seed_global_generators,
    seeded_by,
    undisturbed,
)
from ..recipe import Recipe
from ..witness.witness import Witness
from .batch_meter import BatchMeter

__all__ = ["DrawnMaker", "Maker", "PlannedMaker", "RepackMaker", "SeededMaker"]

LOOKED_AHEAD = 16
"""Batches planned at once."""
WEIGHED = 128
"""One in this many batches that a `collate_fn` makes has its bytes measured."""


class Maker(Protocol):
    """Makes one batch after another."""

    drew: bool
    """Whether a sample drew from a global generator."""

    @property
    def feed(self) -> RepackFeed | None:
        """The feed that deals samples into batches, and can continue with an engine.

        None if each batch is made as a whole.
        """
        ...

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        ...

    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`."""
        ...

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch; None at its end."""
        ...


class DrawnMaker:
    """Makes the batches that torch's samplers draw, exactly as torch makes them.

    What samples and the `collate_fn` draw comes from the trainer's own streams.
    """

    def __init__(self, recipe: Recipe, cursor: Cursor, meter: BatchMeter) -> None:
        plan = recipe.drawn
        assert plan is not None
        (read,) = recipe.segments[0].program.operations
        assert isinstance(read, (Read, SeededRead))
        self._plan, self._read, self._buffers = plan, read, recipe.buffers
        self._collate = recipe.buffers.collate
        self._meter = meter
        self._start = cursor
        self._last: BatchPlan | None = None
        self.feed: RepackFeed | None = None
        self.drew = False
        plan.ahead = 0

    @property
    def cursor(self) -> Cursor:
        last = self._last
        return self._start if last is None else self._plan.cursor_after(last)

    def begin(self, cursor: Cursor) -> None:
        self._start, self._last = cursor, None

    def next(self) -> Delivery | None:
        last = self._last
        step = self._start.step if last is None else last.step + 1
        drawn = self._plan.take(step)
        if drawn is None:
            return None
        plan, indices = drawn
        self._last = plan  # even if making it raises
        if not self._read.whole:  # else the dataset gets what the sampler yielded
            indices = list(indices)
        return Delivery(self._made(plan, indices), plan)

    def _made(self, plan: BatchPlan, indices: list[Any]) -> Any:
        meter = self._meter
        meter.begin()
        begun_ns = time.perf_counter_ns()
        samples = self._samples(plan, indices)
        if meter.usual_ns == 0 and len(indices):
            self._measure(samples, time.perf_counter_ns() - begun_ns, len(indices))
        meter.collating()
        data = self._by(self._collate, plan, indices, samples)
        meter.end(len(indices))
        return data

    def _measure(self, samples: Sequence[Any], took_ns: int, count: int) -> None:
        """Note what a sample takes, by those of the first batch."""
        self._meter.usual_ns = took_ns // count
        with undisturbed():  # a sample of a class of its own may draw to say its size
            size = (
                size_of(samples) // count if self._read.whole else size_of(samples[0])
            )
        self._meter.sample_bytes = size

    def _samples(self, plan: BatchPlan, indices: list[Any]) -> Sequence[Any]:
        """Get the samples from the dataset, as torch does."""
        get, get_many = self._read.get, self._read.get_many
        if get_many:
            made: Sequence[Any] = get_many(indices)
            return made
        at: Any = None
        try:
            return [get(at := index) for index in indices]
        except Exception as error:
            row = next(row for row, each in enumerate(indices) if each is at)
            failure = Failure(error, self._read.stage, at, row)
            failure.annotated(plan.epoch, plan.step)
            raise

    def _by(
        self,
        collate: Collate | None,
        plan: BatchPlan,
        indices: list[Any],
        samples: Sequence[Any],
    ) -> Any:
        """Collate, by default as torch does; an error's note names the odd samples."""
        given: Any = samples
        try:
            if collate is None:
                return self._buffers.together(plan, samples)
            return collate(given if self._read.whole else list(given))
        except Exception as error:
            if len(indices) == 0:
                raise
            rows = [given] if self._read.whole else given
            self._buffers.blame(error, plan, dict(enumerate(rows)), indices)
            raise


class SeededMaker(DrawnMaker):
    """Makes them so that workers would make the same bytes.

    If samples draw from the global generators, each gets a seed of its own, as does
    each batch if the `collate_fn` draws. The trainer's own draws are undisturbed. The
    first batch shows whether either draws. If something cannot be repeated, and begins
    to draw after the first batch of its epoch, it draws from the trainer's stream that
    one time, as it does in torch.
    """

    _read: SeededRead

    def __init__(self, recipe: Recipe, cursor: Cursor, meter: BatchMeter) -> None:
        super().__init__(recipe, cursor, meter)
        self._undrawn = Undrawn()
        self.drew = bool(self._read.seeds)
        self._sure = False
        """Whether a batch has shown what draws."""
        self._once = False
        """Whether a sample made twice may differ, because its sources change."""
        self._collate_draws = False

    def _made(self, plan: BatchPlan, indices: list[Any]) -> Any:
        if len(indices) == 0:
            return super()._made(plan, indices)
        if not self._sure:
            return self._first(plan, indices)
        undrawn = self._undrawn
        begins = self._once and plan.batch == 0
        if not self.drew and not begins:
            undrawn.look()
            meter = self._meter
            meter.begin()
            samples = self._samples(plan, indices)
            drew = undrawn.drawn
            if drew:
                self.drew = self._read.seeds = True
                undrawn.put_back()
            if not drew or self._once:
                meter.collating()
                data = self._collated(plan, indices, samples)
                meter.end(len(indices))
                return data
        with undisturbed():
            each = self.drew and not self._read.whole
            make = self._seeded if each else self._fenced
            return make(plan, indices)

    def _samples(self, plan: BatchPlan, indices: list[Any]) -> Sequence[Any]:
        """Get the samples. As with workers, none may end the epoch early.

        Raises:
            SampleError: a sample raised `StopIteration`.
        """
        try:
            return super()._samples(plan, indices)
        except StopIteration as error:
            raise SampleError(STOPPED.format(self._read.stage)) from error

    def _first(self, plan: BatchPlan, indices: list[Any]) -> Any:
        """Make the first batch, seeded; see what draws, and what can be repeated."""
        data, collate = Witness([self._read.start.dataset]), Witness([self._collate])
        make = self._fenced if self._read.whole else self._seeded
        with undisturbed():
            made = make(plan, indices)
        self._once = not data.repeats()
        self._collate_draws = self._collate_draws or not collate.repeats()
        self._read.seeds = self.drew or self._read.seeds
        self._sure = True
        return made

    def _collated(
        self, plan: BatchPlan, indices: list[Any], samples: Sequence[Any]
    ) -> Any:
        """Collate samples that drew nothing; seed what collate_fn draws."""
        if self._collate is None:
            return self._by(None, plan, indices, samples)
        if not self._collate_draws:
            undrawn = self._undrawn
            data = self._by(self._collate, plan, indices, samples)
            if not undrawn.drawn:
                return data
            self._collate_draws = True
            undrawn.put_back()
            samples = self._samples(plan, indices)  # collate_fn may have changed them
        with seeded_by(self._plan.seed, plan.epoch, plan.batch):
            return self._by(self._collate, plan, indices, samples)

    def _seeded(self, plan: BatchPlan, indices: list[Any]) -> Any:
        """Make a batch with a seed for each sample; note what draws."""
        meter = self._meter
        meter.begin()
        undrawn, times_ns = Undrawn(), []
        samples: list[Any] = []
        for index, seed in zip(indices, self._plan.seeds(plan), strict=True):
            seed_global_generators(seed)
            if not self.drew:
                undrawn.look()
            begun_ns = time.perf_counter_ns()
            samples += self._samples(plan, [index])
            times_ns.append(time.perf_counter_ns() - begun_ns)
            self.drew = self.drew or undrawn.drawn
        meter.usual_ns = sorted(times_ns)[len(times_ns) // 2]
        meter.sample_bytes = size_of(samples[0])
        return self._seeded_batch(plan, indices, samples)

    def _fenced(self, plan: BatchPlan, indices: list[Any]) -> Any:
        """Make a batch that cannot be repeated, or is read at once, under one seed."""
        meter = self._meter
        meter.begin()
        seed_global_generators(self._plan.seeds(plan)[0])
        undrawn = Undrawn()
        undrawn.look()
        begun_ns = time.perf_counter_ns()
        samples = self._samples(plan, indices)
        meter.usual_ns = (time.perf_counter_ns() - begun_ns) // len(indices)
        if self._read.whole:
            meter.sample_bytes = size_of(samples) // len(indices)
        self.drew = undrawn.drawn
        self._read.seeds = self.drew or self._read.seeds
        return self._seeded_batch(plan, indices, samples)

    def _seeded_batch(
        self, plan: BatchPlan, indices: list[Any], samples: Sequence[Any]
    ) -> Any:
        """Collate under the batch's own seed; note whether it draws."""
        meter, undrawn = self._meter, Undrawn()
        meter.collating()
        if self._collate is None:
            data = self._by(None, plan, indices, samples)
        else:
            seed_global_generators(mixed((self._plan.seed, plan.epoch, plan.batch)))
            undrawn.look()
            data = self._by(self._collate, plan, indices, samples)
            self._collate_draws = self._collate_draws or undrawn.drawn
        meter.end(len(indices))
        return data


class LookAhead:
    """Plans several batches at once: one at a time takes three times as long."""

    def __init__(self, planned: Plan) -> None:
        self._planned = planned
        self._batches: deque[tuple[BatchPlan, Rows]] = deque()

    def clear(self) -> None:
        """Forget planned batches, because another one is due."""
        self._batches.clear()

    def take(self, step: int, left: int = LOOKED_AHEAD) -> tuple[BatchPlan, Rows]:
        """Return the batch of `step`, and its samples.

        Args:
            step: the step after the previous call's, or any step after a `clear`.
            left: how many batches may be planned.
        """
        if not self._batches:
            self._look(step, step + min(left, LOOKED_AHEAD))
        return self._batches.popleft()

    def _look(self, start: int, stop: int) -> None:
        planned = self._planned
        try:
            for plan in planned.batches(start, stop):
                self._batches.append((plan, planned.rows(plan)))
        except Exception:
            # A schedule may fail further on; it raises when that batch is due.
            if not self._batches:
                raise


class PlannedMaker:
    """Makes the batches of a plan. To its feed, it looks like an engine."""

    def __init__(self, recipe: Recipe, cursor: Cursor, meter: BatchMeter) -> None:
        self.recipe = recipe
        self.head = cursor.step
        self.drew = False
        self._meter = meter
        self._ahead = LookAhead(recipe.planned)
        self._program = recipe.segments[0].program
        self._by_default = recipe.buffers.collate is None
        self._weighs = cycle([True] + [False] * (WEIGHED - 1))
        """Whether the samples of a batch have their bytes measured."""
        self._size: int | None = 0
        """Image size of the latest batch; 0 before the first."""
        self._random = SampleRandom(recipe.seed)
        self._undrawn = Undrawn()
        self._calls = SeededCalls(recipe.buffers.collate)
        # Not itself: a circle would keep the dataset until the next collection.
        self._batches = PlannedFeed(weakref.proxy(self), cursor)
        self.feed: RepackFeed | None = None

    @property
    def cursor(self) -> Cursor:
        return self._batches.cursor

    def begin(self, cursor: Cursor) -> None:
        self._batches.begin(cursor)

    def next(self) -> Delivery | None:
        batches, meter = self._batches, self._meter
        if not batches.left:
            return None
        plan, rows = self._ahead.take(self.head, batches.left)
        self.head += 1
        if not self.drew:
            self._undrawn.look()
        meter.begin()
        chunk = Chunk(plan.step, 0, rows.indices, rows.rounds, plan.ctx)
        work, parts = self._program.work(chunk, None, self._random, meter.share)
        self.drew = self.drew or self._undrawn.drawn
        if parts:
            meter.parts.add(parts, plan.n_rows)
        meter.collating()
        finished = None
        if work.failures is None:
            finished = self._together(plan, rows, work.samples)
        if isinstance(finished, Finished):
            meter.end(plan.n_rows)
            return batches.whole(finished.data, plan)
        in_flight = InFlightBatch(plan, rows, self.recipe.buffers.of(plan), [0])
        finished = finished or self._finished(in_flight, work)
        meter.end(plan.n_rows)
        return batches.deliver(in_flight, finished)

    # For the feed that delivers them

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: no epoch starts ahead."""

    def restart(self, step: int) -> None:
        """Continue at `step`."""
        self.head = step
        self._ahead.clear()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Do nothing: nobody else is working."""
        yield

    def _together(
        self, plan: BatchPlan, rows: Rows, samples: Sequence[Any]
    ) -> Finished | FailedBatch | None:
        """Collate samples if all of them are there; otherwise return None."""
        buffers = self.recipe.buffers
        if not self._by_default:
            make = partial(self._collated, plan, rows, samples)
            return self._calls.call(make, self.recipe.seed, plan.epoch, plan.batch)
        try:
            data = buffers.together(plan, samples)
        except Exception:  # noqa: BLE001 raised again later, with the odd samples named
            return None
        if plan.image_size != self._size:
            self._size = plan.image_size
            layout = buffers.layout(self._size, samples[0])
            known = layout.row_bytes if layout else size_of(samples[0])
            self._meter.sample_bytes = known
        return Finished(data)

    def _collated(
        self, plan: BatchPlan, rows: Rows, samples: Sequence[Any]
    ) -> Finished | FailedBatch:
        """Make a batch with the user's `collate_fn`."""
        buffers = self.recipe.buffers
        assert buffers.collate is not None
        if next(self._weighs):
            self._meter.sample_bytes = size_of_all(samples) // plan.n_rows
        try:
            return Finished(buffers.collate(list(samples)))
        except Exception as error:  # noqa: BLE001 the trainer raises it
            buffers.blame(error, plan, dict(enumerate(samples)), rows.indices)
            return FailedBatch(error)

    def _finished(self, in_flight: InFlightBatch, work: Work) -> Finished | FailedBatch:
        """Collate the samples that could be made."""
        raise_interrupt(work)
        plan, buffers = in_flight.plan, self.recipe.buffers
        in_flight.failures += work.failures or ()
        work.failures = None
        outcome = self._program.finish(work, in_flight.buffer)
        self._meter.sample_bytes = outcome.nbytes // plan.n_rows
        finished = buffers.finish(in_flight)
        if isinstance(finished, Gathered):
            seed = self.recipe.seed, plan.epoch, plan.batch
            finished = self._calls.call(finished.collate, *seed)
        return finished


class RepackMaker:
    """Makes the batches of an iterable, or after a filter.

    It makes the blocks. To its feed, which deals them into batches, it looks like an
    engine.
    """

    def __init__(self, recipe: Recipe, cursor: Cursor, meter: BatchMeter) -> None:
        self.recipe = recipe
        self.head = place(recipe.planned, cursor)[0]
        self.drew = False
        self.trainer = self._meter = meter
        self._ahead = LookAhead(recipe.planned)
        self._program = recipe.segments[0].program
        self._weighs = cycle([True] + [False] * (WEIGHED - 1))
        """Whether the samples of a block have their bytes measured."""
        self._rows = 0
        """Rows read for this batch."""
        self._random = SampleRandom(recipe.seed)
        self._undrawn = Undrawn()
        self.feed = RepackFeed(weakref.proxy(self), cursor)
        self.feed.begin(cursor)

    @property
    def cursor(self) -> Cursor:
        return self.feed.cursor

    def begin(self, cursor: Cursor) -> None:
        self.feed.begin(cursor)

    def next(self) -> Delivery | None:
        self._rows = 0
        self._meter.begin()
        delivery = self.feed.next()
        if delivery is not None:
            self._meter.end(self._rows)
        return delivery

    # For the feed that deals them

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: no epoch starts ahead."""

    def restart(self, step: int, skip: int = 0) -> None:
        """Continue at `step`; an iterable starts over and skips `skip` samples."""
        self._program.restart(skip)
        self.head = step
        self._ahead.clear()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Do nothing: nobody else is working."""
        yield

    def pop(self) -> tuple[InFlightBatch, Finished | FailedBatch]:
        """Make the next block."""
        plan, rows = self._ahead.take(self.head)
        self.head += 1
        if not self.drew:
            self._undrawn.look()
        chunk = Chunk(plan.step, 0, rows.indices, rows.rounds, plan.ctx)
        work, parts = self._program.work(chunk, None, self._random, self._meter.share)
        self.drew = self.drew or self._undrawn.drawn
        samples, count = work.samples, len(chunk)
        done = len(samples) if work.ended else count
        self._rows += done
        if parts:
            self._meter.parts.add(parts, done)
        if next(self._weighs) and samples:
            self._meter.sample_bytes = size_of_all(samples) // len(samples)
        in_flight = InFlightBatch(plan, rows, self.recipe.buffers.of(plan), [0])
        in_flight.ended = work.ended
        return in_flight, self._finished(in_flight, work)

    def _finished(self, in_flight: InFlightBatch, work: Work) -> Finished | FailedBatch:
        """Return a block's remaining samples by row, or the failure of the block."""
        if not work.failures:
            return Finished(dict(zip(work.rows(), work.samples, strict=True)))
        raise_interrupt(work)
        in_flight.failures += work.failures
        work.failures = None
        in_flight.buffer.keep(work.rows(), work.samples)
        finished = self.recipe.buffers.finish(in_flight)
        assert not isinstance(finished, Gathered)  # blocks are not collated
        return finished


def raise_interrupt(work: Work) -> None:
    """Raise a Ctrl-C that came during the user's function: the loop should get it."""
    for failure in work.failures or ():
        if isinstance(failure.error, KeyboardInterrupt):
            raise failure.error
