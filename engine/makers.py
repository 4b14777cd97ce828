"""Making batches in the trainer's own thread, from torch's samplers or from a plan.

A trainer that is its own only worker does what torch's loader does with
`num_workers=0`, at the same cost: no queue, no lock, no thread, and nothing made ahead.
A pipeline of one segment starts so if nobody asked for workers, and may return to it if
workers turn out to be slower.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from typing import Any

from ..errors import CLOSED, PenstockError, SampleError
from .batch.buffer import BatchBuffer, FailedBatch, Finished, Gathered
from .batch.layout import size_of, size_of_all
from .core.connector import LONG_NS, PartsMeter, SampledClock, own_queue
from .core.in_flight import ByteBudget, Chunk, Failure, InFlightBatch
from .feed import Delivery, Host, PlannedFeed, RepackFeed
from .observe.observation import (
    ConnectorObservation,
    Move,
    MoveOutcome,
    Observation,
    PartReading,
    Restriction,
    SegmentObservation,
    WorkerReading,
    parts_of,
    ratio,
)
from .plan import BatchPlan, Cursor, PlannedBatch
from .program.operations import SeededRead
from .program.program import STOPPED, Read, Work
from .program.randomness import (
    SampleRandom,
    SeededCalls,
    Undrawn,
    mixed,
    seed_global_generators,
    undisturbed,
)
from .recipe import SOON_NS, WORTH_START_NS, Recipe, ResolvedExecutor, resolve
from .trainer_cost import TrainerMeter
from .witness.witness import Witness
from .workers import Kind

NOTHING = contextlib.nullcontext()
# One in this many batches that a `collate_fn` makes has its bytes measured.
WEIGHED = 128
# For one in this many batches, estimate what a reader beside the trainer saves.
LOOKS = 8
# Share of a step that reading beside the trainer must save: there is no way back.
MIN_GAIN = 0.1
# A thread that shares the GIL with the trainer needs this share more CPU time.
GIL_COST = 0.3


class BatchMeter:
    """The time that making batches takes. Only the trainer's thread writes to it.

    meter.begin()
    ...                     # make the samples
    meter.collating()
    ...                     # collate them
    meter.end(rows)
    """

    def __init__(self, operations: int = 1) -> None:
        # The cost of each operation, if there are several.
        self.parts = PartsMeter(operations)
        self._clock, self._queue = SampledClock(), own_queue()
        # Likely share of this batch's time on a CPU; None if it is measured.
        self.share: float | None = None
        self._born_ns = time.perf_counter_ns()
        # Counts, and nanoseconds: of all batches, of collating them, and of those
        # measured.
        self.batches = self.rows = self.run_ns = self._collate_ns = self._clocked_ns = 0
        # Rows and nanoseconds of the first batch, and of the slowest other one.
        self._cold = self._slowest = (0, 0)
        # When the batch began and its samples were made; the time of the last one.
        self._begun_ns, self._made_ns, self.last_ns = 0, 0, LONG_NS
        # Bytes of a sample, as last measured, and its time in nanoseconds: the median
        # of the first batch. 0 if unknown.
        self.sample_bytes = self.usual_ns = 0

    def begin(self) -> None:
        """Begin a batch."""
        self.share = self._clock.begin()
        if self.share is None:
            self._queue.begin()
        self._begun_ns = time.perf_counter_ns()

    def collating(self) -> contextlib.AbstractContextManager[object]:
        """Note that the samples are made, and collating them starts."""
        self._made_ns = time.perf_counter_ns()
        return NOTHING

    def end(self, rows: int) -> None:
        """End a batch of `rows` rows."""
        now_ns = time.perf_counter_ns()
        run_ns = self.last_ns = now_ns - self._begun_ns
        self._clock.end(run_ns)
        if self.share is None:
            self._queue.end(run_ns)
            self._clocked_ns += run_ns
        if self.batches == 0:
            self._cold = rows, run_ns
        elif run_ns > self._slowest[1]:
            self._slowest = rows, run_ns
        self.batches += 1
        self.rows += rows
        self.run_ns += run_ns
        self._collate_ns += now_ns - self._made_ns

    def tally(self, *, collating: bool = True) -> tuple[int, int]:
        """Return rows and nanoseconds without the first batch and the slowest other.

        Args:
            collating: whether the time for collating counts.
        """
        (cold, cold_ns), (slow, slow_ns) = self._cold, self._slowest
        if self.batches <= 2:
            slow = slow_ns = 0
        part = 1.0 if collating else 1.0 - ratio(self._collate_ns, self.run_ns)
        return self.rows - cold - slow, int((self.run_ns - cold_ns - slow_ns) * part)

    def read(self) -> tuple[WorkerReading, tuple[PartReading, ...]]:
        """Return the totals: of everything, of each operation, and of collating."""
        rows, run_s = self.rows, self.run_ns / 1e9
        cpu_s = min(self._clock.total_ns / 1e9, run_s)
        collate_s = min(self._collate_ns / 1e9, run_s)
        collate_cpu_s = min(collate_s, cpu_s)  # copies do not wait
        alive_s = (time.perf_counter_ns() - self._born_ns) / 1e9
        nbytes, held_s = rows * self.sample_bytes, max(0.0, alive_s - run_s)
        work = WorkerReading(
            rows=rows, worker_s=alive_s, run_s=run_s, cpu_s=cpu_s, wait_credit_s=held_s
        )
        parts = self.parts.read()
        if len(parts) == 1:  # its cost is that of everything but collating
            own_s, own_cpu_s = run_s - collate_s, cpu_s - collate_cpu_s
            parts = (PartReading(rows, own_s, own_cpu_s, nbytes),)
        return work, (*parts, PartReading(rows, collate_s, collate_cpu_s, nbytes))

    @property
    def queued_s(self) -> float:
        """Seconds that the trainer waited for a core while making batches."""
        return self._queue.total_ns / 1e9 * ratio(self.run_ns, self._clocked_ns)


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
        self._meter = meter
        self.begin(cursor)
        # The feed through which batches come, and which may go on with an engine.
        self.feed: PlannedFeed | RepackFeed | None = None
        # Whether a sample drew from a global generator.
        self.drew = False
        plan.ahead = 0

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        last = self._last
        return self._start if last is None else self._plan.cursor_after(last)

    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`."""
        self._start = cursor
        self._last: BatchPlan | None = None

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch; None at its end."""
        last = self._last
        step = self._start.step if last is None else last.step + 1
        batch = self._plan.draw_batch(step)
        if batch is None:
            return None
        plan, indices = batch
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
            took_ns = time.perf_counter_ns() - begun_ns
            with undisturbed():  # a sample may draw to say its size
                self._measure(samples, took_ns, len(indices))
        meter.collating()
        data = self._buffers.together(plan, samples, indices)
        meter.end(len(indices))
        return data

    def _measure(self, samples: Sequence[Any], took_ns: int, count: int) -> None:
        """Note what a sample takes, by those of the first batch."""
        self._meter.usual_ns = took_ns // count
        self._meter.sample_bytes = (
            size_of(samples) // count if self._read.whole else size_of(samples[0])
        )

    def _samples(self, plan: BatchPlan, indices: list[Any]) -> Sequence[Any]:
        """Get the samples from the dataset, as torch does."""
        get, get_many = self._read.get, self._read.get_many
        if get_many:
            samples: Sequence[Any] = get_many(indices)
            return samples
        at: Any = None
        try:
            return [get(at := index) for index in indices]
        except Exception as error:
            row = next(row for row, index in enumerate(indices) if index is at)
            Failure(error, self._read.stage, at, row).annotated(plan)
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
        self._calls = SeededCalls(recipe.buffers.collate)
        self.drew = bool(self._read.seeds)
        # Whether a batch has shown what draws, and whether a sample made twice may
        # differ, because its sources change.
        self._sure = self._once = False

    def _made(self, plan: BatchPlan, indices: list[Any]) -> Any:
        if len(indices) == 0:
            return super()._made(plan, indices)
        meter, undrawn = self._meter, self._undrawn
        seeded = self.drew or not self._sure or (self._once and plan.batch == 0)
        if not seeded:
            undrawn.look()
            meter.begin()
            samples = self._samples(plan, indices)
            if undrawn.drawn:
                self.drew = self._read.seeds = True
                undrawn.put_back()
                seeded = not self._once
        if not seeded:
            meter.collating()
            data = self._collated(plan, indices, samples)
        else:
            with undisturbed():
                data = self._seeded(plan, indices)
        meter.end(len(indices))
        return data

    def _samples(self, plan: BatchPlan, indices: list[Any]) -> Sequence[Any]:
        """Get the samples. As with workers, none may end the epoch early.

        Raises:
            SampleError: a sample raised `StopIteration`.
        """
        try:
            return super()._samples(plan, indices)
        except StopIteration as error:
            raise SampleError(STOPPED.format(self._read.stage)) from error

    def _collated(
        self, plan: BatchPlan, indices: list[Any], samples: Sequence[Any]
    ) -> Any:
        """Collate samples that drew nothing; seed what collate_fn draws."""
        together = self._buffers.together
        if self._buffers.collate is None:
            return together(plan, samples, indices)
        unused = [samples]  # collate_fn may change them, before it is called again

        def collate() -> Any:
            inputs = unused.pop() if unused else self._samples(plan, indices)
            return together(plan, inputs, indices)

        inputs = [samples] if self._buffers.whole else samples
        return self._calls.call(
            collate, inputs, self._plan.seed, plan.epoch, plan.batch
        )

    def _seeded(self, plan: BatchPlan, indices: list[Any]) -> Any:
        """Make a batch under seeds; the first one shows what draws, or changes."""
        meter = self._meter
        data = None if self._sure else Witness([self._read.start.dataset])
        meter.begin()
        one_by_one = not self._read.whole and (self.drew or data is not None)
        samples = (self._one_by_one if one_by_one else self._at_once)(plan, indices)
        meter.collating()
        if self._buffers.collate is not None:
            seed_global_generators(mixed((self._plan.seed, plan.epoch, plan.batch)))
        batch = self._buffers.together(plan, samples, indices)
        if data is not None:
            self._once, self._sure = not data.repeats(), True
        self._read.seeds = self.drew or self._read.seeds
        return batch

    def _one_by_one(self, plan: BatchPlan, indices: list[Any]) -> Sequence[Any]:
        """Get samples, each under its own seed; note whether they draw."""
        undrawn, times_ns = Undrawn(), []
        samples: list[Any] = []
        for index, seed in zip(indices, self._plan.seeds(plan).tolist(), strict=True):
            seed_global_generators(seed)
            if not self.drew:
                undrawn.look()
            begun_ns = time.perf_counter_ns()
            samples += self._samples(plan, [index])
            times_ns.append(time.perf_counter_ns() - begun_ns)
            self.drew = self.drew or undrawn.drawn
        self._meter.usual_ns = sorted(times_ns)[len(times_ns) // 2]
        self._meter.sample_bytes = size_of(samples[0])
        return samples

    def _at_once(self, plan: BatchPlan, indices: list[Any]) -> Sequence[Any]:
        """Get samples that cannot be repeated, or are read at once, under one seed."""
        seed_global_generators(int(self._plan.seeds(plan)[0]))
        undrawn = Undrawn()
        undrawn.look()
        begun_ns = time.perf_counter_ns()
        samples = self._samples(plan, indices)
        self.drew = undrawn.drawn  # before measuring: a sample may draw to say its size
        self._measure(samples, time.perf_counter_ns() - begun_ns, len(indices))
        return samples


class PlanMaker:
    """Makes the batches of a plan, or blocks of samples that are dealt into batches.

    To its feed, it looks like an engine.
    """

    def __init__(self, recipe: Recipe, cursor: Cursor, meter: BatchMeter) -> None:
        self.recipe = recipe
        # The step of the batch, or block, that is made next.
        self.head = cursor.step
        # Whether a sample drew from a global generator.
        self.drew = False
        self.trainer = self._meter = meter
        self._program = recipe.segments[0].program
        # Whether the samples of a batch have their bytes measured.
        self._weighs = cycle([True] + [False] * (WEIGHED - 1))
        # Image size of the latest batch.
        self._size: int | None = None
        # Rows read for this batch.
        self._rows = 0
        self._random, self._undrawn = SampleRandom(recipe.seed), Undrawn()
        self._calls = SeededCalls(recipe.buffers.collate)
        feed = RepackFeed if recipe.repack else PlannedFeed
        # Not itself: a circle would keep the dataset until the next collection.
        self.feed: PlannedFeed | RepackFeed = feed(weakref.proxy(self))
        self.begin(cursor)

    @property
    def cursor(self) -> Cursor:
        return self.feed.cursor

    def begin(self, cursor: Cursor) -> None:
        self._plans: Iterator[BatchPlan] = iter(())
        self.feed.begin(cursor)

    def next(self) -> Delivery | None:
        self._rows = 0
        self._meter.begin()
        delivery = self.feed.next()
        if delivery is not None:
            self._meter.end(self._rows)
        return delivery

    # For the feed

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: no epoch starts ahead."""

    def restart(self, step: int, skip: int = 0) -> None:
        """Continue at `step`; an iterable starts over and skips `skip` samples."""
        self._program.restart(skip)
        self.head, self._plans = step, iter(())

    # Nothing has to be done: nobody else is working.
    still = contextlib.nullcontext

    def pop(self) -> tuple[PlannedBatch, Finished | FailedBatch]:
        """Make the next batch or block."""
        plan = next(self._plans, None)
        if plan is None:  # also once a schedule has failed
            self._plans = self.recipe.planned.batches(
                self.head,
                self.head + sys.maxsize,  # iterables' steps soon pass 2**63
            )
            plan = next(self._plans)
        rows = self.recipe.planned.rows(plan)
        self.head += 1
        if not self.drew:
            self._undrawn.look()
        chunk = Chunk(plan.step, 0, rows.indices, rows.rounds, context=plan.ctx)
        meter = self._meter
        work, parts = self._program.work(chunk, None, self._random, meter.share)
        self.drew = self.drew or self._undrawn.drawn
        samples = work.samples
        count = len(samples) if work.ended else len(chunk)
        self._rows += count
        if parts:
            meter.parts.add(parts, count)
        if (plan.image_size != self._size or next(self._weighs)) and samples:
            self._size = plan.image_size
            meter.sample_bytes = size_of_all(samples) // len(samples)
        meter.collating()
        if work.failures or self.recipe.repack:
            return self._filled(
                work, InFlightBatch(plan, rows, buffer=None, remaining=[])
            )
        batch, make = PlannedBatch(plan, rows), self._together
        if self.recipe.buffers.collate is None:
            return batch, make(batch, samples)
        collate, seed = partial(make, batch, samples), self.recipe.seed
        return batch, self._calls.call(collate, samples, seed, plan.epoch, plan.batch)

    def _together(
        self, batch: PlannedBatch, samples: Sequence[Any]
    ) -> Finished | FailedBatch:
        """Collate samples that are all there."""
        buffers, indices = self.recipe.buffers, batch.rows.indices
        try:
            return Finished(buffers.together(batch.plan, samples, indices))
        except Exception as error:  # noqa: BLE001 the trainer raises it
            return FailedBatch(error)

    def _filled(
        self, work: Work, in_flight: InFlightBatch
    ) -> tuple[InFlightBatch, Finished | FailedBatch]:
        """Make a batch of which samples are missing, or a block, as workers do."""
        in_flight.ended = work.ended
        if not work.failures:
            return in_flight, Finished(
                dict(zip(work.rows(), work.samples, strict=True))
            )
        for failure in work.failures:
            if isinstance(failure.error, KeyboardInterrupt):
                raise failure.error  # at once: it was meant for the loop
        in_flight.failures += work.failures
        work.failures = []
        buffers = self.recipe.buffers
        in_flight.buffer = BatchBuffer(buffers, in_flight.plan)
        self._program.finish(work, in_flight.buffer)
        finished = buffers.finish(in_flight)
        if isinstance(finished, Gathered):
            seeds = self.recipe.seed, in_flight.plan.epoch, in_flight.plan.batch
            finished = self._calls.call(
                finished.collate, finished.buffer.kept.values(), *seeds
            )
        return in_flight, finished


class DirectHost(Host):
    """A host without an engine: the trainer makes its batches.

    Args:
        recipe: a recipe of one segment.
        byte_budget: must hold one batch if the user has set it, although a finished
            batch is the trainer's.
        cursor: where the first batch starts.
        trainer: the meter of whoever calls `next`.

    Raises:
        BudgetError: from `next`, if the budget has no room for a batch, which stays
            due.
        PenstockError: from `next`, once it is closed.
    """

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        cursor: Cursor,
        trainer: TrainerMeter,
    ) -> None:
        self._recipe, self._byte_budget, self._trainer = recipe, byte_budget, trainer
        self._closed = False
        (self.segment,) = recipe.segments
        operations = self.segment.program.operations
        self._meter = BatchMeter(len(operations))
        maker = SeededMaker if isinstance(operations[0], SeededRead) else DrawnMaker
        make = PlanMaker if recipe.drawn is None else maker
        self.maker: DrawnMaker | PlanMaker = make(recipe, cursor, self._meter)
        self.feed = self.maker.feed
        # Rows of the largest batch, and what earlier epochs took, in nanoseconds.
        self._batch_rows = self._before_ns = 0
        # A batch that is made, and due once the budget has room for it.
        self._large: Delivery | None = None
        # Seconds that reading beside the trainer would have saved so far.
        self._saved_s = 0.0
        # Whether nobody knows yet if workers would pay.
        self.undecided = self.segment.executor == "auto" or bool(self.segment.fixed)
        # Why the trainer goes on making the batches; empty if it need not.
        self.stays = self.segment.stays
        self._witness = Witness(self.segment.subjects)
        # Whether worker processes may call the `collate_fn`: it keeps no state.
        self.collate = Witness([recipe.buffers.collate])
        self.moves = deque()

    @property
    def cursor(self) -> Cursor:
        if self._large is None:
            return self.maker.cursor
        plan = self._large.plan
        return Cursor(plan.epoch, plan.batch, plan.step, plan.start)

    @property
    def s_per_row(self) -> float:
        """Seconds that a sample takes the trainer; 0 if unknown."""
        rows, run_ns = self._meter.tally()
        return run_ns / 1e9 / rows if rows else 0.0

    def begin(self, cursor: Cursor) -> None:
        if self.undecided and not (self.stays or self.segment.iterable):
            resolution = self._suited(WORTH_START_NS)
            if resolution is not None and resolution.executor != "inline":
                self.stays = Restriction.SHORT.format(resolution.reason)
        self._before_ns = self._meter.run_ns
        self._large = None
        self.maker.begin(cursor)

    def next(self) -> Delivery | None:
        if self._closed:
            raise PenstockError(CLOSED)
        delivery = self._large
        if delivery is None and self._meter.batches:
            delivery = self.maker.next()
        elif delivery is None:
            with self._witness:
                delivery = self.maker.next()
            if delivery is not None:
                self._witness.note_made(delivery.data, ())
        if self.undecided and self.segment.iterable:
            self._saved_s += min(self._trainer.gap_s, self._meter.last_ns / 1e9)
        if delivery is not None and delivery.plan.n_rows > self._batch_rows:
            self._large = delivery
            rows = delivery.plan.n_rows
            self._byte_budget.check_fits(rows * self._meter.sample_bytes, rows)
            self._batch_rows = rows
            self._large = None
        return delivery

    def chosen_kind(self) -> Kind | None:
        """Return the kind of workers that `auto` resolves to, or None for now.

        It resolves once, by the first batches and by what was observed of them.
        """
        if not self.undecided or (self.segment.iterable and not self._overlaps()):
            return None
        persistent = self._recipe.options.persistent_workers
        spent_ns = self._meter.run_ns - self._before_ns
        resolution = self._suited(WORTH_START_NS if persistent else spent_ns)
        if resolution is None:
            return None
        (kind, reason), fixed = resolution, self.segment.fixed
        self.undecided, self.stays = False, self.segment.stays
        if kind == "inline":
            self._note(kind, "stays", reason)
            return None
        why = self.verdict(kind)
        if fixed:
            self.stay(why or Restriction.ZERO.format(reason, fixed))
            return None
        if not why:
            self._note(kind, "moved", reason)
        return kind

    def _suited(self, epoch_ns: int) -> ResolvedExecutor | None:
        """Return what suits the work, if loading an epoch takes so long."""
        meter, rows, threads = self._meter, self._batch_rows, self.segment.thread_safe
        # With threads, the trainer still runs the `collate_fn`.
        stays = threads or not self.collate.repeats()
        tally = meter.tally(collating=not stays)
        if meter.batches == 1 and meter.usual_ns * rows > SOON_NS:
            tally = rows, meter.usual_ns * rows
        return resolve(*tally, 0, rows, thread_safe=threads, epoch_ns=epoch_ns)

    def _overlaps(self) -> bool:
        """Whether one reader beside the trainer would save it time.

        An iterable can have only one. It reads while the trainer computes, so it saves
        at most the trainer's own part of a step, and at most the time of a batch, even
        if the trainer was away for long.
        """
        if self._meter.batches % LOOKS:
            return False
        saved_s, wait_s = self._saved_s, self._trainer.read().wait_s
        cost_s = GIL_COST * self._meter.read()[0].cpu_s
        return saved_s - cost_s >= MIN_GAIN * (saved_s + wait_s)

    def verdict(self, kind: Kind) -> str:
        """Return why such workers would make other samples; empty if unknown."""
        plan, witness = self._recipe.drawn, self._witness
        witness.drew = self.maker.drew and plan is None
        if self.segment.iterable and not witness.drew:
            return ""  # a thread continues with the existing iterator
        watches = plan is not None and not plan.most
        return witness.verdict(kind) or (Restriction.SAMPLER if watches else "")

    def stay(
        self, why: str, new: str = "inline", outcome: MoveOutcome = "stays"
    ) -> None:
        """Go on making the batches for good; record why."""
        self.stays = why
        self._note(new, outcome, why)

    def _note(self, new: str, outcome: MoveOutcome, reason: str) -> None:
        """Record where the work goes, or why it stays."""
        self.moves.append(Move(self.segment.name, "inline", new, outcome, reason))

    def read(self) -> Observation:
        meter, recipe = self._trainer, self.segment
        work, costs = self._meter.read()
        trainer, now_ns = meter.read(), time.perf_counter_ns()
        window_s = meter.window_s(now_ns, trainer)
        segment = SegmentObservation(
            name=recipe.name,
            queue_name=recipe.queue_name,
            executor="inline",
            num_parallel_workers=1,
            prefetch_size=1,
            **asdict(work),
            output=ConnectorObservation(
                capacity=self._batch_rows, empty=ratio(work.worker_s, window_s)
            ),
            moves=tuple(self.moves),
            run_queue_s=self._meter.queued_s,
            parts=parts_of(recipe.program.stages, costs, (*recipe.storable, None)),
            max_workers=recipe.bounds[1],
            iterable=recipe.iterable,
            alive=1,
            fixed=recipe.fixed,
            stays=self.stays,
            held="" if recipe.tunable else Restriction.PINNED,
        )
        return Observation(
            time_s=now_ns / 1e9,
            window_s=window_s,
            epoch=meter.epoch,
            step=meter.step,
            trainer=trainer,
            segments=(segment,),
            regime=self._recipe.plan.regime(self.cursor.step),
            process_cpu_s=meter.process_cpu_s,
        )

    def close(self) -> None:
        """Make no more batches, and release an iterator that was begun."""
        self._closed = True
        self.segment.program.restart()
