"""Ray actors as workers: for work that outgrows one machine.

The engine lock wakes the pool's thread when there may be work, Ray's futures when work
is done or an actor is gone, and its own timer. An actor is one worker.

A lease is settled once, whatever arrives late. Actors are placed by Ray, and may have
to wait for room; the pool works with those that have come up. If the cluster's head is
silent, or no actor comes up, all leases return, and the segment's workers run on this
machine from then on.

A process has one connection to Ray. If the program has called `ray.init()`, that one is
used. Otherwise the first engine that wants actors connects, and Ray is shut down when
no stage has any there. Ray's own channel pickles what it carries: it is for a trusted
cluster.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import SpecError, WorkerError, check
from ..core.connector import Connector, WorkerMeter
from ..core.core import FAR_LEASE_NS
from ..recipe import Recipe, SegmentRecipe
from ..workers import Holding, PoolStatistics, join_all
from .far_pool import LOGGER, FarChild, FarPool
from .handover import Flat, flattened, loads, pack, restored
from .worker import (
    AssignedEngine,
    Assignment,
    Seeds,
    be_worker,
    set_up_libraries,
)

# Longest wait of the pool's thread.
TICK_S = 1.0
# How long the head of the cluster may be silent: after 60 s Ray ends the program.
SILENT_S = 20.0
# How long a segment may be without any actor, in seconds.
ALONE_S = 60.0
# How long, if Ray may have to install packages for its actors first.
INSTALL_S = 600.0
# An actor that has not come up after this waits for room.
PLACED_S = 15.0
# Seconds between two probes of the cluster's head.
PROBE_S = 5.0
# How long the head may take to accept a connection.
CONNECT_S = 2.0
# Options of an actor that claim a resource of a node, and its name there.
DEMAND = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
# A stage with actors on a cluster: its engine, and the number of its segment there.
Tenant = tuple[object, int]
# Number of actors that fit on any node if they claim nothing.
MANY_ACTORS = 1 << 16


class Actor:
    """One worker, from within: an engine that makes what it is assigned.

    What it runs comes once, through the object store. It must be importable there:
    every node of the cluster has the same packages, and the modules of the user's
    functions.
    """

    def begin(
        self, parcel: NDArray[np.uint8], seeds: tuple[int, ...], number: int
    ) -> str:
        """Get ready to work; return which process this is, in words.

        Args:
            parcel: what it works by, and the segment in the trainer, packed;
                uint8 [bytes].
            seeds: as for `be_worker`.
            number: its number among the workers of the segment.

        Raises:
            Exception: whatever importing the user's modules raises.
        """
        if threading.current_thread() is threading.main_thread():
            # Ray's handler raises SystemExit in whatever runs: in a user's function,
            # that would be the sample's failure, and not the end of an actor.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        set_up_libraries()
        work: tuple[Recipe, SegmentRecipe] = loads(parcel.data)
        recipe, segment = work
        be_worker(segment, seeds, number)
        self._engine = AssignedEngine(recipe, segment).__enter__()
        return f"{os.getpid()} on {socket.gethostname()}"

    def run(self, assignment: Assignment) -> Flat:
        """Make what is assigned; return the result, packed, with all data in it."""
        self._engine.assign(assignment)
        return self._engine.make(lambda result, _: flattened(result))


class RemoteActor(FarChild):
    """An actor, seen from the trainer; it has no meter of the segment's until placed.

    Args:
        handle: Ray's.
        number: as for `FarChild`.
        generation: as for `FarChild`.
    """

    def __init__(self, handle: Any, number: int, generation: int) -> None:
        super().__init__(number, generation, WorkerMeter(0))
        self.handle = handle
        # When it was created.
        self.asked_s = time.monotonic()
        # Which process it is, in words, once it is at work.
        self.where, self.ready = "(starting)", False


class ActorPool(FarPool[RemoteActor]):
    """A number of workers in Ray actors.

    Args:
        connector: where leases come from.
        recipe: the engine's recipe.
        cluster: where the actors live.
        tenant: the stage that has joined the cluster, and whose pool this is.
        seeds: seeds the global generators of each actor.
        options: Ray's options for each actor.

    Raises:
        SpecError: something in the program cannot be sent.
    """

    executor = "ray"
    ahead_ns = 100_000_000

    def __init__(
        self,
        connector: Connector,
        recipe: Recipe,
        cluster: RayCluster,
        tenant: Tenant,
        seeds: Seeds,
        options: Mapping[str, Any],
    ) -> None:
        import ray

        super().__init__(connector, recipe, "Ray actors")
        self._ray = ray
        self._cluster, self._tenant = cluster, tenant
        self._seeds, self._options = seeds, dict(options)
        self._generation = 0
        self._parcel = self._pack()
        self._class = ray.remote(**options)(Actor)
        # Handle what has come, one task each.
        self._arrivals: deque[Callable[[], None]] = deque()
        # Since when no actor has been at work, in seconds; infinity while one is.
        self._alone_since_s = time.monotonic()
        self._short_told = False
        self._start()

    def leases(self, workers: int) -> Holding:
        """Return what leases so many actors hold: one may wait at each."""
        return Holding(2 * workers, FAR_LEASE_NS, workers)

    def statistics(self) -> PoolStatistics:
        """Return the numbers of workers."""
        actors, now_s = list(self._children), time.monotonic()
        alive = sum(actor.ready for actor in actors)
        starting = sum(
            actor.meter.begins or (not actor.ready and now_s - actor.asked_s < PLACED_S)
            for actor in actors
        )
        most = self._cluster.room(self._tenant, self._options)
        return PoolStatistics(alive, starting, most)

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
        work = self._recipe.elsewhere(self._connector.segment), self._segment
        body = pack(work, "work", 'executor="process"')
        return self._ray.put(np.frombuffer(body, np.uint8))

    def _arrived(self, actor: RemoteActor, number: int | None, future: Any) -> None:
        """Note that a task is done. Ray calls this, from a thread of its own."""
        self._arrivals.append(partial(self._hear, actor, number, future))
        with self._engine_lock.lock:
            self._wakeup.notify()

    # The pool's thread

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup.fileno(), select.POLLIN)
        while not self._engine_lock.closed:
            reason = self._lost()
            if reason is not None:
                LOGGER.warning(
                    "%s: %s. Workers of this machine go on in place of its actors; no"
                    " sample is lost or repeated",
                    self._stage,
                    reason,
                )
                for actor in list(self._children):
                    self._forget(actor)
                self._connector.on_lost(reason)
                return
            try:
                with self._engine_lock.lock:
                    count = self._asked
                self._staff(self._cluster.share(self._tenant, count, self._options))
                self._tell_short()
                if self._leaving and not self._children:
                    return
                self._hand_out()
            except Exception:
                if self._cluster.connected:
                    raise
                continue  # Ray was shut down meanwhile, and refuses everything
            if poll.poll(1000 * TICK_S):
                self._wakeup.clear()
            while self._arrivals and not self._engine_lock.closed:
                self._arrivals.popleft()()

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

    def _outdated(self, actor: RemoteActor) -> bool:
        return actor.generation != self._generation

    def _has_room(self) -> bool:
        """Whether the cluster can be asked for one more: Ray itself finds its place."""
        return self._cluster.silent_s < SILENT_S / 2

    def _tell_short(self) -> None:
        """Say once that some actors wait for room."""
        now_s = time.monotonic()
        if not self._short_told and any(
            not actor.ready and now_s - actor.asked_s > PLACED_S
            for actor in self._children
        ):
            self._short_told = True
            LOGGER.warning(
                "%s: the Ray cluster has placed %d of %d actors so far. Work goes on"
                " with these; the others join when there is room",
                self._stage,
                sum(actor.ready for actor in self._children),
                self._target,
            )

    def _start_child(self, number: int) -> None:
        actor = RemoteActor(self._class.remote(), number, self._generation)
        self._children.append(actor)
        arguments = self._parcel, self._seeds(self._connector.segment, number), number
        self._follow(actor, None, actor.handle.begin.remote(*arguments))

    def _post(self, actor: RemoteActor, message: Assignment, number: int) -> None:
        self._follow(actor, number, actor.handle.run.remote(message))

    def _follow(self, actor: RemoteActor, number: int | None, result: Any) -> None:
        """Be woken when a task is done."""
        result.future().add_done_callback(partial(self._arrived, actor, number))

    def _end(self, actor: RemoteActor) -> None:
        """Kill an actor, if it can be reached: otherwise its end is Ray's to notice."""
        if not any(child.ready for child in self._children):
            self._alone_since_s = min(self._alone_since_s, time.monotonic())
        if self._cluster.connected and self._has_room():
            with suppress(Exception):  # Ray may be shut down at this very moment
                self._ray.kill(actor.handle)

    def _hear(self, actor: RemoteActor, number: int | None, future: Any) -> None:
        """Handle what was sent by this number, or None for the beginning."""
        if actor not in self._children or future.cancelled():
            return  # it was ended, and its leases given back, or Ray was shut down
        error = future.exception()
        if error is not None:
            self._reap(actor, error)
        elif number is None:
            actor.where, actor.ready = future.result(), True
            actor.meter = self._connector.enter()
            self._alone_since_s = inf
        else:
            self._receive(actor, number, partial(restored, future.result()))

    def _reap(self, actor: RemoteActor, error: BaseException) -> None:
        """Handle the end of an actor: its work returns to the front.

        Raises:
            WorkerError: too many actors have died with no work done in between, or what
                they run fails.
        """
        if isinstance(error, self._ray.exceptions.RayTaskError) and actor.errands:
            raise WorkerError(f"a Ray actor of {self._stage} failed: {error}")
        # With its node, an actor at work loses results, too: that is no RayActorError.
        at_work = actor.ready or isinstance(error, self._ray.exceptions.RayActorError)
        death = f"Ray actor {actor.where} has ended: {told(error)}"
        self._note_death(actor, death, at_work=at_work)
        self._forget(actor)

    def _end_all(self) -> None:
        for actor in self._children:
            self._connector.leave(actor.meter)
            self._end(actor)
        self._cluster.leave(self._tenant)


def told(error: BaseException) -> str:
    """Return what happened, in one line: Ray's messages are long."""
    cause = getattr(error, "cause", None)
    text = f"{type(cause).__name__}: {cause}" if cause else str(error)
    why = re.sub(".*?The actor (?:died|is dead) because ", "", " ".join(text.split()))
    why = re.sub(" (?:Some common causes|The actor never ran).*", "", why)
    return why[:600]


# The cluster


def slots(nodes: Sequence[Mapping[str, float]], demand: Mapping[str, float]) -> int:
    """Return how many actors fit on these nodes.

    Args:
        nodes: the resources of each.
        demand: the resources that an actor claims.
    """
    amounts = {name: amount for name, amount in demand.items() if amount > 0}
    if not amounts:
        return MANY_ACTORS * bool(nodes)
    return sum(
        int(min(node.get(name, 0.0) / amount for name, amount in amounts.items()))
        for node in nodes
    )


def demand_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that an actor with these options claims."""
    demand = {DEMAND[name]: options[name] for name in DEMAND if options.get(name)}
    return {**demand, **(options.get("resources") or {})}


class RayCluster:
    """A connection to Ray, and the stages that have actors there.

    `_lock` guards `_tenants`. Any thread may call any method.

    Args:
        tenants: the stages of the first engine.
        options: the options of its actors.
        ours: whether it is to be shut down when nobody uses it any more.

    Raises:
        SpecError: as for `admit`.
    """

    def __init__(
        self, tenants: Iterable[Tenant], options: Mapping[str, Any], *, ours: bool
    ) -> None:
        import ray

        self._ray, self._ours = ray, ours
        self._lock = threading.Lock()
        # The actors that each stage wants: one, until it has a pool.
        self._tenants: dict[Tenant, int] = {}
        self._nodes: list[Mapping[str, float]] = []
        # Address of its head: host:port.
        self.head = head_of(ray)
        self._heard_s = time.monotonic()
        # Set once Ray is shut down, or the program has another connection.
        self.ended = threading.Event()
        self._shutdown: threading.Thread | None = None
        self.admit(tenants, options)
        threading.Thread(
            target=self._probe, name="penstock ray probe", daemon=True
        ).start()

    @property
    def connected(self) -> bool:
        """Whether Ray may be called: a Ray that was shut down would start again."""
        return not self.ended.is_set() and bool(self._ray.is_initialized())

    @property
    def silent_s(self) -> float:
        """Seconds since the cluster's head last accepted a connection."""
        return time.monotonic() - self._heard_s

    def admit(self, tenants: Iterable[Tenant], options: Mapping[str, Any]) -> None:
        """Keep room for an actor for each of these stages, until they `leave`.

        Args:
            tenants: the stages of an engine.
            options: the options of its actors.

        Raises:
            SpecError: the cluster is too small for so many, or does not answer.
        """
        check(
            self._reach(),  # Ray itself would wait for a minute
            f"the head of the Ray cluster does not answer at {self.head}; start the"
            ' cluster again, or use executor="process"',
        )
        self._nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        demand = demand_of(options)
        room = slots(self._nodes, demand)
        with self._lock:
            everyone = {**self._tenants, **dict.fromkeys(tenants, 1)}
            check(
                len(everyone) <= room,
                f"the Ray cluster has room for {room} actors of {demand or 'nothing'},"
                f' got {len(everyone)} stages with executor="ray", each of which needs'
                " one; start it with more (ray.init(num_cpus=4), or another node), ask"
                ' for less with options(ray_options={"num_cpus": 0.5}), or give a stage'
                ' executor="process"',
            )
            self._tenants = everyone

    def room(self, tenant: Tenant, options: Mapping[str, Any]) -> int:
        """Return the largest number of actors that a stage may have beside others."""
        with self._lock:
            others = sum(self._tenants.values()) - self._tenants.get(tenant, 0)
        return max(1, slots(self._nodes, demand_of(options)) - others)

    def share(self, tenant: Tenant, asked: int, options: Mapping[str, Any]) -> int:
        """Return how many of the `asked` actors a stage gets; at least one of them.

        If all stages together want more than there is, each gets one, and its part of
        the rest.
        """
        room = slots(self._nodes, demand_of(options))
        with self._lock:
            self._tenants[tenant] = asked
            stages, actors = len(self._tenants), sum(self._tenants.values())
        if actors <= room or asked < 1:
            return asked
        return 1 + max(0, room - stages) * (asked - 1) // max(1, actors - stages)

    def leave(self, *tenants: Tenant) -> None:
        """Note that stages need no actors any more; with the last, let go of Ray."""
        with _joining:
            with self._lock:
                for tenant in tenants:
                    self._tenants.pop(tenant, None)
            if self._tenants or self.ended.is_set():
                return
            self.ended.set()
            # The program may have shut ours down, and connected by itself since.
            if not self._ours or not is_in(self._ray, self.head):
                return
            # In a thread: it takes a second or more.
            thread = threading.Thread(
                target=self._ray.shutdown, name="penstock ray shutdown"
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending
                self._ray.shutdown()
            else:
                self._shutdown = thread

    def wait_ended(self, wait_s: float) -> None:
        """Wait for the shutdown, if there is one, but not longer than this."""
        if self._shutdown is not None:
            self._shutdown.join(max(0.0, wait_s))

    def _probe(self) -> None:
        """Try to reach the head now and then.

        By a plain connection: Ray's own calls wait for a dead head for a minute, and
        then end the process.
        """
        while not self.ended.wait(PROBE_S):
            self._reach()

    def _reach(self) -> bool:
        """Return whether the head accepts a connection."""
        host, _, port = self.head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError:
            return False
        self._heard_s = time.monotonic()
        return True


def head_of(ray: Any) -> str:
    """Return the address of the head of the cluster that this process is in."""
    return str(ray.get_runtime_context().gcs_address)


def is_in(ray: Any, head: str) -> bool:
    """Return whether this process is in the cluster that has this head."""
    return bool(ray.is_initialized()) and head_of(ray) == head


# Guards `_joined`, and the beginning and end of connections.
_joining = threading.Lock()
_joined: RayCluster | None = None


def join(tenants: Iterable[Tenant], options: Mapping[str, Any]) -> RayCluster:
    """Return this process's connection to Ray, made if there is none.

    `RAY_ADDRESS` names the cluster to join; without it, Ray is started here.

    Args:
        tenants: the stages of an engine, which must `leave` it in the end.
        options: the options of its actors.

    Raises:
        SpecError: Ray is not installed, no cluster answers there, or it is too small.
    """
    global _joined  # noqa: PLW0603 a process has one connection
    try:
        import ray
    except ImportError as error:
        raise SpecError(
            f'executor="ray" needs Ray, which is not installed here ({error}); run `pip'
            ' install penstock[ray]`, or use executor="process"'
        ) from error
    with _joining:
        if _joined is not None:
            if _joined.connected and is_in(ray, _joined.head):
                _joined.admit(tenants, options)
                return _joined
            _joined.ended.set()
            _joined.wait_ended(threading.TIMEOUT_MAX)
        ours = not ray.is_initialized()
        try:
            if ours:
                connect(ray)
            _joined = RayCluster(tenants, options, ours=ours)
        except BaseException:  # Ctrl-C, say: nobody else would end what has begun
            if ours:
                ray.shutdown()
            raise
        return _joined


def connect(ray: Any) -> None:
    """Join the cluster that `RAY_ADDRESS` names, or start one here.

    Raises:
        SpecError: that cannot be done.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    check(
        not address.startswith("ray://"),
        f'executor="ray" works in a program that runs on a node of the cluster, got'
        f" RAY_ADDRESS={address!r}, a Ray Client; run it there, with the address"
        " host:port",
    )
    try:
        ray.init(
            address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise SpecError(
            f"no Ray cluster answers at {address!r} ({type(error).__name__}: {error});"
            " correct RAY_ADDRESS, start the cluster, or leave RAY_ADDRESS out to start"
            " Ray on this machine"
        ) from error
