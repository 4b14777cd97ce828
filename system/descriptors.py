"""How many file descriptors this process may still open, and where its files stand."""

from __future__ import annotations

import fcntl
import os
import resource
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

OPEN = "/proc/self/fd"
MAPPED = "/proc/self/maps"
Place = tuple[int, int]
"""Of an open file: its inode, and the position that the next read begins at."""


def most_descriptors() -> int:
    """Return how many may be open at once: `ulimit -n`."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def descriptors_left() -> int:
    """Return how many more may be opened now."""
    used = len(os.listdir(OPEN)) if os.path.isdir(OPEN) else 0
    return most_descriptors() - used


def read_places() -> dict[int, Place]:
    """Return where each file stands that is open to be read, by descriptor.

    Those that may be written, too, are logs and the like. The kernel's have no size.
    """
    found: dict[int, Place] = {}
    for name in os.listdir(OPEN) if os.path.isdir(OPEN) else ():
        descriptor = int(name)
        with suppress(OSError):  # the listing's own is closed by now
            is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == 0
            status = os.fstat(descriptor)
            if is_read and stat.S_ISREG(status.st_mode) and status.st_size:
                at = os.lseek(descriptor, 0, os.SEEK_CUR)
                found[descriptor] = status.st_ino, at
    return found


def read_since(before: Mapping[int, Place]) -> str | None:
    """Return the path of a file, open still, that was read since `read_places()`.

    None where there is none. A file that is mapped is read by address.
    """
    moved = {
        descriptor: str(inode)
        for descriptor, (inode, at) in read_places().items()
        if at and before.get(descriptor) != (inode, at)
    }
    if not moved:
        return None
    mapped = {line.split()[4] for line in Path(MAPPED).read_text().splitlines()}
    for descriptor, inode in moved.items():
        if inode not in mapped:
            with suppress(OSError):  # another thread has closed it meanwhile
                return os.readlink(f"{OPEN}/{descriptor}")
    return None
