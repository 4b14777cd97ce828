"""A segment at run time: its connector, its present workers, and its knobs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..system.forking import FORKS
from ..system.run_queue import RunQueue
from ..system.wakeup import weakly
from .core.byte_budget import Reservations
from .core.connector import Connector
from .core.core import Core, SegmentState
from .core.metrics import Gauge
from .observe.knob import Knob, Restriction
from .observe.observation import Move, MoveOutcome
from .plan import AssignedPlan
from .recipe import Recipe, SegmentRecipe
from .witness.witness import Witness
from .workers.inline import Inline
from .workers.pool import Kind, WorkerPool

MakePool = Callable[[Kind], WorkerPool]
"""Creates the pool of one kind for this segment."""

FAR = ("process", "ray")
"""Kinds of workers in other processes."""
MAX_MOVES = 16
"""Moves that are remembered."""
UNSURE = "it is not known yet whether its data changes while samples are made"
MAX_PREFETCH = 128
"""Upper bound of a prefetch size, in batches; the memory budget binds long before."""


class Segment:
    """One segment of a running engine.

    Its workers may be replaced by another kind while it runs: the new ones take leases
    from the same connector, and the old ones leave after finishing theirs. Only the
    trainer's thread does this; other threads may set knobs.

    Args:
        recipe: what it is.
        connector: hands out its work.
        make_pool: creates its workers.
        alone: whether no other segment makes samples. Several move to processes
            together, which is not theirs to do.
    """

    def __init__(
        self,
        recipe: SegmentRecipe,
        connector: Connector,
        make_pool: MakePool,
        *,
        alone: bool = True,
    ) -> None:
        self.recipe = recipe
        self.connector = connector
        self.undecided = recipe.executor == "auto"
        """Whether it runs inline until it has shown what a batch costs."""
        self.stays = recipe.stays
        """Why it may not become another kind; empty if it may."""
        self._alone = alone
        moves = self.undecided or not recipe.stays
        looks = moves or recipe.program.watched or recipe.per_batch
        self.witness = Witness(recipe.subjects if looks else ())
        """What is known of what its samples come from."""
        self._changes_there = ""
        """What changes in the copy of the only worker."""
        # The kind that the knob requests; the trainer's thread moves it.
        self._wanted: Kind | None = None
        self._make_pool = make_pool
        # Guards `pool`, `_asked` and `_wanted`: a pool that leaves is not resized.
        self._lock = threading.Lock()
        self._asked = recipe.num_parallel_workers
        self._prefetch = recipe.prefetch_size
        start: Kind = "inline" if recipe.executor == "auto" else recipe.executor
        self.pool = make_pool(start)
        """Its present workers."""
        self._leaving: list[WorkerPool] = []
        self.run_queue = RunQueue(weakly(self._threads))
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)
        """The latest moves between kinds of workers, and their reasons."""
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
        return self._wanted is not None or bool(self._leaving)

    @property
    def inline(self) -> Inline | None:
        """Its pool, if that is the trainer itself."""
        return self.pool if type(self.pool) is Inline else None  # fast, for each batch

    def _threads(self) -> list[str]:
        return self.pool.threads()

    @property
    def num_parallel_workers(self) -> int:
        """Number of requested workers; inline there is one, the trainer."""
        return 1 if self.pool.executor == "inline" else self._asked

    @property
    def prefetch_size(self) -> int:
        """Batches it may work ahead of its consumer."""
        return 1 if self.inline else self._prefetch

    def start(self) -> None:
        """Start the workers."""
        self.pool.resize(self._asked)

    def _set_workers(self, count: int) -> None:
        """Request `count` workers; takes effect while work goes on."""
        with self._lock:
            self._asked = count
            self.pool.resize(count)
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
            self.pool.resize(self._asked)
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
        recipe = self.recipe
        low, high = recipe.bounds
        if self.inline is not None:
            return
        why = self._why_alone()
        most = self.pool.statistics().most
        high = 1 if why else max(low, min(high, most))
        yield Knob(
            recipe.name,
            "num_parallel_workers",
            low,
            high,
            recipe.tunable and low < high,
            lambda: self.num_parallel_workers,
            self._set_workers,
            held=_held(why) if recipe.tunable else Restriction.PINNED,
        )
        yield Knob(
            recipe.queue_name,
            "prefetch_size",
            1,
            MAX_PREFETCH,
            recipe.tunable,
            lambda: self.prefetch_size,
            self._set_prefetch,
        )
        apart = recipe.thread_safe and recipe.timeout_s is None
        if self._alone and apart and not self.stays:
            yield Knob(
                recipe.name,
                "executor",
                0,
                0,
                recipe.tunable,
                lambda: self._wanted or self.executor,
                self._want,
                choices=("thread", "process"),
            )

    def _why_alone(self) -> str:
        """Return why a single requested worker must stay alone, at least for now."""
        if not self.recipe.program.watched:
            return ""
        if self.executor in FAR:
            why = self._changes_there
            return why or ("" if self.witness.sure_elsewhere else UNSURE)
        why, _, _ = self.witness.verdict("thread").partition(";")
        return why

    def _hear_of_copy(self, path: str) -> None:
        """Keep the only worker alone once the data changes in it."""
        if not self.witness.hear(path):
            return
        why = self._changes_there = Restriction.CHANGES_THERE.format(path)
        note(self, self.executor, "stays", Restriction.ALONE.format(why))
        if self._asked > 1:
            self._set_workers(1)

    def _come_home(self, why: str) -> None:
        """Request workers of this machine, as those elsewhere are out of reach."""
        kind: Kind = "process" if FORKS else "thread"
        note(self, kind, "moved", why)
        self._want(kind)

    def take_wanted(self) -> Kind | None:
        """Return the kind that the knob requests, once; None if there is no request."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
        return wanted

    def _want(self, kind: Kind) -> None:
        """Request another kind; a trainer that waits for a batch follows at once."""
        with self._lock:
            self._wanted = kind
        with self.connector.engine_lock.lock:
            self.connector.engine_lock.wake_trainer()

    def request(self, kind: Kind, workers: int) -> None:
        """Request workers of a kind; the trainer's thread follows if it is another."""
        self._set_workers(workers)
        if kind != self.executor:
            self._want(kind)

    def _tell_core(self) -> None:
        engine_lock, at = self.connector.engine_lock, self.connector.segment
        with engine_lock.lock:
            held = self.pool.leases(self.num_parallel_workers)
            # Inline, the trainer works on demand, on the batch it asks for.
            inline = self.inline is not None
            engine_lock.core.set_workers(at, *held, inline=inline)
            engine_lock.core.set_prefetch(at, self.prefetch_size)
            engine_lock.wake()


def _held(why: str) -> str:
    """Return what keeps a worker alone, if that may last, and what would not."""
    return Restriction.ALONE.format(why) if why not in ("", UNSURE) else ""


def note(
    segment: Segment, new: str, outcome: MoveOutcome, reason: str, old: str = ""
) -> None:
    """Record a change of kind, from `old` or the present one, or why there was none."""
    before = old or segment.executor
    segment.moves.append(Move(segment.recipe.name, before, new, outcome, reason))


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
    return Core(recipe.plan, recipe.buffers.open, states, reservations, step)
