"""Waking who sleeps, and calling back who may be gone.

A wakeup is sent while the engine lock is held, so it never waits, and keeps the GIL.
`os.eventfd_write` releases the GIL: another thread would then run into the lock that
the sender holds, and both would sleep and wake for nothing, thousands of times a
second. A function of `ctypes.PyDLL` keeps it.

A part that calls back the whole it belongs to makes a circle of them. Then the memory
of a dataset that the whole refers to waits for the garbage collector. So a callback
does not keep its object alive.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..errors import check

# Longest single wait of the main thread, in seconds. Python misses a Ctrl-C that comes
# in the microsecond between its last check for signals and a system call that waits.
NOTICE_S = 1.0
_libc = ctypes.PyDLL(None)


class Wakeup:
    """Something a selector can wait for, until it is closed.

    Raises:
        SpecError: this system has no eventfd.
        OSError: the limit of open files is reached.
    """

    def __init__(self) -> None:
        check(
            hasattr(os, "eventfd"),
            'executor="async" and executor="ray" need eventfd, which only Linux has;'
            ' use executor="thread" and plain functions',
        )
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor, to register with a selector."""
        return self._descriptor

    def notify(self) -> None:
        """Make it readable. Does nothing once it is closed."""
        if self._descriptor >= 0:
            _libc.eventfd_write(self._descriptor, ctypes.c_uint64(1))

    def clear(self) -> None:
        """Make it unreadable again. Only the waiting thread calls this.

        Raises:
            BlockingIOError: it is not readable.
        """
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close it. The caller holds the lock that callers of `notify` hold."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:  # its owner could not begin
            self.close()


C = TypeVar("C", bound=Callable[..., Any])


def weakly(method: C) -> C:
    """Return a function that calls a bound method; None once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return cast("C", call)
