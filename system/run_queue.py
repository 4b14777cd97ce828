"""The run queue: how long workers had work to do but no core to run on.

Linux counts this for each thread (`schedstat`, proc(5)). The count tells a wait for a
busy core from a wait for a disk, a lock or the GIL. From inside the process they all
look alike.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

APART_NS = 200_000_000
"""Minimum time between two measurements. One costs about 10 us for each thread."""


class Times(NamedTuple):
    """What threads have spent, in nanoseconds."""

    on_core_ns: int
    waited_ns: int
    """With work to do, but no core."""


class RunQueue:
    """Adds up what threads that come and go spend. Any thread may call it.

    Args:
        threads: returns the `/proc` folders of the threads that exist now.
    """

    def __init__(self, threads: Callable[[], Iterable[str]]) -> None:
        self._threads = threads
        # Guards everything below.
        self._lock = threading.Lock()
        self._seen: dict[str, Times] = {}
        """Those of each live thread."""
        self._total = Times(0, 0)
        self._due_ns = 0

    def look(self) -> Times:
        """Return what all threads have spent so far, ended ones included.

        What a thread spends before its first measurement, and after its last, is lost.
        """
        with self._lock:
            now_ns = time.monotonic_ns()
            if now_ns >= self._due_ns:
                self._due_ns = now_ns + APART_NS
                now = {thread: times_of(thread) for thread in self._threads()}
                spent = [self._total]
                for thread in now.keys() & self._seen.keys():
                    pairs = zip(now[thread], self._seen[thread], strict=True)
                    spent.append(Times(*(max(0, new - old) for new, old in pairs)))
                self._total = Times(*map(sum, zip(*spent, strict=True)))
                self._seen = now
            return self._total


def threads_of(pid: int) -> list[str]:
    """Return the `/proc` folders of a process's threads; empty if it has ended."""
    return glob.glob(f"/proc/{pid}/task/*")


def times_of(thread: str) -> Times:
    """Return what a thread has spent; zeros if the system does not say."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        file = os.open(f"{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # "<ns on a core> <ns waiting for one> <turns>"
            return Times(*map(int, os.read(file, 64).split()[:2]))
        finally:
            os.close(file)
    return Times(0, 0)


def waited_ns(thread: str) -> int:
    """Return the nanoseconds a thread has waited for a core; 0 if unknown."""
    return times_of(thread).waited_ns
