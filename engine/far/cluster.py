"""The Ray cluster that this process belongs to, and how its room is shared out.

A process has one connection to Ray. If the program has called `ray.init()`, that one is
used. Otherwise the first engine that wants actors connects, and Ray is shut down when
no stage claims any more. Ray's own channel pickles what it carries: it is for a trusted
cluster.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import SpecError, check

PROBE_S = 5.0
"""Seconds between two probes of the cluster's head."""
CONNECT_S = 2.0
"""How long the head may take to accept a connection."""
MISSING = (
    'executor="ray" needs Ray, which is not installed here (%s); run `pip install'
    ' penstock[ray]`, or use executor="process"'
)
TOO_SMALL = (
    'the Ray cluster has room for %d actors of %s, got %d stages with executor="ray",'
    " each of which needs one; start it with more (ray.init(num_cpus=4), or another"
    ' node), ask for less with options(ray_options={"num_cpus": 0.5}), or give a stage'
    ' executor="process"'
)
SILENT = (
    "the head of the Ray cluster does not answer at %s; start the cluster again, or use"
    ' executor="process"'
)
DEMAND = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Options of an actor that claim a resource of a node, and its name there."""
Claim = tuple[object, int]
"""A stage with actors: its engine, and the number of its segment there."""
UNBOUNDED = 1 << 16
"""Number of actors that fit on any node if they claim nothing."""


def slots(nodes: Sequence[Mapping[str, float]], demand: Mapping[str, float]) -> int:
    """Return how many actors fit on these nodes.

    Args:
        nodes: the resources of each.
        demand: the resources that an actor claims.
    """
    claimed = {name: amount for name, amount in demand.items() if amount > 0}
    if not claimed:
        return UNBOUNDED * bool(nodes)
    return sum(
        int(min(node.get(name, 0.0) / amount for name, amount in claimed.items()))
        for node in nodes
    )


def demand_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that an actor with these options claims."""
    claimed = {DEMAND[name]: options[name] for name in DEMAND if options.get(name)}
    return {**claimed, **(options.get("resources") or {})}


class RayCluster:
    """A connection to Ray, and the stages that claim actors.

    `_lock` guards `_claims`. Any thread may call any method.

    Args:
        claims: the stages of the first engine.
        options: the options of its actors.
        ours: whether it is to be shut down when nobody uses it any more.

    Raises:
        SpecError: as for `claim`.
    """

    def __init__(
        self, claims: Iterable[Claim], options: Mapping[str, Any], *, ours: bool
    ) -> None:
        import ray

        self._ray = ray
        self._ours = ours
        self._lock = threading.Lock()
        self._claims: dict[Claim, int] = {}
        """The actors that each stage wants: one, until it has a pool."""
        self._nodes: list[Mapping[str, float]] = []
        self.head = head_of(ray)
        """Address of its head: host:port."""
        self._heard_s = time.monotonic()
        self._ended = threading.Event()
        self._ending: threading.Thread | None = None
        self.claim(claims, options)
        threading.Thread(
            target=self._probe, name="penstock ray probe", daemon=True
        ).start()

    @property
    def connected(self) -> bool:
        """Whether Ray may be called: a Ray that was shut down would start again."""
        return not self._ended.is_set() and bool(self._ray.is_initialized())

    @property
    def silent_s(self) -> float:
        """Seconds since the cluster's head last accepted a connection."""
        return time.monotonic() - self._heard_s

    def claim(self, claims: Iterable[Claim], options: Mapping[str, Any]) -> None:
        """Claim an actor for each of these stages, until they `leave`.

        Args:
            claims: the stages of an engine.
            options: the options of its actors.

        Raises:
            SpecError: the cluster is too small for so many, or does not answer.
        """
        check(self._reach(), SILENT % self.head)  # Ray itself would wait for a minute
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._nodes = [node["Resources"] for node in nodes]
        demand = demand_of(options)
        room = slots(self._nodes, demand)
        with self._lock:
            wanted = {**self._claims, **dict.fromkeys(claims, 1)}
            text = TOO_SMALL % (room, demand or "nothing", len(wanted))
            check(len(wanted) <= room, text)
            self._claims = wanted

    def room(self, claim: Claim, options: Mapping[str, Any]) -> int:
        """Return the largest number of actors that a stage may have beside others."""
        with self._lock:
            others = sum(self._claims.values()) - self._claims.get(claim, 0)
        return max(1, slots(self._nodes, demand_of(options)) - others)

    def share(self, claim: Claim, asked: int, options: Mapping[str, Any]) -> int:
        """Return how many of the `asked` actors a stage gets; at least one of them.

        If all stages together want more than there is, each gets one, and its part of
        the rest.
        """
        room = slots(self._nodes, demand_of(options))
        with self._lock:
            self._claims[claim] = asked
            stages, wanted = len(self._claims), sum(self._claims.values())
        if wanted <= room or asked < 1:
            return asked
        return 1 + max(0, room - stages) * (asked - 1) // max(1, wanted - stages)

    def leave(self, *claims: Claim) -> None:
        """Note that stages need no actors any more; with the last, let go of Ray."""
        with _joining:
            with self._lock:
                for claim in claims:
                    self._claims.pop(claim, None)
            if self._claims or self._ended.is_set():
                return
            self._ended.set()
            # The program may have shut ours down, and connected by itself since.
            if self._ours and is_in(self._ray, self.head):
                self._end()

    def wait_ended(self, wait_s: float) -> None:
        """Wait for the shutdown, if there is one, but not longer than this."""
        if self._ending is not None:
            self._ending.join(max(0.0, wait_s))

    def forget(self) -> None:
        """Note that the program has another connection by now."""
        self._ended.set()

    def _end(self) -> None:
        """Shut Ray down in a thread: it takes a second or more."""
        thread = threading.Thread(
            target=self._ray.shutdown, name="penstock ray shutdown"
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            self._ray.shutdown()
        else:
            self._ending = thread

    def _probe(self) -> None:
        """Try to reach the head now and then.

        By a plain connection: Ray's own calls wait for a dead head for a minute, and
        then end the process.
        """
        while not self._ended.wait(PROBE_S):
            self._reach()

    def _reach(self) -> bool:
        """Return whether the head accepts a connection."""
        host, _, port = self.head.rpartition(":")
        try:
            address = host.strip("[]"), int(port)
            socket.create_connection(address, CONNECT_S).close()
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


_joining = threading.Lock()
"""Guards `_joined`, and the beginning and end of connections."""
_joined: RayCluster | None = None


def join(claims: Iterable[Claim], options: Mapping[str, Any]) -> RayCluster:
    """Return this process's connection to Ray, made if there is none.

    `RAY_ADDRESS` names the cluster to join; without it, Ray is started here.

    Args:
        claims: the stages of an engine, which must `leave` it in the end.
        options: the options of its actors.

    Raises:
        SpecError: Ray is not installed, no cluster answers there, or it is too small.
    """
    global _joined  # noqa: PLW0603 a process has one connection
    try:
        import ray
    except ImportError as error:
        raise SpecError(MISSING % error) from error
    with _joining:
        if _joined is not None:
            if _joined.connected and is_in(ray, _joined.head):
                _joined.claim(claims, options)
                return _joined
            _joined.forget()
            _joined.wait_ended(threading.TIMEOUT_MAX)
        ours = not ray.is_initialized()
        try:
            if ours:
                connect(ray)
            _joined = RayCluster(claims, options, ours=ours)
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
