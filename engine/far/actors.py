"""Ray actors as workers: for work that outgrows one machine.

One thread in the trainer serves all actors of a segment. It never waits for a lease, an
actor or the cluster: the engine lock wakes it when there may be work, Ray's futures
when work is done or an actor is gone, and its own timer. An actor is a worker: it works
on one lease, while a short second one waits at it.

A lease is settled once, whatever arrives late. Actors are placed by Ray, and may have
to wait for room; the pool works with those that have come up. If the cluster's head is
silent, or no actor comes up, all leases return, and the segment's workers run on this
machine from then on.
"""

from __future__ import annotations

import logging
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import Any

import numpy as np

from ...errors import SampleError, WorkerError
from ..core.chunk import Lease, Outcome
from ..core.connector import Connector
from ..core.core import FAR_LEASE_NS
from ..core.metrics import WorkerMeter
from ..recipe import Recipe, SegmentRecipe
from ..workers.pool import Holding, PoolStatistics, join_all
from .actor import Actor
from .assignment import Result
from .child import Errand
from .cluster import RayCluster
from .far_pool import NEVER_BEGUN, FarPool, with_data
from .handover import restored
from .parcel import pack

__all__ = [
    "ActorPool",
]

LOGGER = logging.getLogger("penstock")
TICK_S = 1.0
"""Longest wait of the pool's thread."""
AHEAD_NS = 100_000_000
"""Leases longer than this do not wait behind one another."""
SILENT_S = 20.0
"""How long the head of the cluster may be silent: after 60 s Ray ends the program."""
ALONE_S = 60.0
"""How long a segment may be without any actor, in seconds."""
INSTALL_S = 600.0
"""How long, if Ray may have to install packages for its actors first."""
PLACED_S = 15.0
"""An actor that has not come up after this waits for room."""
LOST = (
    "%s: %s. Workers of this machine go on in place of its actors; no sample is lost or"
    " repeated"
)
FEWER = (
    "%s: the Ray cluster has placed %d of %d actors so far. Work goes on with"
    " these; the others join when there is room"
)
BEGIN = 0
"""The number of an actor's first task."""


@dataclass(slots=True, eq=False)
class RemoteActor:
    """An actor, seen from the trainer. It belongs to the pool's thread."""

    handle: Any
    number: int
    generation: int
    asked_s: float
    """When it was created, on the monotonic clock."""
    meter: WorkerMeter | None = None
    """Its instrument, once it is at work."""
    where: str = "(starting)"
    """Which process it is, in words."""
    errands: dict[int, Errand] = field(default_factory=dict)
    """What it was sent, by task; it works on the first."""
    settled: bool = False
    """Whether it has returned a task."""


Arrival = tuple[RemoteActor, int, Any]
"""An actor, the number of its task, and the future that is done."""


class ActorPool(FarPool):
    """A number of workers in Ray actors.

    Args:
        connector: where leases come from.
        work: what the actors work by, and the segment's recipe.
        cluster: where the actors live.
        engine: has joined the cluster, and this is the pool of one of its stages.
        seeds: the seed of the samples' random streams, and what distinguishes this run
            from others with the same seed.
        options: Ray's options for each actor.
        collate_seed: as `seed` for `FarPool`.

    Raises:
        SpecError: something in the program cannot be sent.
    """

    executor = "ray"

    def __init__(
        self,
        connector: Connector,
        work: tuple[Recipe, SegmentRecipe],
        cluster: RayCluster,
        engine: object,
        seeds: tuple[int, ...],
        options: Mapping[str, Any],
        collate_seed: Callable[[], int],
    ) -> None:
        import ray

        super().__init__(connector, work[1], "Ray actors", collate_seed)
        self._sent = work
        self._ray = ray
        self._cluster = cluster
        self._seeds = *seeds, connector.segment
        self._options = dict(options)
        self._made: Counter[int] = Counter()
        """Actors created so far, by number."""
        self._generation = 0
        self._parcel = self._pack()
        self._class = ray.remote(**options)(Actor)
        self._wanted = 0
        """How many of the requested actors it may have."""
        self._actors: list[RemoteActor] = []
        self._idle: list[RemoteActor] = []
        """Actors without a lease; the last one has waited the shortest."""
        self._arrivals: deque[Arrival] = deque()
        self._tasks = count(BEGIN + 1)
        self._alone_since_s = time.monotonic()
        """Since when no actor has been at work, in seconds; infinity while one is."""
        self._short_told = False
        cluster.begin(engine, self)
        self._start()

    def leases(self, workers: int) -> Holding:
        """Return what leases so many actors hold: one may wait at each."""
        return Holding(2 * workers, FAR_LEASE_NS, workers)

    def statistics(self) -> PoolStatistics:
        """Return the numbers of workers."""
        actors, now_s = list(self._actors), time.monotonic()
        alive = sum(actor.meter is not None for actor in actors)
        starting = sum(
            actor.meter is None and now_s - actor.asked_s < PLACED_S for actor in actors
        )
        fresh = sum(bool(actor.errands) and not actor.settled for actor in actors)
        most = self._cluster.room(self, self._options)
        return PoolStatistics(alive, starting + fresh, most)

    def threads(self) -> list[str]:
        """Return none: they are in other processes, perhaps on other machines."""
        return []

    def renew(self) -> None:
        """Replace all actors: the dataset may have changed. For the trainer's thread.

        Raises:
            SpecError: something in the program cannot be sent.
        """
        if not self._thread.is_alive():
            return  # others have taken over
        self._parcel = self._pack()
        self._generation += 1
        with self._engine_lock.lock:
            self._wakeup.notify()

    def close(self, until_s: float = inf) -> list[str]:
        """Wait until the thread has ended, and Ray with it if it was ours.

        A pool that others take over from does not wait for Ray, which may take seconds.
        """
        stuck = join_all([self._thread], until_s)
        if until_s < inf:
            self._cluster.wait_ended(until_s - time.monotonic())
        return stuck

    def _pack(self) -> Any:
        """Put the program into the object store, from where each node gets it once."""
        body = pack(self._sent, "work", 'executor="process"')
        return self._ray.put(np.frombuffer(body, np.uint8))

    def _arrived(self, actor: RemoteActor, task: int, future: Any) -> None:
        """Note that a task is done. Ray calls this, from a thread of its own."""
        self._arrivals.append((actor, task, future))
        with self._engine_lock.lock:
            self._wakeup.notify()

    # The pool's thread

    def _serve(self) -> None:
        waiting = select.poll()
        waiting.register(self._wakeup.fileno(), select.POLLIN)
        while not self._engine_lock.closed:
            lost = self._lost()
            if lost is not None:
                self._fall_back(lost)
                return
            try:
                self._staff()
                if self._leaving and not self._actors:
                    return
                self._hand_out()
            except Exception:
                if self._cluster.connected:
                    raise
                continue  # Ray was shut down meanwhile, and refuses everything
            if waiting.poll(1000 * TICK_S):
                self._wakeup.clear()
            while self._arrivals and not self._engine_lock.closed:
                self._hear(*self._arrivals.popleft())

    def _lost(self) -> str | None:
        """Return why its actors are out of reach for good, or None."""
        if not self._cluster.connected:
            return "Ray was shut down"
        if self._cluster.silent_s >= SILENT_S:
            return f"the head of the Ray cluster has been silent for {SILENT_S:.0f} s"
        limit_s = INSTALL_S if "runtime_env" in self._options else ALONE_S
        if self._asked and time.monotonic() - self._alone_since_s >= limit_s:
            return f"the Ray cluster has placed no actor for {limit_s:.0f} s"
        return None

    def _fall_back(self, why: str) -> None:
        LOGGER.warning(LOST, self._stage, why)
        for actor in list(self._actors):
            self._remove(actor)
        self._connector.on_lost(why)

    def _staff(self) -> None:
        """Adjust the number of actors to the request, as far as they are idle."""
        with self._engine_lock.lock:
            asked = self._asked
        self._wanted = self._cluster.share(self, asked, self._options)
        for actor in list(self._actors):
            surplus = len(self._actors) > self._wanted
            if not actor.errands and (surplus or self._outdated(actor)):
                self._remove(actor)
        heard = self._cluster.silent_s < SILENT_S / 2
        while len(self._actors) < self._wanted and heard:
            self._create()
        self._tell_short()

    def _outdated(self, actor: RemoteActor) -> bool:
        return actor.generation != self._generation

    def _tell_short(self) -> None:
        """Say once that some actors wait for room."""
        now_s = time.monotonic()
        late = [a for a in self._actors if not a.meter and now_s - a.asked_s > PLACED_S]
        if late and not self._short_told:
            self._short_told = True
            placed = sum(actor.meter is not None for actor in self._actors)
            LOGGER.warning(FEWER, self._stage, placed, self._wanted)

    def _create(self) -> None:
        taken = {actor.number for actor in self._actors}
        number = next(n for n in count() if n not in taken)
        before, self._made[number] = self._made[number], self._made[number] + 1
        handle = self._class.remote(self._parcel, (*self._seeds, before), number)
        actor = RemoteActor(handle, number, self._generation, time.monotonic())
        self._actors.append(actor)
        self._follow(actor, BEGIN, handle.begin.remote())

    def _follow(self, actor: RemoteActor, task: int, result: Any) -> None:
        """Be woken when a task is done."""
        result.future().add_done_callback(partial(self._arrived, actor, task))

    def _remove(self, actor: RemoteActor) -> None:
        """End an actor, or forget a dead one; its leases return to the front."""
        self._actors.remove(actor)
        if actor in self._idle:
            self._idle.remove(actor)
        errands = list(actor.errands.values())
        actor.errands.clear()
        if actor.meter is not None:
            for errand in errands:
                self._connector.settle(errand.lease, Outcome(done=0), actor.meter)
            self._connector.leave(actor.meter)
        if not any(each.meter for each in self._actors):
            self._alone_since_s = min(self._alone_since_s, time.monotonic())
        self._kill(actor)

    def _kill(self, actor: RemoteActor) -> None:
        """Kill an actor, if it can be reached: otherwise its end is Ray's to notice."""
        if self._cluster.connected and self._cluster.silent_s < SILENT_S / 2:
            with suppress(Exception):  # Ray may be shut down at this very moment
                self._ray.kill(actor.handle)

    # Leases

    def _hand_out(self) -> None:
        """Give leases to idle actors, then ahead to busy ones, while there are any.

        It starts listening before it looks, so that work arriving later wakes it.
        """
        self._listening = True
        for actor in reversed(list(self._idle)):
            assert actor.meter is not None
            waited = actor.meter.waiting_for is not None
            lease = self._take(actor.meter)
            if lease is not None:
                self._idle.remove(actor)
                self._send(actor, lease, actor.meter)
            elif waited:
                return  # and so do the actors before it
        self._listening = bool(self._idle) or self._hand_ahead()

    def _hand_ahead(self) -> bool:
        """Give leases to wait at actors; return whether they could hold more."""
        leaving = len(self._actors) > self._wanted or any(
            map(self._outdated, self._actors)
        )
        if self._blame or leaving or self._lease_ns >= AHEAD_NS:
            return False  # a suspect runs alone, and who is to leave must become idle
        for actor in self._actors:
            meter = actor.meter
            if meter is None or len(actor.errands) != 1:
                continue
            lease = self._take(meter)
            if lease is None:
                return True
            self._send(actor, lease, meter)
        return False

    def _send(self, actor: RemoteActor, lease: Lease, meter: WorkerMeter) -> None:
        try:
            chunk, assignment = self._assignment(lease)
        except Exception as error:  # noqa: BLE001 whatever pickling user data raises
            self._give_up(lease, meter, self._unsendable(error))
            self._free(actor)
            return
        task = next(self._tasks)
        actor.errands[task] = Errand(lease, chunk, time.monotonic_ns())
        self._follow(actor, task, actor.handle.run.remote(assignment))

    def _free(self, actor: RemoteActor) -> None:
        """Note that a lease of this actor was settled."""
        if not actor.errands and actor in self._actors:
            self._idle.append(actor)

    def _hear(self, actor: RemoteActor, task: int, future: Any) -> None:
        """Handle a task that is done, or has failed."""
        if actor not in self._actors or future.cancelled():
            return  # it was ended, and its leases given back, or Ray was shut down
        error = future.exception()
        if error is None and task == BEGIN:
            self._welcome(actor, future.result())
        elif error is None:
            self._take_back(actor, task, future.result())
        else:
            self._reap(actor, error)

    def _welcome(self, actor: RemoteActor, where: str) -> None:
        actor.where, actor.meter = where, self._connector.enter()
        self._alone_since_s = inf
        self._idle.append(actor)

    def _take_back(self, actor: RemoteActor, task: int, packed: Any) -> None:
        errand = actor.errands.pop(task)
        actor.settled, meter = True, actor.meter
        assert meter is not None
        try:
            result: Result = restored(packed)
        except Exception as error:  # noqa: BLE001 whatever unpickling user objects raises
            text = (
                f"a sample made by {self._stage} cannot be received from a Ray actor "
                f"({type(error).__name__}: {error}); return arrays, tensors, numbers, "
                'text or bytes, or use executor="thread"'
            )
            self._give_up(errand.lease, meter, SampleError(text))
        else:
            outcome = with_data(result, result.sent)
            self._settle(errand.lease, errand.chunk, outcome, meter)
        self._free(actor)

    def _reap(self, actor: RemoteActor, error: BaseException) -> None:
        """Handle the end of an actor: its work returns to the front.

        Raises:
            WorkerError: too many actors have died with no work done in between, or what
                they run fails.
        """
        own = isinstance(error, self._ray.exceptions.RayTaskError)
        if own and actor.errands:
            raise WorkerError(f"a Ray actor of {self._stage} failed: {error}")
        death = f"Ray actor {actor.where} has ended: {told(error)}"
        keys: list[Any] = []
        for errand in list(actor.errands.values())[:1]:
            rows = range(len(errand.chunk))
            keys = [self._key(errand.chunk, row) for row in rows]
            self._blame.add(errand.chunk, rows, death)
        # With its node, an actor at work loses results, too: that is no RayActorError.
        died = isinstance(error, self._ray.exceptions.RayActorError)
        died = died or actor.meter is not None
        self._remove(actor)
        self._count_death(death, keys, 1 if died else NEVER_BEGUN)

    def _end_all(self) -> None:
        for actor in self._actors:
            if actor.meter is not None:
                self._connector.leave(actor.meter)
            self._kill(actor)
        self._actors, self._idle = [], []
        self._cluster.leave(self)


def told(error: BaseException) -> str:
    """Return what happened, in one line: Ray's messages are long."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause).__name__}: {cause}" if cause else str(error)
    text = " ".join(text.split())
    for start in ("The actor died because ", "The actor is dead because "):
        text = text.partition(start)[2] or text
    for end in (" Some common causes", " The actor never ran"):
        text = text.partition(end)[0]
    return text[:MAX_TOLD]


MAX_TOLD = 600
"""Characters of Ray's messages that are shown."""
