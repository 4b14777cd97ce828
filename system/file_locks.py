"""Locks on files and on single bytes, which end with the process that holds them.

Byte locks are open file description locks (Linux, `fcntl(2)`). They belong to the open
file, not to the process, so closing another descriptor of the same file does not drop
them. A forked process must open the file again, or it would share its parent's locks.
Elsewhere they are locks of the process, which are enough for a single arena.

The system offers no time limit for waiting, so each lock is tried repeatedly, with
pauses that start short and double. A process that was stopped while it held a lock
therefore cannot block others forever.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

# Linux's `struct flock`: type, whence, start, length, pid (0 for locks of open files).
FLOCK = struct.Struct("@hhqqi4x")
# Command of the system call; None outside Linux.
SET = getattr(fcntl, "F_OFD_SETLK", None)
# What `fcntl.lockf` calls the kinds of locks.
KINDS = {
    fcntl.F_WRLCK: fcntl.LOCK_EX | fcntl.LOCK_NB,
    fcntl.F_RDLCK: fcntl.LOCK_SH | fcntl.LOCK_NB,
    fcntl.F_UNLCK: fcntl.LOCK_UN,
}
FIRST_PAUSE_S = 0.00005
MAX_PAUSE_S = 0.002
# How long a `ByteLock` waits for another process, in seconds.
PATIENCE_S = 2.0


# The system call, made without releasing the GIL: it never waits here. When other
# threads want the GIL, Python's own `fcntl` takes 50 us or more to get it back.
call = ctypes.PyDLL(None, use_errno=True).fcntl
call.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_char_p
call.restype = ctypes.c_int


def change(descriptor: int, kind: int, offset: int) -> bool:
    """Lock or unlock a byte; return False if somebody else has it locked.

    Args:
        descriptor: the file's descriptor.
        kind: `fcntl.F_WRLCK` for this file alone, `F_RDLCK` together with others,
            `F_UNLCK` for no longer.
        offset: the byte.

    Raises:
        OSError: the call failed for any other reason.
    """
    try:
        if SET is None:
            fcntl.lockf(descriptor, KINDS[kind], 1, offset)
        elif call(descriptor, SET, FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    except (BlockingIOError, PermissionError):  # POSIX allows both
        return False
    return True


def try_lock(descriptor: int, offset: int) -> bool:
    """Lock a byte exclusively; return False if somebody else has it locked.

    Raises:
        OSError: the call failed for any other reason.
    """
    return change(descriptor, fcntl.F_WRLCK, offset)


def release(descriptor: int, offset: int) -> None:
    """Unlock a byte.

    Raises:
        OSError: the call failed.
    """
    change(descriptor, fcntl.F_UNLCK, offset)


def try_lock_file(descriptor: int, kind: int) -> bool:
    """Lock a whole file (`flock`); return False if somebody else has it locked.

    Args:
        descriptor: the file's descriptor.
        kind: `fcntl.LOCK_EX` or `LOCK_SH`.

    Raises:
        OSError: the call failed for any other reason.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(descriptor: int, kind: int, patience_s: float) -> None:
    """Lock a whole file, as `try_lock_file` does; wait for up to `patience_s` seconds.

    Raises:
        TimeoutError: another process held the lock all this time.
        OSError: the call failed for any other reason.
    """
    wait_until(lambda: try_lock_file(descriptor, kind), patience_s)


@contextmanager
def locked_folder(folder: Path, patience_s: float) -> Iterator[None]:
    """Keep out other threads and processes that lock a folder, within the `with`.

    The lock ends with the process at the latest.

    Raises:
        TimeoutError: another process held the lock for `patience_s` seconds.
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_file(descriptor, fcntl.LOCK_EX, patience_s)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have it open, too
        os.close(descriptor)


def wait_until(done: Callable[[], bool], patience_s: float) -> None:
    """Call `done` until it returns True.

    Raises:
        TimeoutError: it did not return True within `patience_s` seconds.
    """
    end_s = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while not done():
        if time.monotonic() > end_s:
            raise TimeoutError(
                f"another process has held a lock of the cache for {patience_s:g} s;"
                " if it hangs, end it, and run this program again"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


class ByteLock:
    """One byte, locked within a `with`. It keeps out other processes, not threads.

    Raises:
        TimeoutError: another process holds the byte, and was probably stopped. Until it
            releases the byte, further attempts fail at once.
        OSError: the call failed for any other reason.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        self._lock = partial(try_lock, descriptor, offset)
        self._free = partial(release, descriptor, offset)
        self._patience_s = PATIENCE_S

    def __enter__(self) -> None:
        if not self._lock():
            patience_s, self._patience_s = self._patience_s, 0.0
            wait_until(self._lock, patience_s)
        self._patience_s = PATIENCE_S

    def __exit__(self, *_: object) -> None:
        self._free()
