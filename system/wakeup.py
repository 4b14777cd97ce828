"""A wakeup sent with the engine lock held: it never waits, and keeps the GIL.

`os.eventfd_write` lets go of the GIL, so another thread would run into the lock that
the sender holds, and both be put to sleep and woken for nothing, thousands of times a
second. A function of `ctypes.PyDLL` keeps it.
"""

from __future__ import annotations

import ctypes
import os

from ..errors import check

NOTICE_S = 1.0
"""The main thread waits no longer at once. Python does not see a Ctrl-C that comes in
the microsecond between its last look for signals and a system call that waits."""
_libc = ctypes.PyDLL(None)


class Wakeup:
    """Something to wait for with a selector, until it is closed."""

    def __init__(self) -> None:
        check(
            hasattr(os, "eventfd"),
            'executor="async" needs eventfd, so Linux; use executor="thread" and plain'
            " functions",
        )
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._descriptor

    def notify(self) -> None:
        """Make it ready to be read, if it is not yet. Nothing once it is closed."""
        if self._descriptor >= 0:
            _libc.eventfd_write(self._descriptor, ctypes.c_uint64(1))

    def clear(self) -> None:
        """Make it not ready again. For the thread that waits."""
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close it. Whoever notifies holds the same lock as whoever closes."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
