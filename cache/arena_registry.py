"""How the processes of a host find one arena, without a server or named memory.

An arena is a file without a name. Any process that has it open can pass it on through
/proc, so only those processes are recorded: one small file for each cache, in a folder
of this user's own, guarded by `flock`. The memory disappears with the last process,
however it ended; the next one to look overwrites the file that listed it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..system.file_locks import lock_file
from ..system.runtime_folder import runtime_folder
from ..system.shared_memory import nameless
from .memory import Arena

PATIENCE_S = 5.0
"""Seconds to wait for another process that reads or writes a list."""
MAX_BYTES = 1 << 20
"""Largest size of a list of holders; longer ones are not ours."""


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

    Args:
        name: name of the cache; letters and digits.
        capacity: bytes of records in a new arena.
        samples: expected number of records in a new arena.

    Raises:
        OSError: there is not enough memory, or the list cannot be opened.
        TimeoutError: another process keeps the list locked.
    """
    place = runtime_folder()
    if place is None or not Path("/proc/self/fd").is_dir():
        return create(capacity, samples)
    with listed(place / name) as holders:
        for holder in holders:
            descriptor = holder.open()
            if descriptor is None:
                continue
            with suppress(ValueError):
                arena = Arena(descriptor)
                mine = Holder.me(descriptor)
                holders[:] = [*alive(holders), mine]
                return arena, mine
            os.close(descriptor)
        arena, mine = create(capacity, samples)
        holders[:] = [mine]
        return arena, mine


def create(capacity: int, samples: int) -> tuple[Arena, Holder]:
    """Return a new arena that no other process knows about.

    Raises:
        OSError: there is not enough memory.
    """
    descriptor = nameless("penstock-cache")
    try:
        return Arena(descriptor, capacity, samples), Holder.me(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def leave(name: str, holder: Holder) -> None:
    """Remove this process from the list of those that have an arena open."""
    place = runtime_folder()
    if place is None or not (place / name).exists():
        return
    # If it cannot be locked, the next process to look finds that we are gone.
    with suppress(TimeoutError), listed(place / name) as holders:
        holders[:] = [each for each in alive(holders) if each != holder]


def alive(holders: list[Holder]) -> list[Holder]:
    """Return the holders that still have their file open."""
    found = []
    for holder in holders:
        descriptor = holder.open()
        if descriptor is not None:
            os.close(descriptor)
            found.append(holder)
    return found


@contextmanager
def listed(path: Path) -> Iterator[list[Holder]]:
    """Lock the list and read it; write it back at the end of the `with`.

    Raises:
        OSError: the list cannot be opened or written.
        TimeoutError: another process keeps it locked.
    """
    descriptor = opened(path)
    try:
        holders = read(descriptor)
        yield holders
        text = json.dumps([asdict(holder) for holder in holders]).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
        if not holders:
            path.unlink(missing_ok=True)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have it open, too
        os.close(descriptor)


def opened(path: Path) -> int:
    """Open and lock the list; return its descriptor.

    Raises:
        OSError: it cannot be opened.
        TimeoutError: another process has held it for too long.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags, 0o600)
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            lock_file(descriptor, fcntl.LOCK_EX, PATIENCE_S)
            if is_at(path, descriptor):
                stack.pop_all()
                return descriptor
        # Its last reader removed it while we waited: try the file there now.


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether this open file is the one at `path`, which may be gone."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def read(descriptor: int) -> list[Holder]:
    """Return the holders on the list; none if it is unreadable."""
    try:
        entries = json.loads(os.pread(descriptor, MAX_BYTES, 0) or b"[]")
        return [Holder(**{k: int(v) for k, v in each.items()}) for each in entries]
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return []
