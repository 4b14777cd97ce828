"""The GIL probe: at what share of moments do other threads hold the GIL?

A thread that sleeps for 3.5 ms is late for three reasons: waking up takes a moment,
then it waits for a CPU, and then for the GIL. The first is short, and Linux reports the
second (`schedstat`). So the rest shows whether the GIL was free when the thread woke.
The result is a yes or a no: how long the wait takes depends on the switch interval and
on luck in the queue, and says nothing more about the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator

# Shorter than the interpreter's switch interval of 5 ms, which the waits of other
# threads restart when the probe falls asleep. After exactly 5 ms it would wake when the
# GIL changes hands, and find it free: seen at 60 % of moments between two busy threads.
SLEEP_S = 0.0035
# If it is later than this, beyond the scheduler's part, the GIL was held. Waking an
# idle core takes 0.2 ms on a virtual machine (measured), a busy one 0.1 ms.
LATE_NS = 300_000
# Moments in a burst: at least 0.18 s, and some 5 ms of CPU. Their share is accurate to
# 0.14, twice its standard error.
BURST = 50


class GilProbe:
    """Samples the GIL in bursts, each in a short-lived thread of its own.

        with closing(GilProbe()) as probe:
            probe.burst()      # returns at once
            probe.held_share   # of the last burst, once it is over

    `burst` belongs to one thread at a time; any thread may call `close`.
    """

    def __init__(self) -> None:
        # Share of moments, 0 to 1, at which others held the GIL in the last complete
        # burst; None before that. Written by the burst's thread.
        self.held_share: float | None = None
        self._closed = threading.Event()
        # Held while the probe's thread may sleep; `close` releases it.
        self._bed = threading.Lock()
        self._bed.acquire()
        self._thread: threading.Thread | None = None
        # Held to start it, and to close: a thread that has not started has no end.
        self._starting = threading.Lock()

    def burst(self) -> bool:
        """Start a burst, unless one is in progress; return whether it was started."""
        with self._starting:
            busy = self._thread is not None and self._thread.is_alive()
            if busy or self._closed.is_set():
                return False
            self._thread = threading.Thread(
                target=self._look, name="penstock gil probe", daemon=True
            )
            self._thread.start()
        return True

    def close(self) -> None:
        """Stop a burst in progress, and wait for it. Idempotent."""
        with self._starting:
            if not self._closed.is_set():
                self._closed.set()
                self._bed.release()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _look(self) -> None:
        held = 0
        with run_queue_clock() as waited_ns:
            for _ in range(BURST):
                queued, slept = waited_ns(), time.perf_counter_ns()
                # Acquiring a lock with a timeout is a sleep that `close` can end.
                if self._bed.acquire(timeout=SLEEP_S):
                    self._bed.release()
                    return
                late_ns = time.perf_counter_ns() - slept - int(SLEEP_S * 1e9)
                late_ns -= waited_ns() - queued
                held += late_ns > LATE_NS
        self.held_share = held / BURST


@contextlib.contextmanager
def run_queue_clock() -> Iterator[Callable[[], int]]:
    """Yield a clock of the nanoseconds that this thread has waited for a CPU.

    It stands still if the system does not report them. Reading it keeps the GIL, as
    getting that back is what is measured: `PyDLL` calls C in this way.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield lambda: 0
        return
    read = ctypes.PyDLL(None).pread
    read.restype = ctypes.c_ssize_t
    read.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]
    text = ctypes.create_string_buffer(64)

    def waited_ns() -> int:
        # "<ns on a CPU> <ns waiting for one> <turns>": proc(5), schedstats
        length: int = read(file, text, len(text) - 1, 0)
        return int(text.raw[:length].split()[1])

    try:
        yield waited_ns
    finally:
        os.close(file)
