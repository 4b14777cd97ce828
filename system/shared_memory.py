"""Memory that processes share, as a descriptor: a memfd, or a file without a name.

By its title, other processes of the user find it in /proc. Only the machine's memory
limits a memfd. If the system refuses one, a file in /dev/shm takes its place, which no
other process finds. No other user can open it. It never has a name, so it disappears
when the last process that has it open ends. `shared_file` allocates all pages at once,
so a lack of room is an error there, not a SIGBUS at some later write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path

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
        room = os.fstatvfs(descriptor)
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and nbytes > free:  # a memfd has no blocks, and no such limit
            text = f"{nbytes} bytes needed, {free} free; make {SHARED_MEMORY} larger"
            raise OSError(errno.ENOSPC, text, SHARED_MEMORY)  # noqa: TRY301 closed below
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def nameless(title: str) -> int:
    """Return a descriptor of a new, empty file in memory; see `titled`.

    Raises:
        OSError: the system offers neither kind.
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create(title, os.MFD_CLOEXEC)
    place = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
    with tempfile.TemporaryFile(dir=place) as file:
        return os.dup(file.fileno())


def titled(title: str, pid: int | str = "[0-9]*") -> Iterator[int]:
    """Yield descriptors of the memfds of that title that this user's processes hold.

    Args:
        title: as given to `nameless`.
        pid: the process that holds it; by default, all processes are looked at.
    """
    link = f"/memfd:{title} (deleted)"
    for path in glob(f"/proc/{pid}/fd/*"):
        with contextlib.suppress(OSError):  # it may be closed meanwhile
            if os.readlink(path) != link:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if (
                os.readlink(f"/proc/self/fd/{descriptor}") == link
                and os.fstat(descriptor).st_uid == os.getuid()
            ):
                yield descriptor
            else:
                os.close(descriptor)


def runtime_folder() -> Path | None:
    """Return a folder that belongs to this user, creating it if needed.

    The folder is owned by this very user, is not a link, and nobody else may look into
    it. If `XDG_RUNTIME_DIR` names a folder that is missing or not usable (SLURM, su and
    `docker -e` pass it on), the folder for temporary files is used instead. Processes
    with the same environment therefore find the same folder.

    Returns:
        None if no such folder can be used.
    """
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.access(root, os.W_OK | os.X_OK):
        root = tempfile.gettempdir()
    place = Path(root, f"penstock-{os.getuid()}")
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return place if ours and not status.st_mode & 0o077 else None
