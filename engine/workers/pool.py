"""What every kind of workers offers the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from ..batch.buffer import BatchBuffer
from ..core.chunk import Lease
from ..program.program import Program


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """How many workers there are."""

    executor: str
    asked: int
    """The number last asked for."""
    alive: int
    """Those at work or waiting, with those that have yet to learn that they retire."""


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


def join_all(threads: Iterable[threading.Thread], until_s: float) -> list[str]:
    """Wait for other threads to end; return the names of those that do not in time."""
    me = threading.current_thread()
    others = [each for each in threads if each is not me and each.ident is not None]
    for thread in others:
        left_s = max(0.0, until_s - time.monotonic())
        thread.join(min(left_s, threading.TIMEOUT_MAX))
    return [thread.name for thread in others if thread.is_alive()]


def sink_of(program: Program, lease: Lease) -> BatchBuffer | None:
    """Return where a lease's rows go, if they go into the batch."""
    if not program.places:
        return None
    assert isinstance(lease.in_flight.buffer, BatchBuffer)
    return lease.in_flight.buffer
