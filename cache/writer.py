"""Writes records to disk in the background, in batches, when the CPU is idle."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

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


Waiting = tuple[bytes, bytes, Callable[[], object]]
"""A key, its record, and what is called once that is on disk, or was dropped."""


class Writer:
    """One thread of this process, started with the first record.

    Args:
        disk: the disk tier of this process.
        about: what is stored, in words.
        limit: largest size of the file in bytes.
        off: called with the reason when nothing more can be written.
        tell: called with a warning when the disk turns out to be full.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        about: str,
        limit: int,
        off: Callable[[str], object],
        tell: Callable[[str], object],
    ) -> None:
        self._disk, self._about, self._limit = disk, about, limit
        self._off, self._tell = off, tell
        # Guards the records.
        self._lock = threading.Lock()
        # Records that wait, in order of arrival.
        self._waiting: deque[Waiting] = deque()
        # These, and those that are being written.
        self._on_way: dict[bytes, bytes] = {}
        self._nbytes = 0
        # Set while records wait, and on closing.
        self._come = threading.Event()
        self._closed = threading.Event()
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
            crowded = self._nbytes + len(record) > MAX_BYTES and self._waiting
            if self._closed.is_set() or self.full or crowded or key in self._on_way:
                return False
            self._on_way[key] = record
            self._nbytes += len(record)
            self._waiting.append((key, record, done))
            self._come.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="penstock cache writer", daemon=True
                )
                self._thread.start()
        return True

    def get(self, key: bytes) -> bytes | memoryview | None:
        """Return an unchecked record that waits to be written or is on disk, or None.

        Raises:
            DiskError: the database or its disk is damaged.
        """
        return self._on_way.get(key) or self._disk.get(key)

    def forget(self, key: bytes) -> None:
        """Delete a record that is damaged.

        Raises:
            DiskError: the database cannot be written to.
        """
        self._disk.forget(key)

    def close(self, wait_s: float = 10.0) -> None:
        """Write what is waiting, in the calling thread, without a sync. Idempotent.

        On a busy machine the background thread hardly runs, so this waits for it only
        while it writes.

        Args:
            wait_s: how long to wait for it, in seconds.
        """
        self._end()
        if self._thread is not None:
            self._thread.join(wait_s)
        try:
            while batch := self._next():
                self._write(batch)
        except DiskError as error:
            self._give_up(str(error))

    def _end(self) -> None:
        with self._lock:
            self._closed.set()
            self._come.set()

    def _next(self) -> list[Waiting]:
        """Take the next batch; [] if nothing waits."""
        with self._lock:
            count = min(BATCH, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            if not self._waiting and not self._closed.is_set():
                self._come.clear()
            return batch

    def _write(self, batch: list[Waiting]) -> None:
        records = [(key, record) for key, record, _ in batch]
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
            for key, record, _ in batch:
                del self._on_way[key]
                self._nbytes -= len(record)
        for *_, done in batch:
            with contextlib.suppress(OSError):  # the cache is closed: nobody is waiting
                done()

    def _give_up(self, reason: str) -> None:
        self._end()
        while batch := self._next():
            self._settle(batch)
        self._off(reason)

    # The writer's thread

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            while True:
                self._come.wait(None if self._unsynced_since_s is None else SYNC_S)
                if self._closed.wait(GATHER_S):
                    return
                if batch := self._next():
                    self._write(batch)
                self._sync(after_s=SYNC_S if batch else 0.0)
        except DiskError as error:
            self._give_up(str(error))
        except Exception as error:  # noqa: BLE001 training goes on without it
            self._give_up(f"{type(error).__name__}: {error}")

    def _sync(self, after_s: float) -> None:
        since_s = None if self._closed.is_set() else self._unsynced_since_s
        if since_s is not None and time.monotonic() - since_s >= after_s:
            self._disk.sync()
            self._unsynced_since_s = None
