"""The run queue: how long workers had work to do, and no core to do it on.

Linux counts it for each thread (`schedstat`, proc(5)). It tells a core that others use
from a wait for a disk, a lock or the GIL, which all look alike from within.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import time
from collections.abc import Callable, Iterable

APART_NS = 200_000_000
"""Between two looks at least: one thread takes some 10 us."""


class RunQueue:
    """Adds up the waits of threads that come and go. Any thread may look.

    Args:
        threads: tells which there are now, by their folders in /proc.
    """

    def __init__(self, threads: Callable[[], Iterable[str]]) -> None:
        self._threads = threads
        # Guards all below.
        self._lock = threading.Lock()
        # Nanoseconds waited, by thread; of those that are there.
        self._seen: dict[str, int] = {}
        self._total_ns = 0
        self._due_ns = 0

    def look(self) -> float:
        """Return the seconds waited so far, by all threads there have been.

        One that ends between two looks takes along what it waited since the first.
        """
        with self._lock:
            now_ns = time.monotonic_ns()
            if now_ns >= self._due_ns:
                self._due_ns = now_ns + APART_NS
                waited = {thread: waited_ns(thread) for thread in self._threads()}
                before = self._seen
                self._total_ns += sum(
                    max(0, ns - before[thread])
                    for thread, ns in waited.items()
                    if thread in before
                )
                self._seen = waited
            return self._total_ns / 1e9

    def __repr__(self) -> str:
        return f"<RunQueue of {len(self._seen)} threads: {self._total_ns / 1e9:.3f} s>"


LONG_NS = 5_000_000
"""Work from which one look before it and one behind, some 15 us each, are little."""
SOME = 64
"""Of shorter work one in so many is looked at."""


class OwnQueue:
    """How long work in the calling thread has waited for a core.

    queue.begin()
    ...             # the work
    queue.end(ns)   # that it took
    """

    def __init__(self) -> None:
        self._before_ns: int | None = None
        self._last_ns = LONG_NS
        self._count = self.run_ns = self._looked_ns = self._waited_ns = 0

    def begin(self) -> None:
        """Look, if that is worth it."""
        self._count += 1
        looks = self._last_ns >= LONG_NS or self._count % SOME == 0
        self._before_ns = waited_ns("/proc/thread-self") if looks else None

    def end(self, run_ns: int) -> None:
        """Add work that is done, and took so long."""
        self._last_ns = run_ns
        if self._before_ns is None:  # one that is long all of a sudden is like no other
            self.run_ns += min(run_ns, LONG_NS)
        else:
            self.run_ns += run_ns
            self._waited_ns += waited_ns("/proc/thread-self") - self._before_ns
            self._looked_ns += run_ns

    @property
    def share(self) -> float:
        """Part of the time that was waited, of the work that was looked at."""
        return self._waited_ns / self._looked_ns if self._looked_ns else 0.0

    @property
    def seconds(self) -> float:
        """Waited so far, if all work was like what was looked at."""
        return self.run_ns / 1e9 * self.share

    def __repr__(self) -> str:
        return f"<OwnQueue: waited {self.share:.0%}>"


def threads_of(pid: int) -> list[str]:
    """Return the folders of a process's threads; none where it is gone."""
    return glob.glob(f"/proc/{pid}/task/*")


def waited_ns(thread: str) -> int:
    """Return how long a thread has waited for a core; 0 where nobody tells."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        file = os.open(f"{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # "<ns on a core> <ns waiting for one> <turns>"
            return int(os.read(file, 64).split()[1])
        finally:
            os.close(file)
    return 0
