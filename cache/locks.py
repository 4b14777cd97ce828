"""Locks of bytes of a file, which end with the process that holds them.

Open file description locks (Linux, `fcntl(2)`): they belong to the open file, not to
the process, so closing some other descriptor of the same file leaves them. A process
that forked must open the file anew, or it would share its parent's.
"""

from __future__ import annotations

import fcntl
import os
import struct
from types import TracebackType

__all__ = ["ByteLock", "release", "try_lock"]

FLOCK = struct.Struct("@hhqqi4x")
"""Type, whence, start, length, pid (0 for these)."""
SET = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
"""Elsewhere than on Linux: the process' own locks, which suffice for one arena."""
WAIT = getattr(fcntl, "F_OFD_SETLKW", fcntl.F_SETLKW)


def request(kind: int, offset: int) -> bytes:
    """Return what `fcntl` takes to change the lock of one byte."""
    return FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)


def try_lock(descriptor: int, offset: int) -> bool:
    """Lock a byte, and return whether nobody else had."""
    try:
        fcntl.fcntl(descriptor, SET, request(fcntl.F_WRLCK, offset))
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES
        return False
    return True


def release(descriptor: int, offset: int) -> None:
    """Unlock a byte."""
    fcntl.fcntl(descriptor, SET, request(fcntl.F_UNLCK, offset))


class ByteLock:
    """One byte, locked within a `with`; waits for other processes, not for threads."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self._offset = offset

    def __enter__(self) -> None:
        fcntl.fcntl(self._descriptor, WAIT, request(fcntl.F_WRLCK, self._offset))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release(self._descriptor, self._offset)
