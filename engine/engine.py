"""The engine: brings a recipe to life, and owns all its threads and processes.

    with Engine(recipe, byte_budget, step) as engine:  # compiled, forked, started
        in_flight, finished = engine.pop()        # in order; blocks until ready

Neither it nor its threads refer to the pipeline or to the trainer's iterator. Dropping
an iterator is therefore enough to close it (`Slot` in session.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

from ..errors import CLOSED, PenstockError
from ..system.wakeup import weakly
from .batch.buffer import FailedBatch, Finished, Gathered
from .core.connector import Connector, EngineLock
from .core.in_flight import ByteBudget, InFlightBatch, Reservations
from .monitor import Monitor
from .observe.observation import MoveOutcome
from .plan import AssignedPlan
from .program.randomness import SeededCalls, Undrawn, seeded_by
from .recipe import Recipe, SegmentRecipe, resolve
from .segment import BatchWork, PoolMaker, Segment, core_of, note, worked_late
from .trainer_cost import Rest, TrainerMeter
from .workers import Kind, Watches, no_watch

LOGGER = logging.getLogger("penstock")
# How long all workers together may take to end, so that `close` takes at most 2 s.
CLOSE_S = 1.2
# A thread that holds a lock for this long is stuck.
STUCK_S = 0.5


class Engine:
    """Runs one recipe from a given step on, until it is closed.

    Args:
        recipe: what to run.
        byte_budget: the bytes it may hold, shared with other pipelines.
        step: the first batch wanted.
        trainer: the instrument of whoever takes the batches.
        watch: makes what observes the samples of a worker; it may return None.
        pools: makes the worker pools; by default only those in this process.

    Raises:
        SpecError: worker processes or actors cannot be started.
    """

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        step: int,
        trainer: TrainerMeter | None = None,
        watch: Watches = no_watch,
        pools: type[PoolMaker] = PoolMaker,
    ) -> None:
        self._owner = os.getpid()
        self._closed = self._in_epochs = False
        # Whether it makes what another engine assigns to it.
        self._assigned = isinstance(recipe.plan, AssignedPlan)
        requested_segments, late = recipe.segments, pools.opened_late(recipe, step)
        segments = [  # processes for those whose threads would share late-opened files
            replace(segment, executor="process", thread_safe=False)
            if at in late
            else segment
            for at, segment in enumerate(requested_segments)
        ]
        recipe = self.recipe = replace(recipe, segments=tuple(segments))
        self._late_work = recipe.late_work
        self._pools = pools(recipe, step, watch)
        self.reservations = Reservations(byte_budget, weakly(self._notify))
        self.engine_lock = EngineLock(core_of(recipe, self.reservations, step))
        self._suspends = weakly(self._suspend)
        self.segments: list[Segment] = []
        self.rest = Rest(self.engine_lock, self.segments)
        self._step_wanted = True
        self._unweighed_segment: Segment | None = None
        self._undrawn, self._calls = Undrawn(), SeededCalls(recipe.buffers.collate)
        self.trainer = trainer or TrainerMeter()
        self.monitor = Monitor(
            self.engine_lock, self.segments, self.trainer, recipe.plan
        )
        try:
            self._begin(requested_segments, late)
        except BaseException:  # nobody else could end what has begun
            self.close()
            raise

    def _begin(
        self, requested_segments: tuple[SegmentRecipe, ...], late: Mapping[int, object]
    ) -> None:
        """Start what workers need, and make their pools, still without workers."""
        self._pools.begin()  # first: no thread of this engine exists yet
        recipes = self.recipe.segments
        work = BatchWork(self.recipe, weakly(self._let_collate), weakly(self._judge))
        lone = sum(not recipe.per_batch for recipe in recipes) == 1
        for at, recipe in enumerate(recipes):
            finish, stages = work.finisher(at), len(recipe.stages)
            connector = Connector(self.engine_lock, at, finish, stages)
            make = partial(self._pools.make, connector, recipe)
            self.segments.append(
                Segment(recipe, connector, make, alone=lone or recipe.per_batch)
            )
        for at, finding in late.items():
            segment, before = self.segments[at], requested_segments[at].executor
            outcome: MoveOutcome = "stays" if before == "process" else "moved"
            why = (
                f"since the first sample {finding}, which threads must not share, so"
                " each process has its own; pass from_dataset(thread_safe=True) if"
                " threads may share it"
            )
            note(segment, "process", outcome, why, old=before)

    def __enter__(self) -> Self:
        """Start the workers."""
        for segment in self.segments:
            segment.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pop(self) -> tuple[InFlightBatch, Finished | FailedBatch]:
        """Return the next batch in order, waiting until it is ready.

        While it waits, it works on inline segments.

        Raises:
            BudgetError: the budget has no room for one batch; it stays the next one.
            PenstockError: the engine was closed.
            Exception: the engine itself failed; a `WorkerError`, if its workers die one
                after another. Or a function of the schedule raised it.
        """
        engine_lock = self.engine_lock
        if self._assigned and (entry := self._made_alone()) is not None:
            return self._collated(*entry)
        self._follow_all()
        self._resolve()
        if self.segments[-1].inline is not None and engine_lock.peek() is None:
            self._step_wanted = self._work_inline()  # nobody else would make it ready
        while True:
            ready = engine_lock.peek()
            if ready is not None:
                # Before it leaves: if it does not fit, it stays until it does.
                self.reservations.byte_budget.check_fits(
                    self.reservations.batch_bytes, ready[0].plan.n_rows
                )
                self._supply()
            with engine_lock.lock:
                unopened = engine_lock.core.head == engine_lock.core.next_step
                entry = engine_lock.pop() if ready or unopened else None
                if entry is not None:
                    break
                self._check()
                idle = engine_lock.trainer_waits = not (
                    engine_lock.work_came or self._step_wanted or engine_lock.peek()
                )
                engine_lock.work_came = False
            self._resolve()
            if idle:
                engine_lock.sleep()
                self._follow_all()  # if actors were lost, nothing else would come
            self._step_wanted = self._work_inline()
        engine_lock.notify_others()
        for segment in self.segments:
            segment.pool.serve_now()
        return self._collated(*entry)

    def _made_alone(self) -> tuple[InFlightBatch, Any] | None:
        """Return the next batch, made at once, if this thread is the only worker."""
        segment, *others = self.segments
        if others or segment.inline is None or segment.moving:
            return None
        return segment.connector.make_alone(segment.inline.outcome)

    def _collated(
        self, in_flight: InFlightBatch, batch: Finished | FailedBatch | Gathered
    ) -> tuple[InFlightBatch, Finished | FailedBatch]:
        """Do what the trainer's thread does to a batch whose rows are there.

        The user's functions draw by the batch: the trainer's next draws are its own.
        """
        plan = in_flight.plan
        if isinstance(batch, Gathered):
            seeds = self.recipe.collate_seed, plan.epoch, plan.batch
            kept = batch.buffer.kept.values()
            threads = self._assigned and any(s.inline is None for s in self.segments)
            with self.trainer.collating():
                batch = self._calls.call(batch.collate, kept, *seeds, apart=threads)
            if not self._calls.keeps:
                self._let_collate()
        if self._late_work and not in_flight.elsewhere:
            with seeded_by(self.recipe.collate_seed, plan.epoch, plan.batch, 1):
                batch = worked_late(self.recipe, plan, batch)
        return in_flight, batch

    def _let_collate(self) -> None:
        """Note that collating keeps no state, so workers may collate whole batches."""
        if self.engine_lock.core.placing == 0:
            self.segments[0].connector.keeps_nothing()

    def _judge(self, at: int, data: Any) -> None:
        """Judge by its first batch whether an inline segment may work ahead."""
        segment, recipe = self.segments[at], self.segments[at].recipe
        collate = self.recipe.buffers.collate
        subjects = (collate,) if recipe.in_order else recipe.subjects
        segment.witness.note_made(data, subjects)
        if not segment.witness.verdict("thread"):
            segment.connector.keeps_nothing()

    def restart(self, step: int, skip: int = 0) -> None:
        """Drop everything in flight and continue at `step`.

        An iterable starts over and skips its first `skip` samples. Its reader has a
        place in it, so reads for dropped rows must end first.

        Raises:
            PenstockError: the engine was closed.
        """
        reader = self.recipe.segments[0]
        with contextlib.ExitStack() as stack:
            if reader.iterable:
                stack.enter_context(self.still(reader_only=True))
                reader.program.restart(skip)
                if self.segments[0].executor == "process":
                    self._pools.renew()  # its place is in the process that reads
            with self.engine_lock.lock:
                self.engine_lock.mend()
                self.engine_lock.core.restart(step, self.engine_lock.clock())
                self.engine_lock.wake()
        self.engine_lock.notify_others()

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for an epoch that is about to be requested.

        If nothing may outlive an epoch, no batch of the next one has been started, and
        workers are forked again, so that they have the present dataset.

        Raises:
            SpecError: something in the programs can no longer be sent to workers.
        """
        end: int | None = None  # all batches may be made
        if self.recipe.options.persistent_workers:
            if not self.reservations.byte_budget.resume(self._suspends):
                return
        else:
            if self._in_epochs:
                self._pools.renew()
            self._in_epochs = True
            plan = self.recipe.plan
            assert not isinstance(plan, AssignedPlan)  # epochs begin in the trainer
            end = plan.first_step(epoch + 1)
        with self.engine_lock.lock:
            self.engine_lock.core.extend(end)
            self.engine_lock.core.unpause()
            self.engine_lock.wake()

    def end_epoch(self) -> None:
        """End worker processes that may not outlive the epoch, which is over.

        What is prefetched of the next epoch yields to other pipelines that need the
        bytes, unless dropping it would lose the place of an iterable.
        """
        if not self.recipe.options.persistent_workers:
            self._pools.expire()
        elif not (self.recipe.drawn or self.recipe.iterable):
            self.reservations.byte_budget.rest(self._suspends)

    def _suspend(self) -> None:
        """Drop what is prefetched between two epochs, and load no more. Any thread."""
        core, engine_lock = self.engine_lock.core, self.engine_lock
        with engine_lock.lock:
            if self._suspends in self.reservations.byte_budget.resting():
                core.restart(core.head, engine_lock.clock())
                core.extend(core.head)
                engine_lock.wake()
        engine_lock.notify_others()

    def move(self, segment: Segment, kind: Kind) -> None:
        """Give a segment workers of another kind. For the trainer's thread.

        Nothing drains. Only the first worker processes make all others pause, for as
        long as a fork takes: see `still`.

        Raises:
            SpecError: the segment cannot be sent to another process; it is unchanged.
            PenstockError: the engine was closed.
        """
        if kind == "process" and not self._pools.forked:
            with self.still():
                self._pools.fork()
            if self.engine_lock.closed:  # by another thread, before there was a server
                self._pools.close()
                self._check()
        segment.move(kind)

    @property
    def head(self) -> int:
        """The step that `pop` returns next."""
        return self.engine_lock.core.head

    def close(self) -> None:
        """Stop and join all workers, and release all memory.

        Idempotent in each of its steps: if Ctrl-C interrupts it, call it again.
        """
        if self._closed or os.getpid() != self._owner:
            return
        until_s = time.monotonic() + CLOSE_S
        self.rest.resume()  # who rests would not see the end
        stuck: list[str] = []
        with contextlib.ExitStack() as stack:
            self.reservations.byte_budget.resume(self._suspends)
            stack.callback(self.monitor.probe.close)
            stack.callback(self._pools.close)
            # Releases an iterator.
            stack.callback(self.recipe.segments[0].program.restart)
            for segment in self.segments:
                stack.callback(segment.close, until_s, stuck)
            with self.engine_lock.lock:
                self.engine_lock.core.close(self.engine_lock.clock())
                self.engine_lock.wake()
        self.engine_lock.notify_others()
        self._closed = True
        if stuck:
            names = (f"{name} ({count})" for name, count in Counter(stuck).items())
            LOGGER.warning(
                "the pipeline is closed, but %d of its threads are still in the"
                " functions they run (%s). A thread cannot be interrupted, so each runs"
                " on until its function returns or the program ends. If a function may"
                ' hang, use executor="process", whose workers are killed',
                len(stuck),
                ", ".join(names),
            )

    def is_free(self) -> bool:
        """Whether no thread, this one included, is stuck holding a lock of ours.

        The garbage collector, and with it finalisers, may run at any allocation. So a
        finaliser that closes this engine may run inside a call that holds its lock.
        """
        for lock in self.engine_lock.lock, self.reservations.byte_budget.lock:
            if not lock.acquire(timeout=STUCK_S):
                return False
            lock.release()
        return True

    @contextlib.contextmanager
    def still(self, *, reader_only: bool = False) -> Iterator[None]:
        """Keep everybody from working within the `with`.

        A fork copies the locks of the user's functions as they are. One that a thread
        holds at that moment would stay locked in the copy forever.

        Args:
            reader_only: whether to wait only for reads from the source to end. If the
                process that reads has died, that is all right, too.

        Raises:
            PenstockError: the engine was closed.
        """
        self.rest.resume()  # or its alarm would end this
        try:
            while self._pause(reader_only=reader_only):
                self.engine_lock.sleep()
            yield
        finally:
            with self.engine_lock.lock:
                self.engine_lock.core.unpause()
                self.engine_lock.wake()

    def _pause(self, *, reader_only: bool) -> bool:
        """Hand out no more work; return whether somebody is still working."""
        engine_lock = self.engine_lock
        segments = self.segments[:1] if reader_only else self.segments
        with engine_lock.lock:
            if reader_only:
                engine_lock.mend()
            self._check()
            engine_lock.core.pause()
            engine_lock.trainer_waits = any(
                segment.connector.busy for segment in segments
            )
            return engine_lock.trainer_waits

    def _work_inline(self) -> bool:
        """Work on one lease of the trainer's own segments, the last ones first."""
        for segment in reversed(self.segments):
            inline = segment.inline
            if inline is None:
                continue
            if segment.undecided:
                self._undrawn.look()
            begins = segment.undecided and not inline.done
            with segment.witness if begins else contextlib.nullcontext():
                worked = inline.step()
            if worked:
                self._unweighed_segment = segment if segment.undecided else None
                if segment.undecided and self._undrawn.drawn:
                    segment.witness.drew = True
                return True
        return False

    def _supply(self) -> None:
        """Feed workers that read from the trainer's own segments all they may take.

        This happens once before each ready batch is handed over: while the trainer
        computes, nobody else would feed them. A segment that is still undecided may be
        slow, so the batch goes first.
        """
        if len(self.segments) == 1:
            return
        others = [at for at, segment in enumerate(self.segments) if not segment.inline]
        feeding = [
            segment.inline
            for segment in reversed(self.segments[: max(others, default=0)])
            if segment.inline and not segment.undecided
        ]
        while any(inline.step() for inline in feeding):
            pass

    def _resolve(self) -> None:
        """Resolve `auto` for the segment worked on last; a move takes a fork's time.

        Not while a ready batch waits to be handed over: it probably is the first.
        """
        segment, self._unweighed_segment = self._unweighed_segment, None
        if segment is None or not segment.undecided or segment.inline is None:
            return
        rows, run_ns = segment.inline.tally
        batch_rows = self.engine_lock.core.batch_rows
        resolution = resolve(
            rows,
            run_ns,
            left=-segment.inline.done % batch_rows,
            batch_rows=batch_rows,
            thread_safe=segment.recipe.thread_safe,
        )
        if resolution is None:
            return
        segment.undecided = False
        segment.recipe = replace(
            segment.recipe, alone_s_per_row=run_ns / 1e9 / max(rows, 1)
        )
        if resolution.executor == "inline":
            note(segment, "inline", "stays", resolution.reason)
        elif self._move_or_note(segment, resolution.executor):
            note(segment, resolution.executor, "moved", resolution.reason, old="inline")

    def _follow_all(self) -> None:
        """Give segments the workers that they request; let the old ones leave."""
        for segment in self.segments:
            if not segment.moving:
                continue
            kind = segment.take_wanted()
            if kind is not None and segment.executor == "ray":
                self.move(segment, kind)  # nobody else does its work
            elif kind is not None and kind != segment.executor:
                self._move_or_note(segment, kind)
            segment.settled()

    def _move_or_note(self, segment: Segment, kind: Kind) -> bool:
        """Move a segment; if it may not or cannot move, it stays for good."""
        # A thread continues with the existing iterator.
        continues = segment.recipe.iterable and not segment.witness.drew
        if not continues and (why := segment.witness.verdict(kind)):
            segment.stays = why
            note(segment, segment.executor, "stays", why)
            return False
        try:
            self.move(segment, kind)
        except Exception as error:  # noqa: BLE001 whatever pickling user data raises
            segment.stays = str(error) or type(error).__name__
            note(segment, kind, "failed", segment.stays)
            return False
        return True

    def _notify(self) -> None:
        self.engine_lock.notify()

    def _check(self) -> None:
        if self.engine_lock.broken is not None:
            raise self.engine_lock.broken
        if self.engine_lock.closed:
            raise PenstockError(CLOSED)
