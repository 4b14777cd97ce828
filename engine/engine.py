"""The engine: makes a recipe live, owns every thread, process and slab of it.

    with Engine(recipe, purse, step) as engine:   # compiled, forked, started
        flight, finished = engine.pop()           # in order; blocks until ready

It holds no reference to the pipeline or to the trainer's iterator, and neither do its
threads, so letting go of an iterator is enough to have it closed (`Slot` in tuned.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from ..errors import BudgetError, PenstockError
from .batch.buffer import Failed, Finished
from .batch.layout import Allocate, Layout
from .core.byte_budget import Account, Purse
from .core.chunk import Buffer, Flight
from .core.connector import Connector, Gate
from .core.core import Flow, SegmentState
from .mover import Mover
from .observe.gil import GilProbe
from .observe.knob import Knob
from .observe.metrics import Gauge
from .observe.monitor import Monitor, TrainerMeter
from .plan import BatchPlan
from .program.program import ReadOn
from .recipe import Recipe, SegmentRecipe
from .segment import Kind, Segment, hire
from .workers.process.fork_server import Template
from .workers.process.pool import Processes
from .workers.process.slabs import SlabPool

__all__ = [
    "Engine",
]

LOGGER = logging.getLogger("penstock")
NO_SLAB = (
    "no shared memory for a batch (%s): rows come from worker processes through pipes, "
    "which takes longer; free some memory, or raise the container's limit"
)
STUCK_S = 0.5
"""No thread holds a lock for long; one that does cannot go on."""


class Engine:
    """Runs one recipe from a given step on, until it is closed.

    Args:
        recipe: what to run.
        purse: the bytes it may hold, shared with other pipelines.
        step: the first batch wanted.
        trainer: the instrument of whoever takes the batches.
        slabs: where worker processes write; given where others know it, too.

    Raises:
        BudgetError: from `pop`, when the purse cannot hold one batch.
    """

    def __init__(
        self,
        recipe: Recipe,
        purse: Purse,
        step: int,
        trainer: TrainerMeter | None = None,
        slabs: SlabPool | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._closed = False
        self._without_slabs = False
        self.recipe = recipe
        kinds = {segment.executor for segment in recipe.segments}
        # Forked first: no thread of this engine exists yet.
        self._template = self._fork() if "process" in kinds else None
        self._slabs = slabs or SlabPool()
        buffers = replace(recipe.buffers, lend=self._lend)
        self.account = Account(purse, self._poke)
        self.gate = Gate(self._flow(recipe, buffers.of, step))
        self.segments = [
            self._segment(at, segment, buffers.finish)
            for at, segment in enumerate(recipe.segments)
        ]
        self._rung = self._step_wanted = True
        self._unweighed: Segment | None = None
        for at, segment in enumerate(self.segments):
            self.gate.bells[at].append(partial(self._ring, segment))
        trainer = self.trainer = trainer or TrainerMeter()
        probe = GilProbe()
        self.monitor = Monitor(self.gate, self.segments, trainer, probe, recipe.plan)
        self._mover = Mover(
            self.segments,
            self.monitor,
            trainer,
            probe,
            recipe.cpu_cores,
            self.move,
        )

    def __enter__(self) -> Self:
        """Let the workers begin."""
        for segment in self.segments:
            segment.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def pop(self) -> tuple[Flight, Finished | Failed]:
        """Return the next batch in order; waits until it is ready.

        While it waits, segments that run inline are worked on here.
        """
        gate = self.gate
        flow = gate.flow
        if time.perf_counter_ns() > self._mover.due_ns:
            self._mover.look()
        self._weigh()
        if self.segments[-1].inline is not None and flow.head not in flow.outbox:
            self._step_wanted = self._work_inline()  # nobody else would make it ready
        while True:
            with gate.lock:
                popped = gate.flow.pop(gate.clock())
                if popped is not None:
                    gate.ring()
                    break
                self._check(gate.flow)
                idle = gate.trainer_waits = not (self._rung or self._step_wanted)
                self._rung = False
            self._weigh()
            if idle:
                gate.sleep()
            self._step_wanted = self._work_inline()
        gate.poke_others()
        self._check_budget(popped[0])
        return popped

    def restart(self, step: int, skip: int = 0) -> None:
        """Drop everything in flight and go on at `step`.

        An iterable begins anew, and leaves out its first `skip` samples. Its reader has
        a place in it, so what it still reads for the rows dropped must be read first.
        """
        reader = self.recipe.segments[0].program.operations[0]
        if isinstance(reader, ReadOn):
            while self._hold():
                self.gate.sleep()
            reader.restart(skip)
        with self.gate.lock:
            self.gate.flow.holding = False
            self.gate.flow.restart(step, self.gate.clock())
            self.gate.ring()
        self.gate.poke_others()

    def begin_epoch(self, epoch: int) -> None:
        """An epoch is about to be asked for.

        Where nothing is to outlive an epoch, none of the next one is begun, and workers
        are forked anew: they know the dataset as it is now.
        """
        if self.recipe.options.persistent_workers:
            return
        flow = self.gate.flow
        if flow.until is not None and self._template is not None:
            self._template.renew()
        with self.gate.lock:
            flow.until = self.recipe.plan.first_step(epoch + 1)
            flow.resume()
            self.gate.ring()

    def move(self, segment: Segment, kind: Kind, workers: int | None = None) -> None:
        """Give a segment workers of another kind. For the trainer's thread.

        Nothing drains. Only where it takes the first worker processes, all others pause
        for as long as a fork takes: see `still`.

        Raises:
            SpecError: the segment cannot travel to another process; it stays as it was.
        """
        if kind == "process" and self._template is None:
            with self.still():
                self._template = self._fork()
            if self.gate.flow.closed:  # by another thread, which may have found none
                self._end_template()
                self._check(self.gate.flow)
        segment.move(kind, workers)

    def hold(self, *, still: bool) -> None:
        """Give out no more work, or go on. Batches that are ready may be had."""
        with self.gate.lock:
            if still:
                self.gate.flow.still = True
            else:
                self.gate.flow.resume()
                self.gate.ring()

    @property
    def resting(self) -> bool:
        """Whether nobody is at work."""
        with self.gate.lock:
            return not self._at_work()

    @property
    def steady(self) -> bool:
        """Whether the next batch is there, and no other kind of workers on trial."""
        weighs = self._mover.trying or any(s.undecided for s in self.segments)
        return self.head in self.gate.flow.outbox and not weighs

    @property
    def head(self) -> int:
        """The step that `pop` returns next."""
        return self.gate.flow.head

    def knobs(self) -> tuple[Knob, ...]:
        """Return everything that may be turned."""
        return tuple(knob for segment in self.segments for knob in segment.knobs())

    def close(self) -> None:
        """Stop and join all workers, give back all memory.

        Idempotent in each of its steps: if Ctrl-C cuts it short, it is called again.
        """
        if self._closed or os.getpid() != self._owner:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._slabs.close)
            stack.callback(self._mover.close)
            stack.callback(self._end_template)
            reader = self.recipe.segments[0].program.operations[0]
            if isinstance(reader, ReadOn):
                stack.callback(reader.restart)  # lets go of the iterator
            for segment in self.segments:
                stack.callback(segment.close)
            with self.gate.lock:
                self.gate.flow.close()
                self.gate.ring()
        self.gate.poke_others()
        self._closed = True

    def is_free(self) -> bool:
        """Whether no thread is stuck within a lock of ours; if so, it may be this one.

        The collector may run at any allocation, and with it finalisers, so one that
        wants to close this engine may find itself within a call that holds its lock.
        """
        for lock in (self.gate.lock, self.account.purse.lock, self._slabs.lock):
            if not lock.acquire(timeout=STUCK_S):
                return False
            lock.release()
        return True

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Let nobody work for a while.

        A fork copies the locks of the user's functions as they are, and one that a
        thread holds at that moment stays taken in the copy for ever.
        """
        try:
            while self._stop_all():
                self.gate.sleep()
            yield
        finally:
            self.hold(still=False)

    def _stop_all(self) -> bool:
        """Give out no more work; return whether somebody is still at it."""
        gate = self.gate
        with gate.lock:
            self._check(gate.flow)
            gate.flow.still = True
            gate.trainer_waits = self._at_work()
            return gate.trainer_waits

    def _at_work(self) -> bool:
        """Whether a worker has a lease or a batch in hand. The lock is held."""
        working = any(segment.connector.busy for segment in self.segments)
        return working or self.gate.flow.finishing > 0

    def _hold(self) -> bool:
        """Give the source no more rows; return whether one is still being read."""
        with self.gate.lock:
            self._check(self.gate.flow)
            self.gate.flow.holding = True
            reading = self.gate.trainer_waits = self.gate.flow.reading
        return reading

    def _work_inline(self) -> bool:
        """Work on one lease of a segment that is the trainer's own, the last first."""
        for segment in reversed(self.segments):
            inline = segment.inline
            if inline is not None and inline.step():
                self._unweighed = segment if segment.undecided else None
                return True
        return False

    def _weigh(self) -> None:
        """Judge what was worked on last; where it moves, that takes as long as a fork.

        Not before a batch that is ready is handed over: it is the first, most likely.
        """
        segment, self._unweighed = self._unweighed, None
        if segment is not None and segment.undecided:
            self._mover.weigh(segment)

    def _ring(self, segment: Segment) -> None:
        """A segment may have work: if it is inline, the trainer has to do it."""
        if segment.inline is not None:
            self._rung = True
            self.gate.wake_trainer()

    def _poke(self) -> None:
        self.gate.poke()

    def _check(self, flow: Flow) -> None:
        if self.gate.broken is not None:
            raise self.gate.broken
        if flow.closed:
            text = "this pipeline was closed; iterate it again to start anew"
            raise PenstockError(text)

    def _check_budget(self, flight: Flight) -> None:
        needed = self.account.statistics().batch_bytes
        limit = self.account.purse.limit_bytes
        if needed > limit:
            text = (
                f"the memory budget must hold one batch: {flight.plan.n_rows} samples "
                f"of this pipeline need {needed} bytes on their way, got {limit}; "
                "raise it with set_memory_budget() or make the batch smaller"
            )
            raise BudgetError(text)

    def _end_template(self) -> None:
        if self._template is not None:
            self._template.close()

    def _lend(self, layout: Layout, rows: int) -> tuple[Any, Allocate]:
        """Lend memory for a batch: shared, where processes write its rows.

        Where no more is to be had the rows come through the pipes.
        """
        if self.segments[-1].executor == "process":
            try:
                return self._slabs.lend(layout, rows)
            except OSError as error:
                if not self._without_slabs:
                    LOGGER.warning(NO_SLAB, error)
                self._without_slabs = True
        return self.recipe.buffers.lend(layout, rows)

    def _fork(self) -> Template:
        programs = {at: each.program for at, each in enumerate(self.recipe.segments)}
        method = self.recipe.options.multiprocessing_context
        return Template(programs, self.recipe.seed, method)

    def _flow(
        self, recipe: Recipe, buffer_of: Callable[[BatchPlan], Buffer], step: int
    ) -> Flow:
        now_ns = time.perf_counter_ns()
        states = [
            SegmentState(step, segment.prefetch_size, 1, Gauge(1, now_ns))
            for segment in recipe.segments
        ]
        return Flow(recipe.plan, buffer_of, states, self.account, step)

    def _segment(
        self,
        at: int,
        recipe: SegmentRecipe,
        finish: Callable[[Flight], Finished | Failed],
    ) -> Segment:
        connector = Connector(self.gate, at, finish, len(recipe.program.operations))
        cores = max(1, round(self.recipe.cpu_cores))

        def children() -> Processes:
            assert self._template is not None
            return Processes(connector, recipe, self._template, self._slabs, cores)

        seed = self.recipe.seed
        return Segment(
            recipe, connector, partial(hire, connector, recipe, seed, children)
        )

    def __repr__(self) -> str:
        return f"<Engine {'closed' if self._closed else self.gate.flow}>"
