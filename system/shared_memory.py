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
import secrets

SHARED_MEMORY = "/dev/shm"  # noqa: S108 files there are 0600 and lose their name at once


def shared_file(name: str, nbytes: int) -> int:
    """Return the descriptor of `nbytes` of zeros; it is not inherited by programs.

    Args:
        name: shown in /proc for a memfd.
        nbytes: how many, all of them claimed.

    Raises:
        OSError: there is no room, or neither kind can be had.
    """
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        descriptor = _nameless(nbytes)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _nameless(nbytes: int) -> int:
    """Return a new file in shared memory that has no name any more."""
    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        text = f"{nbytes} bytes wanted, {free} free; make it larger"
        raise OSError(errno.ENOSPC, text, SHARED_MEMORY)
    path = os.path.join(SHARED_MEMORY, f"penstock-{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return descriptor
