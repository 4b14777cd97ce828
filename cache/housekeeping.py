"""What people do with a cache on disk: list it, check it, empty it.

Listing only reads. Checking deletes damaged records. Only `clear` deletes a database
that it cannot read, and only one that penstock wrote.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path

from ..errors import PenstockError
from ..system.file_locks import try_lock_file
from .disk import Disk, DiskError, Namespace
from .folder import SLOW_S, DistrustError, check_folder, folder_in, wipe
from .record import RecordError, check


class NoCacheError(PenstockError):
    """There is no cache in the folder, or it cannot be read."""


def entries(folder: Path) -> list[tuple[str, Namespace]]:
    """Return what is stored, most recently used first. Writes nothing.

    Returns:
        For each dataset, its functions and one image size: the 8 bytes of the
        namespace, in hexadecimal, and what is known about it.

    Raises:
        NoCacheError: there is no cache, another version of penstock wrote it, or it
            cannot be read.
    """
    recent = sorted(held(existing(folder)).items(), key=lambda item: -item[1].used_s)
    return [(name.hex(), namespace) for name, namespace in recent]


def verify(folder: Path, progress: Callable[[int], object]) -> tuple[int, int]:
    """Read every record and drop the damaged ones: their samples are computed again.

    Args:
        folder: the folder given to `.cache(disk=...)`.
        progress: called with the number of records read, every two seconds.

    Returns:
        how many records were whole, and how many were damaged.

    Raises:
        NoCacheError: there is no cache, another version of penstock wrote it, or the
            database itself is damaged.
    """
    count = damaged_count = 0
    shown_s = time.monotonic()
    with opened(existing(folder)) as disk:
        keys = chain.from_iterable(map(disk.keys, disk.namespaces()))
        for count, key in enumerate(keys, 1):
            if (record := disk.get(key)) is None:
                continue  # a job may have dropped it
            try:
                check(record, key)
            except RecordError:
                disk.forget(key)
                damaged_count += 1
            if time.monotonic() - shown_s > SLOW_S:
                progress(count)
                shown_s = time.monotonic()
    return count - damaged_count, damaged_count


def clear(folder: Path, name: str | None) -> int:
    """Delete a namespace, or all of them; return how many records they had.

    The space returns to the disk, unless a job has the cache open: then new records
    reuse it.

    Raises:
        NoCacheError: there is no cache, no such namespace in it, or it cannot be used.
    """
    place = existing(folder)
    if name is None:
        return emptied(place)
    names = [namespace.hex() for namespace in held(place)]
    if name not in names:
        raise NoCacheError(
            f"{folder} holds no {name!r}; it holds {', '.join(names) or 'nothing'}"
        )
    with opened(place) as disk:
        count = disk.clear(bytes.fromhex(name))
        disk.shrink()
    return count


def existing(folder: Path) -> Path:
    """Return the place of a cache's database.

    Raises:
        NoCacheError: there is no cache.
    """
    place = folder_in(folder)
    if not (place / "users").exists() or not (place / "state.json").exists():
        raise NoCacheError(
            f"there is no cache in {folder}; give the folder passed to .cache(disk=...)"
        )
    return place


@contextmanager
def opened(place: Path, *, looks: bool = False) -> Iterator[Disk]:
    """Open a database without emptying one.

    Raises:
        NoCacheError: it cannot be used, or not be read.
    """
    try:
        with closing(Disk(place, mends=False, looks=looks)) as disk:
            yield disk
    except DistrustError as error:
        raise NoCacheError(f"{error}; nothing was changed") from error
    except DiskError as error:
        raise NoCacheError(str(error)) from error


def held(place: Path) -> dict[bytes, Namespace]:
    """Return what a database holds. Writes nothing.

    Raises:
        NoCacheError: it cannot be read.
    """
    if not (place / "data.mdb").exists():  # it was emptied
        return {}
    with opened(place, looks=True) as disk:
        return disk.namespaces()


def emptied(place: Path) -> int:
    """Delete all that a database holds, whatever its state.

    Returns:
        its number of records, if known.

    Raises:
        NoCacheError: the folder is not fit for use (see `check_folder`), or the
            database of a running job cannot be used.
    """
    records = 0
    with suppress(NoCacheError):
        records = sum(namespace.records for namespace in held(place).values())
    try:
        check_folder(place)
    except DistrustError as error:
        raise NoCacheError(str(error)) from error
    with open(place / "users", "r+b") as users:
        if try_lock_file(users.fileno(), fcntl.LOCK_EX):  # no job has it open
            wipe(place)
            return records
    with opened(place) as disk:
        return sum(disk.clear(name) for name in disk.namespaces())
