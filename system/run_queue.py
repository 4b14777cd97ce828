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

APART_NS = 200_000_000
"""Minimum time between two measurements. One costs about 10 us for each thread."""


class RunQueue:
    """Adds up the waits of threads that come and go. Any thread may call it.

    Args:
        threads: returns the `/proc` folders of the threads that exist now.
    """

    def __init__(self, threads: Callable[[], Iterable[str]]) -> None:
        self._threads = threads
        # Guards everything below.
        self._lock = threading.Lock()
        # Nanoseconds each live thread has waited, by thread.
        self._seen: dict[str, int] = {}
        self._total_ns = 0
        self._due_ns = 0

    def look(self) -> float:
        """Return the seconds all threads have waited so far, ended ones included.

        What a thread waits before its first measurement, and after its last, is lost.
        """
        with self._lock:
            now_ns = time.monotonic_ns()
            if now_ns >= self._due_ns:
                self._due_ns = now_ns + APART_NS
                waited = {thread: waited_ns(thread) for thread in self._threads()}
                self._total_ns += sum(
                    max(0, ns - self._seen[thread])
                    for thread, ns in waited.items()
                    if thread in self._seen
                )
                self._seen = waited
            return self._total_ns / 1e9


def threads_of(pid: int) -> list[str]:
    """Return the `/proc` folders of a process's threads; empty if it has ended."""
    return glob.glob(f"/proc/{pid}/task/*")


def waited_ns(thread: str) -> int:
    """Return the nanoseconds a thread has waited for a core; 0 if unknown."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        file = os.open(f"{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # "<ns on a core> <ns waiting for one> <turns>"
            return int(os.read(file, 64).split()[1])
        finally:
            os.close(file)
    return 0
