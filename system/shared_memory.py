"""Memory that processes share, as a descriptor: a memfd, or a file without a name.

Only the machine's memory limits a memfd. If the system refuses one, a file in /dev/shm
takes its place. No other user can open it. It never has a name, so it disappears when
the last process that has it open ends. `shared_file` allocates all pages at once, so a
lack of room is an error there, not a SIGBUS at some later write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile

SHARED_MEMORY = "/dev/shm"  # noqa: S108 files there are 0600 and have no name


def shared_file(name: str, nbytes: int) -> int:
    """Return a descriptor of `nbytes` zero bytes, not inherited by other programs.

    Args:
        name: shown in /proc for a memfd.
        nbytes: size, all of it allocated.

    Raises:
        OSError: there is no room, or the system offers neither kind.
    """
    descriptor = nameless(name)
    try:
        check_room(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_room(descriptor: int, nbytes: int) -> None:
    """Check that a file can grow to `nbytes`. A memfd has no such limit.

    Raises:
        OSError: it cannot.
    """
    room = os.fstatvfs(descriptor)
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and nbytes > free:
        text = f"{nbytes} bytes needed, {free} free; make {SHARED_MEMORY} larger"
        raise OSError(errno.ENOSPC, text, SHARED_MEMORY)


def nameless(name: str) -> int:
    """Return a descriptor of a new, empty file in memory; /proc shows `name`.

    Raises:
        OSError: the system offers neither kind.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    place = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
    with tempfile.TemporaryFile(dir=place) as file:
        return os.dup(file.fileno())
