"""Locks of files and of their bytes, which end with the process that holds them.

Locks of bytes are open file description locks (Linux, `fcntl(2)`): they belong to the
open file, not to the process, so closing some other descriptor of the same file leaves
them. A process that forked must open the file again, or it would share its parent's.

No lock can be waited for with a time limit, so each is tried again and again: at first
soon, then after longer and longer pauses. Nobody waits forever for a process that was
stopped while it held one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable

FLOCK = struct.Struct("@hhqqi4x")
"""Type, whence, start, length, pid (0 for these)."""
SET = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
"""Elsewhere than on Linux: the process' own locks, which suffice for one arena."""
FIRST_PAUSE_S = 0.00005
MAX_PAUSE_S = 0.002
PATIENCE_S = 2.0


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


def share(descriptor: int, offset: int) -> bool:
    """Lock a byte with all who share it; return whether nobody has it alone."""
    return change(descriptor, request(fcntl.F_RDLCK, offset))


def release(descriptor: int, offset: int) -> None:
    """Unlock a byte."""
    change(descriptor, request(fcntl.F_UNLCK, offset))


def lock_file(descriptor: int, kind: int, patience_s: float) -> None:
    """Lock a whole file (`flock`).

    Args:
        descriptor: of the file.
        kind: `fcntl.LOCK_EX` or `LOCK_SH`.
        patience_s: how long to wait.

    Raises:
        TimeoutError: another process has it all this time.
    """

    def locked() -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    wait_until(locked, patience_s)


def wait_until(done: Callable[[], bool], patience_s: float) -> None:
    """Try until it is done, or raise `TimeoutError`."""
    end_s = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while not done():
        if time.monotonic() > end_s:
            raise TimeoutError(f"another process has held a lock for {patience_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


class ByteLock:
    """One byte, locked within a `with`; waits for other processes, not for threads.

    Raises:
        TimeoutError: another process holds it, and was stopped, it seems. Until it lets
            go, whoever asks again learns so at once.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self._taken = request(fcntl.F_WRLCK, offset)
        self._freed = request(fcntl.F_UNLCK, offset)
        self._patience_s = PATIENCE_S

    def __enter__(self) -> None:
        if change(self._descriptor, self._taken):
            self._patience_s = PATIENCE_S
            return
        patience_s, self._patience_s = self._patience_s, 0.0
        wait_until(lambda: change(self._descriptor, self._taken), patience_s)
        self._patience_s = PATIENCE_S

    def __exit__(self, *_: object) -> None:
        change(self._descriptor, self._freed)
