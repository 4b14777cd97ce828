"""Actors whose cluster is gone at the worst moment.

The test plays Ray: in a real cluster, nothing can be made to happen between two lines
of the pool.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.core.connector import Connector, EngineLock
from penstock.engine.core.core import Core, Gauge, SegmentState
from penstock.engine.core.in_flight import ByteBudget, Reservations
from penstock.engine.far import actors
from penstock.engine.far.actors import ActorPool, RayCluster
from penstock.engine.program.program import Map, Program
from penstock.engine.recipe import SegmentRecipe
from penstock.errors import SpecError
from support.core_script import Script

SOON_S = 60.0
"""The limit for what happens at once; a busy machine may need that long."""


class ActorDiedError(Exception):
    """The error that Ray raises when an actor has died."""


class TaskError(Exception):
    """The error that Ray raises when a task has raised."""


class ResultLostError(Exception):
    """The error that Ray raises when a result was on a node that is gone."""


class Played:
    """Stands for Ray and a connection to it, as far as a pool sees them."""

    exceptions = SimpleNamespace(RayActorError=ActorDiedError, RayTaskError=TaskError)
    silent_s = 0.0

    def __init__(self, *, ends_when_asked: bool) -> None:
        self.connected = True
        self.left = threading.Event()
        self._ends_when_asked = ends_when_asked

    def put(self, data: Any) -> Any:
        return data

    def kill(self, _: Any) -> None:
        """Do nothing."""

    def remote(self, *_: Any, **__: Any) -> Any:
        """Decorate a class, create an actor, or request a task: it never ends."""
        if self._ends_when_asked:
            self.connected = False
            raise ConnectionError("Ray has not been started yet")
        begin = SimpleNamespace(remote=lambda *_: SimpleNamespace(future=Future))
        return SimpleNamespace(begin=begin)

    def share(self, _: object, count: int, __: Any) -> int:
        return count

    def leave(self, _: object) -> None:
        self.left.set()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a pool, given an object that plays Ray."""
    pools: list[ActorPool] = []

    def make(played: Played) -> ActorPool:
        ray: Any = SimpleNamespace(
            put=played.put,
            kill=played.kill,
            exceptions=played.exceptions,
            remote=lambda **_: lambda _: played,
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        states = [SegmentState(0, 1, 1, Gauge(1, 0)) for _ in range(2)]
        reservations = Reservations(ByteBudget(1 << 40), lambda: None)
        core = Core(Script((4,)), lambda plan: None, states, reservations, 0)  # type: ignore[arg-type, return-value]
        connector = Connector(EngineLock(core), 0, lambda in_flight: "batch")
        program = Program((Map("Map(ID:1) len", 1, len),))
        recipe = SegmentRecipe("f", "q", program, "ray", 1, (1, 1), 1, tunable=True)
        claim, options = (object(), 0), {"num_cpus": 1}
        whole: Any = SimpleNamespace(segments=[recipe], elsewhere=lambda _: None)
        pool = ActorPool(connector, whole, played, claim, lambda *at: (0, *at), options)  # type: ignore[arg-type]
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        lock = pool._engine_lock  # noqa: SLF001
        with lock.lock:
            lock.core.close(0)
            lock.wake()
        pool.close()


def test_work_goes_on_locally_when_ray_ends_while_it_is_asked(made: Any) -> None:
    played = Played(ends_when_asked=True)
    pool, reasons = made(played), list[str]()
    pool._connector.on_lost = reasons.append  # noqa: SLF001
    pool.resize(2)
    assert played.left.wait(SOON_S)
    assert reasons == ["Ray was shut down"]
    assert pool._engine_lock.broken is None  # noqa: SLF001


def test_results_lost_with_a_node_are_no_failure_to_begin(made: Any) -> None:
    pool = made(Played(ends_when_asked=False))
    with pool._engine_lock.lock:  # noqa: SLF001
        pool._engine_lock.core.close(0)  # noqa: SLF001
        pool._engine_lock.wake()  # noqa: SLF001
    pool.close()  # from here on the test is the pool's thread
    for _ in range(10):
        pool._start_child(0)  # noqa: SLF001
        (actor,) = pool._children  # noqa: SLF001
        answer: Future[str] = Future()
        answer.set_result("7 on a node")
        pool._hear(actor, None, answer)  # noqa: SLF001
        pool._reap(actor, ResultLostError("its node is gone"))  # noqa: SLF001
    assert pool._barren == 10  # noqa: SLF001


def test_a_connection_that_is_interrupted_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutdowns = []

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    ray: Any = SimpleNamespace(
        is_initialized=lambda: False,
        init=interrupted,
        shutdown=lambda: shutdowns.append("all"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(actors, "_joined", None)
    with pytest.raises(KeyboardInterrupt):
        actors.join([(object(), 0)], {})
    assert shutdowns == ["all"]


class Connected:
    """Stands for the module `ray`, connected to the head that it names."""

    def __init__(self, head: str | None) -> None:
        self.head = head
        self.shut_down = threading.Event()

    def is_initialized(self) -> bool:
        return self.head is not None

    def init(self, *_: object, **__: object) -> None:
        self.head = "127.0.0.1:1"

    def get_runtime_context(self) -> Any:
        assert self.head is not None
        return SimpleNamespace(gcs_address=self.head)

    def shutdown(self) -> None:
        self.head = None
        self.shut_down.set()

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": 3.0}}]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connected]:
    ray = Connected(None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(actors, "_joined", None)
    monkeypatch.setattr(RayCluster, "_reach", lambda _: True)
    yield ray
    if actors._joined is not None:  # noqa: SLF001
        actors._joined.ended.set()  # noqa: SLF001


def test_an_engine_that_begins_keeps_what_another_one_would_end(
    connected: Connected,
) -> None:
    first, second = (object(), 0), (object(), 0)
    ours = actors.join([first], {})
    assert actors.join([second], {}) is ours
    ours.leave(first)
    assert ours.connected
    assert not connected.shut_down.is_set()
    ours.leave(second)
    ours.wait_ended(SOON_S)
    assert connected.shut_down.is_set()


def test_an_engine_without_pools_of_actors_does_not_keep_a_connection(
    connected: Connected,
) -> None:
    engine = object()
    stages = [(engine, 0), (engine, 2)]
    ours = actors.join(stages, {})
    for stage in stages:  # worker processes take over: Ray has lost its head
        assert not connected.shut_down.is_set()
        ours.leave(stage)
    ours.wait_ended(SOON_S)
    assert connected.shut_down.is_set()


def test_what_the_program_has_connected_to_since_is_not_shut_down(
    connected: Connected,
) -> None:
    stage = object(), 0
    ours = actors.join([stage], {})
    connected.shutdown()
    connected.shut_down.clear()
    connected.head = "10.0.0.1:6379"  # by a `ray.init()` of the program
    ours.leave(stage)
    ours.wait_ended(SOON_S)
    assert connected.head == "10.0.0.1:6379"


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_each_stage_of_another_engine_takes_its_room_before_and_after_it_has_begun(
    connected: Connected, begun: int
) -> None:
    options, engine = {"num_cpus": 1}, object()
    first, second = [(engine, 0), (engine, 1)], [(object(), 0), (object(), 1)]
    ours = actors.join(first, options)
    for stage in first[:begun]:
        ours.share(stage, 1, options)
    with pytest.raises(SpecError, match="room for 3 actors"):
        actors.join(second, options)
    assert connected.is_initialized()
    ours.leave(first[0])
    actors.join(second, options)
    assert connected.is_initialized()


def test_a_connection_to_a_cluster_that_is_too_small_is_ended(
    connected: Connected,
) -> None:
    threads = threading.active_count()
    with pytest.raises(SpecError, match="room for 3 actors"):
        actors.join([(object(), at) for at in range(4)], {"num_cpus": 1})
    assert connected.shut_down.is_set()
    assert threading.active_count() == threads
