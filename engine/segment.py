"""Segments at run time: their workers, their knobs, and the batches that they make.

Segments after the one that places rows get one batch at a time, in any order. The first
of them may be the user's `collate_fn`. It runs in the trainer's thread, one batch after
another, until it has proved to keep no state, and workers that make whole batches call
it themselves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import NOTE, add_note
from ..system.forking import FORKS
from ..system.run_queue import RunQueue
from ..system.wakeup import weakly
from .batch.buffer import FailedBatch, Finished, Gathered
from .core.connector import Connector
from .core.core import Core, Gauge, SegmentState
from .core.in_flight import Chunk, Failure, InFlightBatch, Onward, Reservations
from .observe.observation import Knob, Move, MoveOutcome, Restriction
from .plan import AssignedPlan, BatchPlan
from .program.operations import Collate
from .program.randomness import SampleRandom
from .recipe import Recipe, SegmentRecipe
from .witness.hazards import Finding
from .witness.witness import Witness
from .workers import Coroutines, Inline, Kind, Threads, Watches, WorkerPool, no_watch

Made = Onward | Finished | Gathered | FailedBatch

# Kinds of workers in other processes.
FAR = ("process", "ray")
# Moves that are remembered.
MAX_MOVES = 16
UNSURE = "it is not known yet whether its data changes while samples are made"
# Upper bound of a prefetch size, in batches; the memory budget binds long before.
MAX_PREFETCH = 128


class Segment:
    """One segment of a running engine.

    Its workers may be replaced by another kind while it runs: the new ones take leases
    from the same connector, and the old ones leave after finishing theirs. Only the
    trainer's thread does this; other threads may set knobs.

    Args:
        recipe: what it is.
        connector: hands out its work.
        make_pool: creates its workers, of one kind.
        alone: whether no other segment makes samples. Several move to processes
            together, which is not theirs to do.
    """

    def __init__(
        self,
        recipe: SegmentRecipe,
        connector: Connector,
        make_pool: Callable[[Kind], WorkerPool],
        *,
        alone: bool = True,
    ) -> None:
        self.recipe, self.connector = recipe, connector
        # Whether it runs inline until it has shown what a batch costs.
        self.undecided = recipe.executor == "auto"
        # Why it may not become another kind; empty if it may.
        self.stays = recipe.stays
        self._alone = alone
        looks = (
            self.undecided
            or not recipe.stays
            or recipe.program.watched
            or recipe.per_batch
        )
        # What is known of what its samples come from.
        self.witness = Witness(recipe.subjects if looks else ())
        # What changes in the copy of the only worker.
        self._changes_there = ""
        # The kind that the knob requests; the trainer's thread moves it.
        self._wanted_kind: Kind | None = None
        self._make_pool = make_pool
        # Guards `pool`, `_target` and `_wanted_kind`; a leaving pool is not resized.
        self._lock = threading.Lock()
        self._target, self._prefetch = recipe.num_parallel_workers, recipe.prefetch_size
        # Its present workers.
        self.pool = make_pool(
            "inline" if recipe.executor == "auto" else recipe.executor
        )
        self._leaving: list[WorkerPool] = []
        self.run_queue = RunQueue(weakly(self._threads))
        # The latest moves between kinds of workers, and their reasons.
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)
        connector.on_look = weakly(self._hear_of_copy)
        connector.on_lost = weakly(self._come_home)
        self._tell_core()

    @property
    def executor(self) -> Kind:
        """The present kind of its workers."""
        return self.pool.executor

    @property
    def moving(self) -> bool:
        """Whether another kind is requested, or workers of the previous one remain."""
        return self._wanted_kind is not None or bool(self._leaving)

    @property
    def inline(self) -> Inline | None:
        """Its pool, if that is the trainer itself."""
        return self.pool if type(self.pool) is Inline else None  # fast, for each batch

    def _threads(self) -> list[str]:
        return self.pool.threads()

    @property
    def num_parallel_workers(self) -> int:
        """Number of requested workers; inline there is one, the trainer."""
        return 1 if self.pool.executor == "inline" else self._target

    @property
    def prefetch_size(self) -> int:
        """Batches it may work ahead of its consumer."""
        return 1 if self.inline else self._prefetch

    def start(self) -> None:
        """Start the workers."""
        self.pool.resize(self._target)

    def _set_workers(self, count: int) -> None:
        """Request `count` workers; takes effect while work goes on."""
        with self._lock:
            self.pool.resize(count)  # first: it may be refused
            self._target = count
        self._tell_core()

    def _set_prefetch(self, batches: int) -> None:
        """Let it work this many batches ahead."""
        self._prefetch = batches
        self._tell_core()

    def move(self, kind: Kind) -> None:
        """Give the work to workers of another kind; returns at once, nothing drains."""
        with self._lock:
            before, self.pool = self.pool, self._make_pool(kind)
            self._leaving.append(before)
            self.pool.resize(self._target)
            before.retire()
        self._tell_core()

    def settled(self) -> bool:
        """Whether all workers of the previous kind have left; forgets those."""
        for pool in [pool for pool in self._leaving if not pool.statistics().alive]:
            pool.close()
            self._leaving.remove(pool)
        return not self._leaving

    def close(self, until_s: float, stuck: list[str]) -> None:
        """Stop the workers and wait for them. The engine lock is closed already.

        Args:
            until_s: when to stop waiting, on the monotonic clock.
            stuck: receives the names of threads that have not ended by then.
        """
        for pool in (self.pool, *self._leaving):
            stuck += pool.close(until_s)

    def knobs(self) -> Iterable[Knob]:
        """Return what may be changed while it runs; inline there is nothing."""
        if self.inline is not None:
            return
        recipe, why = self.recipe, self._why_alone()
        low, high = recipe.bounds
        high = 1 if why else max(low, min(high, self.pool.statistics().most))
        restriction = "" if why in ("", UNSURE) else Restriction.ALONE.format(why)
        yield Knob(
            operator=recipe.name,
            name="num_parallel_workers",
            lower=low,
            upper=high,
            tunable=recipe.tunable and low < high,
            read=lambda: self.num_parallel_workers,
            write=self._set_workers,
            held=restriction if recipe.tunable else Restriction.PINNED,
        )
        yield Knob(
            operator=recipe.queue_name,
            name="prefetch_size",
            lower=1,
            upper=MAX_PREFETCH,
            tunable=recipe.tunable,
            read=lambda: self.prefetch_size,
            write=self._set_prefetch,
        )
        apart = recipe.thread_safe and recipe.timeout_s is None
        if self._alone and apart and not self.stays:
            yield Knob(
                operator=recipe.name,
                name="executor",
                lower=0,
                upper=0,
                tunable=recipe.tunable,
                read=lambda: self._wanted_kind or self.executor,
                write=self._want,
                choices=("thread", "process"),
            )

    def _why_alone(self) -> str:
        """Return why a single requested worker must stay alone, at least for now."""
        if not self.recipe.program.watched:
            return ""
        if self.executor in FAR:
            return self._changes_there or (
                "" if self.witness.sure_elsewhere else UNSURE
            )
        return self.witness.verdict("thread").partition(";")[0]

    def _hear_of_copy(self, path: str) -> None:
        """Keep the only worker alone once the data changes in it."""
        if not self.witness.hear(path):
            return
        why = self._changes_there = Restriction.CHANGES_THERE.format(path)
        note(self, self.executor, "stays", Restriction.ALONE.format(why))
        if self._target > 1:
            self._set_workers(1)

    def _come_home(self, why: str) -> None:
        """Request workers of this machine, as those elsewhere are out of reach."""
        kind: Kind = "process" if FORKS else "thread"
        note(self, kind, "moved", why)
        self._want(kind)

    def take_wanted(self) -> Kind | None:
        """Return the kind that the knob requests, once; None if there is no request."""
        with self._lock:
            kind, self._wanted_kind = self._wanted_kind, None
        return kind

    def _want(self, kind: Kind | None) -> None:
        """Request another kind; a trainer that waits for a batch follows at once.

        None takes a request back.
        """
        with self._lock:
            self._wanted_kind = kind
        with self.connector.engine_lock.lock:
            self.connector.engine_lock.wake_trainer()

    def request(self, kind: Kind, workers: int) -> None:
        """Request workers of a kind; the trainer's thread follows if it is another."""
        self._set_workers(workers)
        self._want(None if kind == self.executor else kind)

    def _tell_core(self) -> None:
        engine_lock, at = self.connector.engine_lock, self.connector.segment
        with engine_lock.lock:
            holding = self.pool.leases(self.num_parallel_workers)
            # Inline, the trainer works on demand, on the batch it asks for.
            engine_lock.core.set_workers(at, *holding, inline=self.inline is not None)
            engine_lock.core.set_prefetch(at, self.prefetch_size)
            engine_lock.wake()


def note(
    segment: Segment, new: str, outcome: MoveOutcome, reason: str, old: str = ""
) -> None:
    """Record a change of kind, from `old` or the present one, or why there was none."""
    name, old = segment.recipe.name, old or segment.executor
    segment.moves.append(Move(name, old, new, outcome, reason))


def as_now(segments: Iterable[Segment]) -> tuple[SegmentRecipe, ...]:
    """Return recipes that start in the present state of these segments."""
    return tuple(
        replace(
            segment.recipe,
            executor=segment.executor,
            num_parallel_workers=segment.num_parallel_workers,
            prefetch_size=segment.prefetch_size,
        )
        for segment in segments
    )


def core_of(recipe: Recipe, reservations: Reservations, step: int) -> Core:
    """Return the core of an engine that runs a recipe from a step on."""
    now_ns = time.perf_counter_ns()
    alone = sum(not segment.per_batch for segment in recipe.segments) == 1
    dealt = isinstance(recipe.plan, AssignedPlan) or recipe.repack
    collate, by_workers = recipe.buffers.collate, recipe.buffers.by_workers
    makes = alone and not dealt and (collate is None or by_workers)
    states = [
        SegmentState(
            step,
            segment.prefetch_size,
            1,
            Gauge(1, now_ns),
            per_batch=segment.per_batch,
            in_order=segment.in_order,
            unsplit=segment.unsplit,
            least=segment.program.least,
            ahead=not segment.per_batch,
            collates=makes and at == 0,
            divides=not by_workers,
        )
        for at, segment in enumerate(recipe.segments)
    ]
    return Core(
        plan=recipe.plan,
        buffer_of=recipe.buffers.open,
        segments=states,
        reservations=reservations,
        head=step,
    )


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
        self._buffers, self._looked = recipe.buffers, False
        self._collates, self._judge = collates, judge
        # Inline segments that have made no batch yet.
        self._unknown = {
            at
            for at, segment in enumerate(segments)
            if segment.per_batch and segment.executor in ("auto", "inline")
        }
        self._first = sum(not segment.per_batch for segment in segments)
        for segment in segments:
            (operation, *_) = segment.program.operations
            if isinstance(operation, Collate):
                operation.apart = isinstance(recipe.plan, AssignedPlan)

    def finisher(self, at: int) -> Callable[[InFlightBatch], Made]:
        """Return the function to call on a batch when segment `at` has finished it."""
        return partial(self._worked, at) if at >= self._first else self._filled

    def _filled(self, in_flight: InFlightBatch) -> Made:
        """Handle a batch whose rows are all finished, or have failed."""
        batch = self._buffers.finish(in_flight)
        if not in_flight.whole:
            return batch
        if self._first == len(self._segments) or isinstance(batch, FailedBatch):
            return self._pinned(in_flight, batch)
        in_flight.substituted = batch.failures
        if isinstance(batch, Gathered):
            return Onward(self._first, batch)
        in_flight.buffer.let_go()
        return Onward(self._first + self._segments[self._first].in_order, batch.data)

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
            collate = self._segments[at].program.operations[0]
            assert isinstance(collate, Collate)
            if collate.calls.keeps:
                self._unknown.discard(at)
            elif not self._looked:
                self._looked = True
                self._collates()
        if isinstance(data, FailedBatch):
            return data
        if at in self._unknown:
            self._unknown.remove(at)
            self._judge(at, data)
        if at + 1 < len(self._segments):
            return Onward(at + 1, data)
        return self._pinned(in_flight, Finished(data, in_flight.substituted))

    def _pinned(self, in_flight: InFlightBatch, batch: Made) -> Made:
        """Move a batch that is made to pinned memory, if it belongs there."""
        buffers = self._buffers
        if buffers.pin is None or buffers.keep or not isinstance(batch, Finished):
            return batch
        data = buffers.pin(batch.data)
        if data is batch.data:
            return batch
        in_flight.buffer.let_go()
        in_flight.made = None
        return replace(batch, data=data)


def batch_error(failure: Failure, plan: BatchPlan) -> BaseException:
    """Return a function's exception, with a note that identifies the batch."""
    add_note(
        failure.error,
        f"{NOTE}{failure.stage}, the batch of epoch {plan.epoch}, step {plan.step}",
    )
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
    chunk = Chunk(plan.step, 0, nothing, nothing, context=plan.ctx)
    random = SampleRandom(recipe.seed)
    for segment in recipe.batch_work:
        outcome = segment.program.run(chunk, [data], None, random)
        if outcome.failures:
            raise batch_error(outcome.failures[0], plan)
        (data,) = outcome.outputs or [None]
    return data


class PoolMaker:
    """Makes pools. Others may have workers elsewhere, too, and own what these share.

    Args:
        recipe: the engine's recipe.
        begun_at: the first batch wanted.
        watch: makes what observes the samples of a worker; it may return None.
    """

    def __init__(
        self, recipe: Recipe, begun_at: int, watch: Watches = no_watch
    ) -> None:
        self._recipe, self._begun_at, self._watch = recipe, begun_at, watch

    @staticmethod
    def opened_late(recipe: Recipe, step: int) -> Mapping[int, Finding]:  # noqa: ARG004 others look
        """Return what threads must not share once samples are made, by segment."""
        return {}

    def begin(self) -> None:
        """Start what the pools share, before the engine has threads.

        The caller must `close`, also after an error.

        Raises:
            SpecError: workers elsewhere cannot be started.
        """

    def make(
        self, connector: Connector, recipe: SegmentRecipe, kind: Kind
    ) -> WorkerPool:
        """Create a pool of one kind, without workers yet.

        Args:
            connector: where they take their leases.
            recipe: the segment's recipe.
            kind: kind of the workers.

        Raises:
            SpecError: this system has no such workers, or the program cannot be sent
                to them.
        """
        program, seed, name = recipe.program, self._recipe.seed, recipe.name
        match kind:
            case "inline":
                return Inline(connector, program, seed, self._watch)
            case "thread":
                return Threads(connector, program, seed, name=name, watch=self._watch)
            case "async":
                return Coroutines(connector, program, seed, name, recipe.timeout_s)
        raise AssertionError(kind)

    @property
    def forked(self) -> bool:
        """Whether there is a fork server."""
        return False

    def fork(self) -> None:
        """Start the fork server, while nobody works: a fork copies locks as they are.

        Raises:
            SpecError: a segment cannot be sent to another process, or this system has
                no fork.
        """

    def expire(self) -> None:
        """Let worker processes end; none start until `renew`."""

    def renew(self) -> None:
        """Replace all workers in other processes: the dataset may have changed.

        Raises:
            SpecError: something in the programs can no longer be sent.
        """

    def close(self) -> None:
        """End what the pools share."""
