"""Locks of bytes of a file, which end with the process that holds them.

Open file description locks (Linux, `fcntl(2)`): they belong to the open file, not to
the process, so closing some other descriptor of the same file leaves them. A process
that forked must open the file anew, or it would share its parent's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from types import TracebackType

__all__ = [
    "ByteLock",
    "release",
    "try_lock",
]

FLOCK = struct.Struct("@hhqqi4x")
"""Type, whence, start, length, pid (0 for these)."""
SET = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
"""Elsewhere than on Linux: the process' own locks, which suffice for one arena."""
WAIT = getattr(fcntl, "F_OFD_SETLKW", fcntl.F_SETLKW)


def request(kind: int, offset: int) -> bytes:
    """Return what `fcntl` takes to change the lock of one byte."""
    return FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)


call = ctypes.PyDLL(None, use_errno=True).fcntl
"""The system's own, called without letting go of the GIL, as it never waits here: where
other threads want the GIL, too, Python's takes 50 us and more to get it back."""
call.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_char_p
call.restype = ctypes.c_int


def change(descriptor: int, wanted: bytes) -> bool:
    """Lock or unlock a byte, and return whether nobody else has it locked."""
    if call(descriptor, SET, wanted) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EACCES):  # POSIX allows both
        return False
    raise OSError(code, os.strerror(code))


def try_lock(descriptor: int, offset: int) -> bool:
    """Lock a byte, and return whether nobody else had."""
    return change(descriptor, request(fcntl.F_WRLCK, offset))


def release(descriptor: int, offset: int) -> None:
    """Unlock a byte."""
    change(descriptor, request(fcntl.F_UNLCK, offset))


class ByteLock:
    """One byte, locked within a `with`; waits for other processes, not for threads."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self._taken = request(fcntl.F_WRLCK, offset)
        self._freed = request(fcntl.F_UNLCK, offset)

    def __enter__(self) -> None:
        if not change(self._descriptor, self._taken):
            fcntl.fcntl(self._descriptor, WAIT, self._taken)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        change(self._descriptor, self._freed)
