"""Writes records to disk in the background, many at once, when nobody needs the CPU."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from .disk import Disk, DiskError, was_quiet
from .memory import Full

__all__ = [
    "Writer",
    "let_go",
    "shared_disk",
]

# The databases that this process has open: LMDB allows each once.

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


LOGGER = logging.getLogger("penstock")
MAX_BYTES = 128 << 20
"""Waiting to be written. What comes when so many do is not kept: the trainer does not
wait for the disk, and the next epoch offers it once more."""
BATCH = 256
BATCH_BYTES = 32 << 20
GATHER_S = 0.02
"""How long the first of a batch waits for others."""
SYNC_S = 30.0
NICE = 10
"""A tenth of the weight of what trains; with 19 a busy machine never wrote."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record on its way to the disk."""

    key: bytes
    record: bytes
    done: Callable[[], object]
    """Called once it is there, or never will be."""


class Writer:
    """One thread of this process, begun with the first record.

    Args:
        disk: belongs to this process.
        about: what is stored, for people.
        off: called with the reason when nothing more can be written.
        tell: called with a text when the disk turns out to be full.
    """

    def __init__(
        self,
        disk: Disk,
        about: str,
        off: Callable[[str], object],
        tell: Callable[[str], object] = bool,
    ) -> None:
        self._disk = disk
        self._about = about
        self._off = off
        self._tell = tell
        self._lock = threading.Lock()
        self._come = threading.Condition(self._lock)
        """The first of a batch has come, or it is closed."""
        self._closing = threading.Condition(self._lock)
        self._waiting: deque[Waiting] = deque()
        self._on_way: dict[bytes, bytes] = {}
        self._nbytes = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._unsynced_since_s: float | None = None
        self.full = False
        """Whether there was no room for the last; then none is taken."""
        self.written = 0

    def offer(self, key: bytes, record: bytes, done: Callable[[], object]) -> bool:
        """Take a record, and return True; `done` is called when it is written.

        False: it is not taken, as there is no room on the disk or too many wait.
        """
        with self._lock:
            crowded = self._nbytes + len(record) > MAX_BYTES and self._waiting
            if self._closed or self.full or crowded or key in self._on_way:
                return False
            if not self._waiting:
                self._come.notify()
            self._waiting.append(Waiting(key, record, done))
            self._on_way[key] = record
            self._nbytes += len(record)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="penstock cache writer", daemon=True
                )
                self._thread.start()
        return True

    def get(self, key: bytes) -> bytes | None:
        """Return a record that is on its way; None: there is none."""
        return self._on_way.get(key)

    def close(self, wait_s: float = 10.0) -> None:
        """Write what waits, here and now; not synced. Idempotent.

        Where others use the CPU, the thread comes last: it is waited for only while it
        writes.

        Args:
            wait_s: how long that may take.
        """
        with self._lock:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._come.notify()
            self._closing.notify()
        if self._thread is not None:
            self._thread.join(wait_s)
        by_namespace = groupby(left, lambda each: each.key[:8])
        try:
            for _, batch in by_namespace:
                self._write(list(batch))
        except DiskError as error:
            self._off(str(error))

    # The writer's thread

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        reason = "the writing thread ended"
        try:
            while not self._over:
                batch = self._next()
                if batch:
                    self._write(batch)
                self._sync(after_s=SYNC_S if batch else 0.0)
        except DiskError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 training goes on without it
            reason = f"{type(error).__name__}: {error}"
        else:
            return
        self._give_up(reason)

    @property
    def _over(self) -> bool:
        with self._lock:
            return self._closed and not self._waiting

    def _next(self) -> list[Waiting]:
        """Return the next batch, of one namespace; [] where nothing came for long."""
        with self._lock:
            pause_s = None if self._unsynced_since_s is None else SYNC_S
            self._come.wait_for(lambda: self._waiting or self._closed, pause_s)
            if self._waiting and not self._closed:
                self._closing.wait_for(lambda: self._closed, GATHER_S)
            batch: list[Waiting] = []
            nbytes = 0
            while self._waiting and len(batch) < BATCH and nbytes < BATCH_BYTES:
                if batch and self._waiting[0].key[:8] != batch[0].key[:8]:
                    break
                batch.append(self._waiting.popleft())
                nbytes += len(batch[-1].record)
            return batch

    def _write(self, batch: list[Waiting]) -> None:
        records = [(each.key, each.record) for each in batch]
        try:
            self.written += self._disk.put(records, self._about)
            if self._unsynced_since_s is None:
                self._unsynced_since_s = time.monotonic()
        except Full as full:
            self.full = True
            if str(full):
                self._tell(str(full))
        finally:
            self._settle(batch)

    def _settle(self, batch: list[Waiting]) -> None:
        with self._lock:
            for each in batch:
                del self._on_way[each.key]
                self._nbytes -= len(each.record)
        for each in batch:
            with contextlib.suppress(OSError):  # the cache is closed: nobody waits
                each.done()

    def _sync(self, after_s: float) -> None:
        since = None if self._closed else self._unsynced_since_s
        if since is not None and time.monotonic() - since >= after_s:
            self._disk.sync()
            self._unsynced_since_s = None

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
        self._settle(left)
        self._off(reason)

    def __repr__(self) -> str:
        return f"<Writer: {len(self._waiting)} wait, {self.written} written>"
