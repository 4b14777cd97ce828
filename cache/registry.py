"""The databases that this process has open: LMDB allows each once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from .disk import Disk
from .in_flight import was_quiet

__all__ = ["let_go", "shared_disk"]

_open: dict[str, tuple[Disk, int]] = {}
"""By real path: the disk, and how many caches use it."""
_lock = threading.Lock()


def shared_disk(folder: Path, limit: int | None) -> Disk:
    """Return the disk of a folder, opened now or before by another cache.

    Raises:
        DistrustError: the folder is not fit.
        DiskError: it cannot be opened.
    """
    path = os.path.realpath(folder)
    with _lock:
        disk, users = _open.get(path, (None, 0))
        if disk is None:
            disk = Disk(folder, limit)
        _open[path] = disk, users + 1
        return disk


def let_go(disk: Disk) -> None:
    """Close a disk, unless another cache still uses it."""
    path = os.path.realpath(disk.folder)
    with _lock:
        _, users = _open.get(path, (disk, 1))
        if users > 1:
            _open[path] = disk, users - 1
            return
        _open.pop(path, None)
    disk.close()


def _forget() -> None:
    """In a forked child: an environment must not be used over a fork.

    LMDB knows that it is another process' and lets go of it without touching the files;
    unless that is done it takes it for open, and opens no other.
    """
    global _open, _lock
    inherited, _open, _lock = _open, {}, threading.Lock()
    for disk, _ in inherited.values() if was_quiet() else ():
        disk.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
