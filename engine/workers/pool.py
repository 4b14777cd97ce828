"""The interface that every kind of workers offers to the engine."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal, NamedTuple

from ...system.wakeup import Wakeup
from ..batch.buffer import BatchBuffer
from ..core.chunk import Lease, Outcome
from ..core.connector import Connector
from ..core.core import LEASE_NS
from ..core.metrics import SampledClock
from ..program.program import BatchMap, Program, Watch
from ..program.randomness import SampleRandom

Kind = Literal["inline", "thread", "process", "async", "ray"]
"""Kinds of workers."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Numbers of workers."""

    alive: int
    """Workers that work or wait, including those that are about to retire."""
    beginning: int = 0
    """Workers whose speed is not known yet: they are starting, or have settled none of
    their leases."""
    most: int = sys.maxsize
    """Workers that there is room for."""
    children: int = 0
    """Processes that they are in, if these are not the trainer's."""


class Holding(NamedTuple):
    """The leases that workers hold."""

    leases: int
    """How many at once."""
    lease_ns: int
    """Work in one of them."""
    makers: int = 1
    """How many work on one each, if they make whole batches."""


class WorkerPool(ABC):
    """The workers of one segment, of one kind. They only `take` and `settle`."""

    executor: ClassVar[Kind]
    _connector: Connector

    @abstractmethod
    def resize(self, count: int) -> None:
        """Request `count` workers; return at once, without waiting for running work."""

    def leases(self, workers: int) -> Holding:
        """Return what leases so many workers hold: one each."""
        return Holding(workers, LEASE_NS)

    @abstractmethod
    def retire(self) -> None:
        """Let all workers leave for good after their current lease; return at once."""

    @abstractmethod
    def close(self, until_s: float = inf) -> list[str]:
        """Stop, and wait until all workers are gone. The engine lock is closed already.

        Args:
            until_s: when to stop waiting for stuck ones, on the monotonic clock.

        Returns:
            The names of threads that still run: a thread cannot be interrupted.
        """

    @abstractmethod
    def statistics(self) -> PoolStatistics:
        """Return the numbers of workers. The engine lock must not be held."""

    def threads(self) -> list[str]:
        """Return the /proc folders of its threads, without the caller's."""
        return []

    def rest(self, until_ns: int) -> None:  # noqa: B027 most leases are short
        """Let workers rest within a lease, too, until this moment; 0: no more."""

    def serve_now(self) -> None:  # noqa: B027 few need it
        """Do what a thread would do next for its workers. For the trainer's thread."""

    def at_work(self) -> bool:
        """Whether a worker is working. The engine lock is held."""
        return self._connector.busy


class ServedPool(WorkerPool):
    """Workers served by one thread, which waits for whatever happens first.

    The engine lock guards `_asked`, `_leaving` and `_wakeup`; everything else belongs
    to that thread.

    Args:
        connector: where leases come from.
        name: name of the thread.
    """

    def __init__(self, connector: Connector, name: str) -> None:
        self._connector = connector
        self._engine_lock = connector.engine_lock
        self._listeners = connector.engine_lock.listeners[connector.segment]
        self._asked = 0
        self._leaving = False
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._work, name=f"penstock {name}", daemon=True
        )

    def resize(self, count: int) -> None:
        with self._engine_lock.lock:
            self._asked = count
            self._wakeup.notify()

    def retire(self) -> None:
        with self._engine_lock.lock:
            self._asked, self._leaving = 0, True
            self._wakeup.notify()

    def close(self, until_s: float = inf) -> list[str]:
        return join_all([self._thread], until_s)

    def _start(self) -> None:
        """Start listening and serving."""
        with self._engine_lock.lock:
            self._listeners.append(self._hear_of_work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 ours: user code is caught before
            self._engine_lock.fail(error)
        finally:
            with self._engine_lock.lock:
                self._listeners.remove(self._hear_of_work)
                self._wakeup.close()
            self._end_all()

    def _hear_of_work(self) -> None:
        """React to possible work. The engine lock is held."""
        self._wakeup.notify()

    @abstractmethod
    def _serve(self) -> None:
        """Serve the workers until the engine is closed or all have left."""

    @abstractmethod
    def _end_all(self) -> None:
        """End the remaining workers."""


def join_all(threads: Iterable[threading.Thread], until_s: float) -> list[str]:
    """Wait for other threads to end; return the names of those that did not in time."""
    me = threading.current_thread()
    others = [each for each in threads if each is not me and each.ident is not None]
    for thread in others:
        left_s = max(0.0, until_s - time.monotonic())
        thread.join(min(left_s, threading.TIMEOUT_MAX))
    return [thread.name for thread in others if thread.is_alive()]


def beginning(connector: Connector) -> int:
    """Return how many workers have not settled a lease yet. The engine lock is held."""
    return sum(meter.begins for meter in connector.meters)


Watches = Callable[[], Watch | None]
"""Makes what observes the samples of one worker."""


def no_watch() -> None:
    """Observe nothing."""


def run_lease(
    lease: Lease,
    program: Program,
    random: SampleRandom,
    clock: SampledClock,
    watch: Watch | None,
) -> Outcome:
    """Work on a lease in this thread.

    Args:
        lease: what to work on.
        program: what to do.
        random: the worker's generator.
        clock: the worker's CPU clock.
        watch: observes which sample it is at; None: nobody.
    """
    chunk, sink = lease.chunk, sink_of(program, lease)
    if watch is None:
        return program.run(chunk, lease.inputs, sink, random, clock=clock)
    in_flight = lease.in_flight
    watch.begin(in_flight.number, chunk.first_row - in_flight.first_row)
    by_batch = isinstance(program.operations[0], BatchMap)
    each = None if by_batch else watch
    outcome = program.run(chunk, lease.inputs, sink, random, each, clock)
    watch.end()
    return outcome


def sink_of(program: Program, lease: Lease) -> BatchBuffer | None:
    """Return the batch that a lease's rows are written to, if they are."""
    return lease.in_flight.buffer if program.places else None
