"""What every kind of workers offers the engine."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Protocol

from ...system.descriptors import read_places, read_since
from ...system.printing import name_of
from ...system.wakeup import Wakeup
from ..batch.buffer import BatchBuffer
from ..core.chunk import Lease
from ..core.connector import Connector
from ..movable import POSITION, STATE, Finding, changed, find_unsafe, snapshot
from ..program.program import Program


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """How many workers there are."""

    executor: str
    asked: int
    """The number last asked for."""
    alive: int
    """Those at work or waiting, with those that have yet to learn that they retire."""
    beginning: int = 0
    """Those of which it is not known yet how fast they work: they start, or have not
    settled a lease, of those they have."""


class WorkerPool(Protocol):
    """The workers of one segment, of one kind. They only `take` and `settle`."""

    @property
    def executor(self) -> str:
        """`inline`, `thread` or `process`."""

    def resize(self, count: int) -> None:
        """Ask for `count` workers; returns at once, waits for no work in progress."""

    def retire(self) -> None:
        """Ask all to leave after the lease in hand; returns at once. For good."""

    def close(self, until_s: float = inf) -> list[str]:
        """Stop, and wait until all are gone. The engine lock is closed already.

        Args:
            until_s: when to give up on those that are stuck, by the monotonic clock.

        Returns:
            The names of the threads that go on: one cannot be interrupted.
        """

    def statistics(self) -> PoolStatistics:
        """Return how many there are."""

    def threads(self) -> list[str]:
        """Return the folders in /proc of the threads that work; none if it is yours."""


class ServedPool(ABC):
    """Workers that one thread serves, which waits for whatever comes first.

    The engine lock guards `_asked`, `_leaving` and `_wakeup`; everything else belongs
    to that thread.

    Args:
        connector: where leases come from.
        name: of the thread.
    """

    def __init__(self, connector: Connector, name: str) -> None:
        self._connector = connector
        self._engine_lock = connector.engine_lock
        self._asked = 0
        self._leaving = False
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._work, name=f"penstock {name}", daemon=True
        )

    def resize(self, count: int) -> None:
        """Ask for `count` workers."""
        with self._engine_lock.lock:
            self._asked = count
            self._wakeup.notify()

    def retire(self) -> None:
        """Ask all to leave after the lease in hand."""
        with self._engine_lock.lock:
            self._asked, self._leaving = 0, True
            self._wakeup.notify()

    def close(self, until_s: float = inf) -> list[str]:
        """Wait until the thread has ended all workers, as the engine lock is closed."""
        return join_all([self._thread], until_s)

    def _start(self) -> None:
        """Begin to listen, and to serve."""
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

    @property
    def _listeners(self) -> list[Callable[[], None]]:
        return self._engine_lock.listeners[self._connector.segment]

    def _hear_of_work(self) -> None:
        """There may be work. The engine lock is held."""
        self._wakeup.notify()

    @abstractmethod
    def _serve(self) -> None:
        """Serve the workers until the engine is closed, or all have left."""

    @abstractmethod
    def _end_all(self) -> None:
        """End the workers that are left."""


def join_all(threads: Iterable[threading.Thread], until_s: float) -> list[str]:
    """Wait for other threads to end; return the names of those that do not in time."""
    me = threading.current_thread()
    others = [each for each in threads if each is not me and each.ident is not None]
    for thread in others:
        left_s = max(0.0, until_s - time.monotonic())
        thread.join(min(left_s, threading.TIMEOUT_MAX))
    return [thread.name for thread in others if thread.is_alive()]


def beginning(connector: Connector) -> int:
    """Return how many workers have yet to settle a lease; the engine lock is held."""
    return sum(meter.begins for meter in connector.meters)


def sink_of(program: Program, lease: Lease) -> BatchBuffer | None:
    """Return where a lease's rows go, if they go into the batch."""
    if not program.places:
        return None
    assert isinstance(lease.in_flight.buffer, BatchBuffer)
    return lease.in_flight.buffer


class FirstUse:
    """Tells what threads must not share of a program, once it has made samples.

    Many datasets open their files when they are first asked for a sample, and some keep
    what they read last: two threads would take one another's.

    Args:
        program: is about to make its first samples here, by one thread.
        alone: whether nobody else reads files meanwhile. One that is held where no walk
            comes by was read all the same.
    """

    def __init__(self, program: Program, *, alone: bool) -> None:
        self._things = program.doubtful
        self._held = [snapshot([each]) for each in self._things]
        self._files = read_places() if alone else None

    def finding(self) -> Finding | None:
        """Return the nearest thing that threads must not share, if there is one."""
        return next(filter(None, self._findings()), None)

    def _findings(self) -> Iterator[Finding | None]:
        yield from (find_unsafe(each, name_of(each)) for each in self._things)
        file = None if self._files is None else read_since(self._files)
        yield None if file is None else Finding(file, "file", POSITION)
        for each, held in zip(self._things, self._held, strict=True):
            path = changed(held, [each])
            name = f"{name_of(each)}{path}"
            yield None if path is None else Finding(name, "value", STATE)
