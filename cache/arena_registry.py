"""How the processes of a host find one arena, without a server or a list.

An arena has no name in the file system, but it has a title, which /proc shows for each
process that has it open. So a process looks at what the others of its user have open.
While it looks, and perhaps creates the arena, it holds a lock. The memory disappears
with the last process that has it open, however that process ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from glob import iglob
from pathlib import Path

from ..system.file_locks import lock_file
from ..system.runtime_folder import runtime_folder
from ..system.shared_memory import nameless
from .memory import Arena

PATIENCE_S = 30.0
"""Seconds to wait for others that look for the same arena. A look at 10,000 open files
takes some 100 ms, and the ranks of a host look in turn."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has an arena open, and which file that is."""

    pid: int
    descriptor: int
    device: int
    inode: int

    @classmethod
    def me(cls, descriptor: int) -> Holder:
        """Return a holder for this process."""
        status = os.fstat(descriptor)
        return cls(os.getpid(), descriptor, status.st_dev, status.st_ino)

    def open(self) -> int | None:
        """Return a descriptor of that file, or None if it is gone."""
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(found)
        if (status.st_dev, status.st_ino) == (self.device, self.inode):
            return found
        os.close(found)
        return None


def join(name: str, capacity: int, samples: int) -> tuple[Arena, Holder]:
    """Return the arena of that name: another process's, or a new one.

    Processes find each other if they have the same runtime folder.

    Args:
        name: name of the cache; letters and digits.
        capacity: bytes of records in a new arena.
        samples: expected number of records in a new arena.

    Raises:
        OSError: there is not enough memory, or the lock cannot be opened.
        TimeoutError: another process holds the lock.
    """
    place = runtime_folder()
    if place is None:
        return create("penstock-cache", capacity, samples)
    title = f"penstock-cache-{place.stat().st_ino}-{name}"
    with locked(place / name):
        return existing(title) or create(title, capacity, samples)


def existing(title: str) -> tuple[Arena, Holder] | None:
    """Return the arena of that title, if a process of this user has it open."""
    for path in iglob("/proc/[0-9]*/fd/*"):
        # It may be closed meanwhile, or belong to another version.
        with suppress(OSError, ValueError), ExitStack() as stack:
            if os.readlink(path) != f"/memfd:{title} (deleted)":
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid():
                found = Arena(descriptor), Holder.me(descriptor)
                stack.pop_all()
                return found
    return None


def create(title: str, capacity: int, samples: int) -> tuple[Arena, Holder]:
    """Return a new arena.

    Raises:
        OSError: there is not enough memory.
    """
    descriptor = nameless(title)
    try:
        return Arena(descriptor, capacity, samples), Holder.me(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep out other processes within the `with`; the file is there only meanwhile.

    Raises:
        OSError: the file cannot be opened.
        TimeoutError: another process keeps it locked.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with ExitStack() as stack:
        is_there = False
        while not is_there:
            file = stack.enter_context(open(os.open(path, flags, 0o600), "wb"))
            lock_file(file.fileno(), fcntl.LOCK_EX, PATIENCE_S)
            is_there = os.fstat(file.fileno()).st_nlink > 0  # or its holder removed it
        stack.callback(path.unlink)
        yield
