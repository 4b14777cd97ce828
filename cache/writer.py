"""Writes records to disk in the background, in batches, when the CPU is idle."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, islice, takewhile

from .disk import Disk, DiskError
from .memory import Full

MAX_BYTES = 128 << 20
"""Most bytes waiting to be written. Records beyond that are not kept: the trainer does
not wait for the disk, and the next epoch offers them again."""
BATCH = 256
"""Most records that are written at once."""
GATHER_S = 0.02
"""How long the first record of a batch waits for others."""
SYNC_S = 30.0
"""Seconds between two syncs while records keep coming."""
NICE = 10
"""A tenth of the trainer's weight. With 19, nothing was written on a busy machine."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record on its way to the disk."""

    key: bytes
    record: bytes
    done: Callable[[], object]
    """Called once the record is on disk, or was dropped."""


class Writer:
    """One thread of this process, started with the first record.

    Args:
        disk: the disk tier of this process.
        about: what is stored, in words.
        off: called with the reason when nothing more can be written.
        tell: called with a warning when the disk turns out to be full.
        limit: largest size of the file in bytes; None means the disk's own limit.
    """

    def __init__(
        self,
        disk: Disk,
        about: str,
        off: Callable[[str], object],
        tell: Callable[[str], object] = bool,
        limit: int | None = None,
    ) -> None:
        self._disk = disk
        self._about = about
        self._limit = limit
        self._off = off
        self._tell = tell
        self._lock = threading.Lock()
        # Notified when the first record of a batch arrives, and on closing.
        self._come = threading.Condition(self._lock)
        self._closing = threading.Condition(self._lock)
        # In order of arrival; the first `_writing` are being written.
        self._on_way: dict[bytes, Waiting] = {}
        self._writing = 0
        self._nbytes = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._unsynced_since_s: float | None = None
        self.full = False
        """Whether the last record found no room; no more are accepted then."""

    def offer(self, key: bytes, record: bytes, done: Callable[[], object]) -> bool:
        """Accept a record; `done` is called once it is written, or was dropped.

        Returns:
            False if it was not accepted: the disk is full, too many bytes are waiting,
            this very record is waiting already, or the writer is closed.
        """
        with self._lock:
            crowded = self._nbytes + len(record) > MAX_BYTES and self._waits
            if self._closed or self.full or crowded or key in self._on_way:
                return False
            self._on_way[key] = Waiting(key, record, done)
            self._nbytes += len(record)
            self._come.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="penstock cache writer", daemon=True
                )
                self._thread.start()
        return True

    def get(self, key: bytes) -> bytes | None:
        """Return a record that is waiting to be written, or None."""
        waiting = self._on_way.get(key)
        return None if waiting is None else waiting.record

    def close(self, wait_s: float = 10.0) -> None:
        """Write what is waiting, in the calling thread, without a sync. Idempotent.

        On a busy machine the background thread hardly runs, so this waits for it only
        while it writes.

        Args:
            wait_s: how long to wait for it, in seconds.
        """
        left = self._end()
        if self._thread is not None:
            self._thread.join(wait_s)
        try:
            for _, batch in groupby(left, lambda each: each.key[:8]):
                self._write(list(batch))
        except DiskError as error:
            self._settle([each for each in left if each.key in self._on_way])
            self._off(str(error))

    @property
    def _waits(self) -> int:
        """Number of records that the thread has not taken yet."""
        return len(self._on_way) - self._writing

    def _end(self) -> list[Waiting]:
        """Close it; return the waiting records, which the caller must settle now."""
        with self._lock:
            self._closed = True
            left = list(self._on_way.values())[self._writing :]
            self._writing = len(self._on_way)
            self._come.notify()
            self._closing.notify()
            return left

    # The writer's thread

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            while not self._closed:
                batch = self._next()
                if batch:
                    self._write(batch)
                self._sync(after_s=SYNC_S if batch else 0.0)
        except DiskError as error:
            self._give_up(str(error))
        except Exception as error:  # noqa: BLE001 training goes on without it
            self._give_up(f"{type(error).__name__}: {error}")

    def _next(self) -> list[Waiting]:
        """Return the next batch, of one namespace; [] when closed, or to sync."""
        with self._lock:
            pause_s = None if self._unsynced_since_s is None else SYNC_S
            self._come.wait_for(lambda: self._waits or self._closed, pause_s)
            if self._waits and not self._closed:
                self._closing.wait_for(lambda: self._closed, GATHER_S)
            if self._closed:
                return []
            first = list(islice(self._on_way.values(), BATCH))
            batch = list(takewhile(lambda e: e.key[:8] == first[0].key[:8], first))
            self._writing = len(batch)
            return batch

    def _write(self, batch: list[Waiting]) -> None:
        records = [(each.key, each.record) for each in batch]
        try:
            self._disk.put(records, self._about, self._limit)
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
            self._writing -= len(batch)
        for each in batch:
            with contextlib.suppress(OSError):  # the cache is closed: nobody is waiting
                each.done()

    def _sync(self, after_s: float) -> None:
        since = None if self._closed else self._unsynced_since_s
        if since is not None and time.monotonic() - since >= after_s:
            self._disk.sync()
            self._unsynced_since_s = None

    def _give_up(self, reason: str) -> None:
        self._settle(self._end())
        self._off(reason)
