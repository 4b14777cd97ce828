"""How many more files this process may open, and where it reads in those it has."""

from __future__ import annotations

import fcntl
import os
import resource
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

OPEN = "/proc/self/fd"
MAPPED = "/proc/self/maps"
# Inode of an open file, and the position at which the next read begins.
Place = tuple[int, int]


def most_descriptors() -> int:
    """Return how many descriptors may be open at once: `ulimit -n`.

    Without a limit, this is `sys.maxsize`.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def descriptors_left() -> int:
    """Return how many more descriptors this process may open now.

    Outside Linux, those that are open already are not subtracted.
    """
    return most_descriptors() - len(os.listdir(OPEN) if os.path.isdir(OPEN) else ())


def read_places() -> dict[int, Place]:
    """Return the read position of each file that is open for reading, by descriptor.

    Files open for writing too are left out: they are logs and the like. So are files
    without a size, which belong to the kernel.
    """
    places: dict[int, Place] = {}
    for name in os.listdir(OPEN) if os.path.isdir(OPEN) else ():
        descriptor = int(name)
        with suppress(OSError):  # the listing's own descriptor is closed by now
            is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == 0
            status = os.fstat(descriptor)
            if is_read and stat.S_ISREG(status.st_mode) and status.st_size:
                places[descriptor] = status.st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
    return places


class ReadFile(NamedTuple):
    """A file that was read and is open."""

    path: str
    descriptor: int
    inode: int

    @property
    def is_open(self) -> bool:
        """Whether it still is."""
        with suppress(OSError):
            return os.fstat(self.descriptor).st_ino == self.inode
        return False


def read_since(before: Mapping[int, Place]) -> tuple[ReadFile, ...]:
    """Return the open files that were read since `read_places()`.

    Mapped files do not count: they are read by address, whatever the position.
    """
    inodes = {
        descriptor: inode
        for descriptor, (inode, at) in read_places().items()
        if at and before.get(descriptor) != (inode, at)
    }
    if not inodes:
        return ()
    mapped_inodes = {line.split()[4] for line in Path(MAPPED).read_text().splitlines()}
    files = []
    for descriptor, inode in inodes.items():
        if str(inode) not in mapped_inodes:
            with suppress(OSError):  # another thread may have closed it since
                files.append(
                    ReadFile(os.readlink(f"{OPEN}/{descriptor}"), descriptor, inode)
                )
    return tuple(files)
