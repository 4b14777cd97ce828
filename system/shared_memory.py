"""Memory that processes share, as a descriptor: a memfd, or a file without a name.

A memfd is bounded by the machine's memory alone. Where the system refuses one, a file
in /dev/shm takes its place, open to nobody else and without a name from the start, so
that it is gone with its last user. Every page is claimed at once: where there is no
room, that is an error here and now, not a SIGBUS at some later write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile

SHARED_MEMORY = "/dev/shm"  # noqa: S108 files there are 0600 and have no name


def shared_file(name: str, nbytes: int) -> int:
    """Return the descriptor of `nbytes` of zeros; it is not inherited by programs.

    Args:
        name: shown in /proc for a memfd.
        nbytes: how many, all of them claimed.

    Raises:
        OSError: there is no room, or neither kind can be had.
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
    """Raise `OSError` where a file cannot grow so large; a memfd has no such bound."""
    room = os.fstatvfs(descriptor)
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and nbytes > free:
        text = f"{nbytes} bytes wanted, {free} free; make it larger"
        raise OSError(errno.ENOSPC, text, SHARED_MEMORY)


def nameless(name: str) -> int:
    """Return the descriptor of a new, empty file in memory; `name` is shown in /proc.

    Raises:
        OSError: neither kind can be had.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    place = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
    with tempfile.TemporaryFile(dir=place) as file:
        return os.dup(file.fileno())
