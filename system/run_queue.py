"""The run queue: how long workers had work to do but no core to run on.

Linux counts this for each thread (`schedstat`, proc(5)). The count tells a wait for a
busy core from a wait for a disk, a lock or the GIL. From inside the process they all
look alike. Linux also says at which address of memory a thread waits (`syscall`), so
threads that wait for one and the same lock can be counted.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

HERE = "/proc/self/"
# Minimum time between two measurements. One costs about 10 us for each thread.
APART_NS = 200_000_000


class Times(NamedTuple):
    """What threads have spent, in nanoseconds."""

    on_core_ns: int
    waited_ns: int
    """With work to do, but no core."""
    looked: int = 0
    """How many threads of this process were seen in all looks, each time."""
    lined: int = 0
    """How many of these were waiting for one and the same lock."""


class RunQueue:
    """Adds up what threads that come and go spend. Any thread may call it.

    Args:
        threads: returns the `/proc` folders of the threads that exist now.
    """

    def __init__(self, threads: Callable[[], Iterable[str]]) -> None:
        self._threads = threads
        # Guards everything below.
        self._lock = threading.Lock()
        # Those of each live thread.
        self._times: dict[str, Times] = {}
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
                here = [thread for thread in now if thread.startswith(HERE)]
                times = [self._total, Times(0, 0, len(here), in_line(here))]
                for thread in now.keys() & self._times.keys():
                    pairs = zip(now[thread], self._times[thread], strict=True)
                    times.append(Times(*(max(0, new - old) for new, old in pairs)))
                self._total = Times(*map(sum, zip(*times, strict=True)))
                self._times = now
            return self._total


def threads_of(pid: int) -> list[str]:
    """Return the `/proc` folders of a process's threads; empty if it has ended."""
    return glob.glob(f"/proc/{pid}/task/*")


def times_of(thread: str) -> Times:
    """Return what a thread has spent; zeros if the system does not say."""
    words = _words(f"{thread}/schedstat")  # "<ns on a core> <ns waiting> <turns>"
    return Times(*map(int, words[:2])) if len(words) > 1 else Times(0, 0)


def _words(path: str) -> list[bytes]:
    """Return the words of a small file in `/proc`; none if it cannot be read."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, 256).split()
        finally:
            os.close(file)
    return []


# Number of the system call in which a thread waits for a lock.
FUTEX = {"x86_64": b"202", "aarch64": b"98"}.get(platform.machine())


def in_line(threads: Iterable[str]) -> int:
    """Return how many of these threads wait for one and the same lock.

    Those that wait for the GIL look at it again and again, so they do not count.
    """
    # "<number> <address> <operation> <value> <time limit> ...", or "running"
    stops = [_words(f"{thread}/syscall") for thread in threads]
    endless = [words for words in stops if words[:1] == [FUTEX] and words[4] == b"0x0"]
    locks = Counter(words[1] for words in endless)
    most = max(locks.values(), default=0)
    return most if most > 1 else 0


def waited_ns(thread: str) -> int:
    """Return the nanoseconds a thread has waited for a core; 0 if unknown."""
    return times_of(thread).waited_ns
