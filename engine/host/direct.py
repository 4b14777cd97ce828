"""The trainer as its own and only worker: it makes each batch when it asks for it.

What torch's loader does with `num_workers=0`, at what that costs: no queue, no lock, no
thread, and nothing made ahead. A pipeline of one segment begins here where nobody asked
for workers, and may come back where they turn out to be slower.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import default_collate

from ...errors import CLOSED, PenstockError, add_note
from ..auto_executor import SOON_NS, resolve
from ..batch.buffer import Collate, FailedBatch, Finished, Gathered, heap
from ..batch.layout import Layout, Misfit, learn, size_of, write_rows
from ..core.byte_budget import ByteBudget
from ..core.chunk import Failure, InFlightBatch
from ..core.metrics import GaugeReading, PartReading, PartsMeter, WorkerReading
from ..feed import Delivery, PlannedFeed
from ..movable import CHANGES, DREW, WATCHES, changed, snapshot
from ..observe.knob import Knob
from ..observe.observation import Move, MoveOutcome, ratio
from ..observe.reading import Reading, SegmentReading, TrainerMeter
from ..plan import BatchPlan, Cursor, DrawnPlan
from ..program.randomness import SampleRandom
from ..program.seeding import (
    SeededCalls,
    SeededRead,
    Undrawn,
    keeps,
    mixed,
    seed_global_generators,
    seeded_by,
    undisturbed,
)
from ..recipe import Recipe
from ..segment import Kind
from .local import NOTE_NS

__all__ = ["DirectHost"]

LONG_NS = 1_000_000
"""From which the CPU clock is read for every batch."""
SOME = 64
"""Of short batches it is read for one in so many."""


class Meter:
    """What the making of batches takes. Written by the trainer's thread alone.

        meter.begin()
        ...                     # make the samples
        meter.collating()
        ...                     # collate them
        meter.end(rows)

    The CPU clock of a thread is a call of the system, which may take longer than a
    small batch. So it is read for batches that are long, and for a few of the others.
    """

    def __init__(self, operations: int = 1) -> None:
        self.parts = PartsMeter(operations)
        """Of each operation, where there are several."""
        self._born_ns = time.perf_counter_ns()
        self.batches = self.rows = self._run_ns = self._collate_ns = 0
        self._clocked_ns = self._cpu_ns = 0
        """Of the batches that the CPU clock was read for."""
        self._begun_ns = self._made_ns = self._begun_cpu_ns = 0
        self._last_ns = LONG_NS
        self._cold = self._slowest = (0, 0)
        """Rows and nanoseconds of the first batch, and of the slowest of the others."""
        self.sample_bytes = 0
        self.usual_ns = 0
        """Of a sample: the median of the first batch; 0 where that is not known."""

    def begin(self) -> None:
        """A batch is begun."""
        clocked = self._last_ns >= LONG_NS or self.batches % SOME == 0
        self._begun_cpu_ns = time.thread_time_ns() if clocked else 0
        self._begun_ns = time.perf_counter_ns()

    def collating(self) -> None:
        """Its samples are made."""
        self._made_ns = time.perf_counter_ns()

    def end(self, rows: int) -> None:
        """It is made."""
        now_ns = time.perf_counter_ns()
        run_ns = self._last_ns = now_ns - self._begun_ns
        if self._begun_cpu_ns:
            self._cpu_ns += time.thread_time_ns() - self._begun_cpu_ns
            self._clocked_ns += run_ns
        if self.batches == 0:
            self._cold = rows, run_ns
        elif run_ns > self._slowest[1]:
            self._slowest = rows, run_ns
        self.batches += 1
        self.rows += rows
        self._run_ns += run_ns
        self._collate_ns += now_ns - self._made_ns

    @property
    def tally(self) -> tuple[int, int]:
        """Rows and nanoseconds, without the first batch, and the slowest of others."""
        (cold, cold_ns), (slow, slow_ns) = self._cold, self._slowest
        if self.batches <= 2:
            slow = slow_ns = 0
        return self.rows - cold - slow, self._run_ns - cold_ns - slow_ns

    @property
    def samples_tally(self) -> tuple[int, int]:
        """The same of making samples alone."""
        rows, run_ns = self.tally
        return rows, int(run_ns * (1.0 - ratio(self._collate_ns, self._run_ns)))

    def read(self) -> tuple[WorkerReading, tuple[PartReading, ...]]:
        """Return the totals: of all, of each operation, and of collating."""
        rows, run_s = self.rows, self._run_ns / 1e9
        collate_s = min(self._collate_ns / 1e9, run_s)
        alive_s = (time.perf_counter_ns() - self._born_ns) / 1e9
        cpu_s = run_s * min(1.0, ratio(self._cpu_ns, self._clocked_ns))
        nbytes, held_s = rows * self.sample_bytes, max(0.0, alive_s - run_s)
        work = WorkerReading(rows, alive_s, run_s, cpu_s, 0.0, held_s, nbytes)
        made = self.parts.read()
        if len(made) == 1:  # what it takes is what all of it takes
            made = (PartReading(rows, run_s - collate_s, nbytes),)
        return work, (*made, PartReading(rows, collate_s, nbytes))


class Maker(Protocol):
    """Makes one batch after the other."""

    drew: bool
    """Whether a sample drew from a global generator."""

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        ...

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`."""
        ...

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch; None at its end."""
        ...


class DrawnMaker:
    """Makes the batches that torch's samplers draw, as torch makes them.

    Each sample of what draws from the global generators has a seed of its own, and so
    has each batch of a `collate_fn` that draws: the bytes are those that workers make,
    and the trainer's own draws are undisturbed. Both are found out by the first batch.
    """

    def __init__(self, recipe: Recipe, cursor: Cursor, meter: Meter) -> None:
        plan = recipe.plan
        assert isinstance(plan, DrawnPlan)
        (read,) = recipe.segments[0].program.operations
        assert isinstance(read, SeededRead)
        self._plan, self._read, self._buffers = plan, read, recipe.buffers
        self._collate = recipe.buffers.collate
        self._meter = meter
        self._start = cursor
        self._last: BatchPlan | None = None
        self._undrawn = Undrawn()
        self._layout: Layout | None = None
        self._learned = False
        self.drew = bool(read.seeds)
        self._sure = False
        """Whether one batch has shown what draws."""
        self._once = False
        """Whether a sample made twice is another, as what it is made from changes."""
        self._collate_draws = False
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
        self._last = plan  # one that raises counts
        if not self._sure:
            return Delivery(self._first(plan, indices), plan)
        undrawn = self._undrawn
        if not self.drew and not self._once:
            undrawn.look()
            meter = self._meter
            meter.begin()
            samples = self._samples(plan, indices)
            if not undrawn.drawn:
                meter.collating()
                data = self._collated(plan, indices, samples)
                meter.end(len(indices))
                return Delivery(data, plan)
            self.drew = self._read.seeds = True
            undrawn.put_back()
        with undisturbed():
            make = self._seeded if self.drew else self._fenced
            return Delivery(make(plan, indices), plan)

    def _first(self, plan: BatchPlan, indices: list[Any]) -> Any:
        """Make the first batch, seeded: see what draws, and what may be made twice."""
        data = self._read.start.dataset
        before = snapshot([data]), snapshot([self._collate])
        with undisturbed():
            made = self._seeded(plan, indices)
        self._once = keeps(data, before[0])
        self._collate_draws = self._collate_draws or keeps(self._collate, before[1])
        self._read.seeds = self.drew or self._read.seeds
        self._sure = True
        return made

    def _samples(self, plan: BatchPlan, indices: list[Any]) -> list[Any]:
        """Ask the data set for them, as torch does."""
        get, get_many = self._read.get, self._read.get_many
        if get_many:
            return list(get_many(indices))
        at: Any = None
        try:
            return [get(at := index) for index in indices]
        except Exception as error:
            failure = Failure(error, self._read.stage, at, indices.index(at))
            failure.annotated(plan.epoch, plan.step)
            raise

    def _collated(self, plan: BatchPlan, indices: list[Any], samples: list[Any]) -> Any:
        """Collate samples that drew nothing; what collate_fn draws is seeded."""
        if self._collate is None:
            return self._default(plan, indices, samples)
        if not self._collate_draws:
            undrawn = self._undrawn
            data = self._by(self._collate, plan, indices, samples)
            if not undrawn.drawn:
                return data
            self._collate_draws = True
            undrawn.put_back()
            samples = self._samples(plan, indices)  # it may have changed them
        with seeded_by(self._plan.seed, plan.epoch, plan.batch):
            return self._by(self._collate, plan, indices, samples)

    def _default(self, plan: BatchPlan, indices: list[Any], samples: list[Any]) -> Any:
        """Collate as torch's default does, into a layout that is known."""
        if not self._learned:
            self._layout, self._learned = learn(samples[0]), True
        layout, rows = self._layout, len(samples)
        if layout is not None:
            memory = layout.open(rows, heap(layout, rows)[1])
            try:
                write_rows(layout, memory, range(rows), samples)
            except Misfit:
                pass
            else:
                return layout.seal(memory)
        return self._by(default_collate, plan, indices, samples)

    def _by(
        self, collate: Collate, plan: BatchPlan, indices: list[Any], samples: list[Any]
    ) -> Any:
        """Collate; an error has a note that names the odd samples."""
        try:
            return collate(samples)
        except Exception as error:
            buffer = self._buffers.of(plan)
            buffer.open(None)
            buffer.place(range(len(samples)), samples)
            add_note(error, buffer.blame(plan, indices))
            raise

    def _seeded(self, plan: BatchPlan, indices: list[Any]) -> Any:
        """Make a batch, each sample under its own seed; note what draws."""
        meter = self._meter
        meter.begin()
        undrawn, samples, times_ns = Undrawn(), [], []
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
        """Make a batch of what is not to be made twice, under one seed."""
        self._meter.begin()
        seed_global_generators(self._plan.seeds(plan)[0])
        undrawn = Undrawn()
        undrawn.look()
        samples = self._samples(plan, indices)
        self.drew = undrawn.drawn
        self._read.seeds = self.drew or self._read.seeds
        return self._seeded_batch(plan, indices, samples)

    def _seeded_batch(
        self, plan: BatchPlan, indices: list[Any], samples: list[Any]
    ) -> Any:
        """Collate, its draws under the batch's own seed; note whether it draws."""
        meter, undrawn = self._meter, Undrawn()
        meter.collating()
        if self._collate is None:
            data = self._default(plan, indices, samples)
        else:
            seed_global_generators(mixed((self._plan.seed, plan.epoch, plan.batch)))
            undrawn.look()
            data = self._by(self._collate, plan, indices, samples)
            self._collate_draws = self._collate_draws or undrawn.drawn
        meter.end(len(indices))
        return data


class PlannedMaker:
    """Makes the batches of a plan. What its feed takes for an engine."""

    def __init__(self, recipe: Recipe, cursor: Cursor, meter: Meter) -> None:
        self.recipe = recipe
        self.head = cursor.step
        self.drew = False
        self._meter = meter
        self._program = recipe.segments[0].program
        self._random = SampleRandom(recipe.seed)
        self._undrawn = Undrawn()
        self._calls = SeededCalls(recipe.buffers.collate)
        self._feed = PlannedFeed(self, cursor)

    @property
    def cursor(self) -> Cursor:
        return self._feed.cursor

    def begin(self, cursor: Cursor) -> None:
        self._feed.begin(cursor)

    def next(self) -> Delivery | None:
        return self._feed.next()

    # For its feed

    def begin_epoch(self, epoch: int) -> None:
        """Nothing is begun ahead."""

    def restart(self, step: int) -> None:
        """Go on at `step`."""
        self.head = step

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Nobody else is at work."""
        yield

    def pop(self) -> tuple[InFlightBatch, Finished | FailedBatch]:
        """Make the next batch."""
        planned, buffers = self.recipe.planned, self.recipe.buffers
        plan = planned.batch(self.head)
        self.head += 1
        rows = planned.rows(plan)
        buffer = buffers.of(plan)
        in_flight = InFlightBatch(plan, rows, buffer, [0])
        if not self.drew:
            self._undrawn.look()
        self._meter.begin()
        chunk = in_flight.chunk(0, len(rows.indices))
        outcome = self._program.run(chunk, None, buffer, self._random)
        self.drew = self.drew or self._undrawn.drawn
        for failure in outcome.failures:
            if isinstance(failure.error, KeyboardInterrupt):
                raise failure.error
        in_flight.failures += outcome.failures
        outcome.failures.clear()
        if outcome.parts:
            self._meter.parts.add(outcome.parts, outcome.done)
        self._meter.collating()
        finished = buffers.finish(in_flight)
        if isinstance(finished, Gathered):
            seed = self.recipe.seed, plan.epoch, plan.batch
            finished = self._calls.call(finished.collate, *seed)
        self._meter.end(len(rows.indices))
        self._meter.sample_bytes = outcome.nbytes // len(rows.indices)
        return in_flight, finished


class DirectHost:
    """A host without an engine: the trainer makes its batches.

    Args:
        recipe: of one segment.
        cursor: where the first batch starts.
        byte_budget: must hold a batch, though that is the trainer's once it is made.
        trainer: the meter of whoever calls `next`.

    Raises:
        BudgetError: from `next`, when the budget cannot hold one batch.
    """

    era = 0

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        cursor: Cursor,
        trainer: TrainerMeter,
    ) -> None:
        self._byte_budget = byte_budget
        self._closed = False
        (self.segment,) = recipe.segments
        self._plan, self._trainer = recipe.plan, trainer
        self._meter = Meter(len(self.segment.program.operations))
        drawn = isinstance(recipe.plan, DrawnPlan)
        make: Callable[[Recipe, Cursor, Meter], Maker]
        make = DrawnMaker if drawn else PlannedMaker
        self._maker = make(recipe, cursor, self._meter)
        operations = self.segment.program.operations
        self._stages = *(each.stage for each in operations), recipe.buffers.stage
        self._batch_rows = 0
        self.undecided = self.segment.executor == "auto"
        """Whether it is still to be seen if workers would pay."""
        self._before = snapshot(self.segment.subjects)
        self._collate = [recipe.buffers.collate]
        self._collate_before = snapshot(self._collate)
        plan = recipe.plan
        self._samplers = plan.samplers if isinstance(plan, DrawnPlan) else []
        self._samplers_before = snapshot(self._samplers)
        self.moves: list[Move] = []
        self._noted_ns = time.perf_counter_ns()

    @property
    def cursor(self) -> Cursor:
        return self._maker.cursor

    @property
    def s_per_row(self) -> float:
        """Seconds that a sample takes the trainer; 0 while that is not known."""
        rows, run_ns = self._meter.tally
        return run_ns / 1e9 / rows if rows else 0.0

    def begin(self, cursor: Cursor) -> None:
        self._maker.begin(cursor)

    def next(self) -> Delivery | None:
        if self._closed:
            raise PenstockError(CLOSED)
        delivery = self._maker.next()
        if delivery is not None and delivery.plan.n_rows > self._batch_rows:
            rows = self._batch_rows = delivery.plan.n_rows
            self._byte_budget.check_fits(rows * self._meter.sample_bytes, rows)
        return delivery

    def found(self) -> Kind | None:
        """Return the kind of workers that `auto` resolves to; None: not now.

        Once: by the first batches, and by what was seen of them.
        """
        if not self.undecided:
            return None
        meter, rows = self._meter, self._batch_rows
        tally = meter.tally if self.collate_moves else meter.samples_tally
        if meter.batches == 1 and meter.usual_ns * rows > SOON_NS:
            tally = rows, meter.usual_ns * rows
        found = resolve(*tally, 0, rows, thread_safe=self.segment.thread_safe)
        if found is None:
            return None
        self.undecided = False
        if found.executor == "inline":
            self._note("inline", "stays", found.reason)
            return None
        if not self.why_not():
            self._note(found.executor, "moved", found.reason)
        return found.executor

    @property
    def collate_moves(self) -> bool:
        """Whether worker processes may call the `collate_fn`: it keeps nothing."""
        return not keeps(self._collate[0], self._collate_before)

    def why_not(self) -> str:
        """Say why workers would make other samples; empty: nothing that was seen."""
        if self._maker.drew and not isinstance(self._plan, DrawnPlan):
            return DREW
        path = changed(self._before, self.segment.subjects)
        if path is not None:
            return CHANGES.format(path)
        path = changed(self._samplers_before, self._samplers)
        return "" if path is None else WATCHES.format(path)

    def _note(self, new: str, outcome: MoveOutcome, reason: str) -> None:
        """Remember where it goes, or why it stays."""
        name = self.segment.name
        self.moves.append(Move.now(name, "inline", new, outcome, reason))

    def read(self) -> Reading:
        trainer, segment = self._trainer, self.segment
        work, parts = self._meter.read()
        reading = SegmentReading(
            segment.name,
            segment.queue_name,
            "inline",
            1,
            1,
            work,
            (work,),
            GaugeReading(0.0, work.alive_s, 0.0, self._batch_rows),
            0.0,
            tuple(self.moves),
            parts=parts,
            names=self._stages,
            storable=(*segment.storable, None),
        )
        return Reading(
            time.perf_counter_ns() / 1e9,
            trainer.epoch,
            trainer.step,
            trainer.read(),
            (reading,),
            0,
            0,
            trainer.regime,
            None,
            time.process_time(),
        )

    def glance(self) -> Reading | None:
        now_ns = time.perf_counter_ns()
        if now_ns - self._noted_ns < NOTE_NS:
            return None
        self._noted_ns = now_ns
        return self.read()

    def knobs(self) -> tuple[Knob, ...]:
        return ()

    def is_free(self) -> bool:
        return True

    def close(self) -> None:
        """Make no more."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<DirectHost at {self.cursor}>"
