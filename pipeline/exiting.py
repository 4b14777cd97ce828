"""How loops end with the program, when nothing was closed.

When the program ends, the interpreter calls the functions of `atexit`, while daemon
threads still go on. First, no thread may ask for another batch, so those that loop
end. Then the runs are closed, and only then what the runs use.

A thread that loops ends without a word. An interpreter that is being torn down would
end it anyway, perhaps in the midst of native code, which aborts the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import TypeVar

LEAVE_S = 1.0
"""How long a thread may go on with its batch. User code may be stuck."""

T = TypeVar("T")


class LoopingThreads:
    """Knows the threads that loop beside the main one, to end them with the program."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know no thread, as in a forked child: who held the lock is not there."""
        self._lock = threading.Lock()
        self._over = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def run(self, call: Callable[[], T]) -> T:
        """Return the call's result; end the thread if the program has ended.

        The main thread pays nothing: it is what ends.
        """
        if threading.get_ident() == threading.main_thread().ident:
            return call()
        with self._lock:
            self._end_if_over()
            self._threads.add(threading.current_thread())
        try:
            return call()
        finally:  # what the call raises now is the end's doing
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._over:
            raise SystemExit  # threads end by it without a traceback

    def end(self) -> None:
        """Let no thread in any more, and wait a little until those inside have ended.

        A thread that has dropped its loop takes a moment to end: what it held is freed.
        """
        with self._lock:
            self._over = True
            threads = list(self._threads)
        until_s = time.monotonic() + LEAVE_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))


looping_threads = LoopingThreads()
"""The one of this process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=looping_threads.forget)


@cache
def at_exit(close_all: Callable[[], None]) -> None:
    """Have all runs closed at exit, before what they use.

    Call it when a face has a finaliser: `weakref` ends objects in the reverse order of
    their birth, so a cache that was opened for the first batch would be gone before
    the run that reads it. What is registered with `atexit` later is called earlier.
    """
    atexit.register(close_all)
    atexit.register(looping_threads.end)
