"""What people do with a cache on disk: look into it, check it, empty it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .disk import Disk, DiskError, Namespace
from .folder import DistrustError
from .record import RecordError, check
from .tiers import FOLDER

__all__ = ["CacheEntry", "NoCacheError", "Verification", "clear", "entries", "verify"]


class NoCacheError(Exception):
    """There is no cache where one was looked for, or it cannot be opened."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One namespace: what one data set and its functions left, at one image size."""

    name: str
    """Hexadecimal."""
    held: Namespace


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of all records found."""

    whole: int
    damaged: int
    """Dropped: their samples are computed anew."""
    told: str | None
    """What was amiss with the database itself, which was then emptied."""


@contextmanager
def opened(folder: Path) -> Iterator[Disk]:
    """Open the cache in a folder, as `.cache(disk=folder)` would, but make none."""
    place = folder if folder.name == FOLDER else folder / FOLDER
    if not (place / "state.json").exists():
        raise NoCacheError(
            f"there is no cache in {folder}; give the folder that .cache(disk=...) has"
        )
    try:
        disk = Disk(place)
    except (DiskError, DistrustError) as error:
        raise NoCacheError(str(error)) from error
    try:
        yield disk
    except DiskError as error:
        raise NoCacheError(str(error)) from error
    finally:
        disk.close()


def entries(folder: Path) -> list[CacheEntry]:
    """Return what is stored, what was used last first.

    Raises:
        NoCacheError: there is none.
    """
    with opened(folder) as disk:
        found = [
            CacheEntry(name.hex(), held) for name, held in disk.namespaces().items()
        ]
        return sorted(found, key=lambda entry: -entry.held.used_s)


def verify(folder: Path, progress: Callable[[int], object]) -> Verification:
    """Read every record and drop those that are damaged.

    Args:
        folder: that `.cache(disk=...)` was given.
        progress: called with the number of records looked at, after each.

    Raises:
        NoCacheError: there is none.
    """
    with opened(folder) as disk:
        seen = damaged = 0
        for name in disk.namespaces():
            for key in disk.keys(name):
                damaged += not is_whole(disk, key)
                seen += 1
                progress(seen)
        disk.sync()
        return Verification(seen - damaged, damaged, disk.told)


def is_whole(disk: Disk, key: bytes) -> bool:
    """Look at one record, and drop it if it is damaged."""
    record = disk.get(key)
    try:
        if record is not None:
            check(record, key)
    except RecordError:
        disk.forget(key)
        return False
    return True


def clear(folder: Path, name: str | None) -> int:
    """Delete a namespace, or all; return how many records that were.

    Raises:
        NoCacheError: there is no cache, or no such namespace in it.
    """
    with opened(folder) as disk:
        held = disk.namespaces()
        wanted = [each for each in held if name is None or each.hex() == name]
        if name is not None and not wanted:
            known = ", ".join(each.hex() for each in held) or "nothing"
            raise NoCacheError(f"{folder} holds no {name!r}; it holds {known}")
        dropped = sum(disk.clear(each) for each in wanted)
        disk.sync()
        return dropped
