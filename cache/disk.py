"""The disk tier: LMDB, shared by the processes and the jobs of a host.

    FOLDER                     locked by the one process that is writing
    FOLDER/data.mdb lock.mdb   the database: records by key, and namespaces
    FOLDER/users               locked (shared) by every process that has it open, plus
                               a byte for each namespace that one of them uses
    FOLDER/state.json          whether everything written has reached the disk

LMDB's rules (lmdb.h, "Caveats"): open it once per process, never use it across a fork,
do not map it writable (a full disk would be a SIGBUS), map it once for all sizes to
come, keep transactions short. Commits are not synced one by one. If a power cut may
have torn some, the state file shows it and the database is emptied; a killed process
tears nothing.

Records are written in the background, in batches, when the CPU is idle.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..system.file_locks import change, locked_folder, try_lock, try_lock_file
from .folder import (
    PAGE,
    SPARE,
    FolderState,
    byte_of,
    check_folder,
    check_left,
    check_ours,
    enter,
    room_of,
    shortage,
    spare_bytes,
    stretches,
    victims,
    within,
)
from .memory import Full, copied

# Reserved address space. Files are sparse, so only what is stored takes room.
MAP_BYTES = 1 << 40
MIN_MAP_BYTES = 1 << 34
MAX_READERS = 4096
# Keys read in one transaction.
STRETCH = 1000
# Free pages that are not counted as room: transactions replace pages.
MAX_SLACK_BYTES = 1 << 25
# Seconds to wait for the lease, the lock of the folder, while another process writes;
# one that takes longer was stopped.
PATIENCE_S = 30.0
# Seconds to wait before a fork; a sync to a slow disk may take longer.
FORK_PATIENCE_S = 5.0
# Most bytes waiting to be written. Records beyond that are not kept: the trainer does
# not wait for the disk, and the next epoch offers them again.
MAX_BYTES = 128 << 20
# Most records that are written at once.
BATCH = 256
# How long the first record of a batch waits for others.
GATHER_S = 0.02
# Seconds between two syncs while records keep coming.
SYNC_S = 30.0
# A tenth of the trainer's weight. With 19, nothing was written on a busy machine.
NICE = 10
# A key, its record, and what is called once that is on disk, or was dropped.
Waiting = tuple[bytes, bytes, Callable[[], object]]


class DiskError(Exception):
    """The disk tier cannot be used, or no longer; the text says why."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The records of one dataset, made by one version of code at one image size."""

    about: str
    """Description of its contents."""
    records: int = 0
    nbytes: int = 0
    """Bytes on the disk, roughly."""
    used_s: float = 0.0
    """When it was last opened or written to, in seconds since 1970."""

    @classmethod
    def parsed(cls, text: bytes | None) -> Namespace:
        """Return a stored description; an empty one if it cannot be read."""
        with suppress(ValueError, TypeError, RecursionError):
            return cls(**json.loads(text or b"{}"))
        return cls("")


class Disk:
    """One process's view of the database in a folder.

    Args:
        folder: created if needed; nothing else should be in it.
        limit: maximum bytes of the file, see `limit_for`; `put` may be given another.
        mends: whether to empty a folder that was left damaged; otherwise it is refused.
        looks: whether to look only: create and write nothing.

    Raises:
        DistrustError: the folder is not fit for use: see `folder`.
        DiskError: it cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        limit: int | None = None,
        *,
        mends: bool = True,
        looks: bool = False,
    ) -> None:
        # Other namespaces' records that this process dropped to make room.
        self.evicted = 0
        # How many caches of this process use it.
        self.caches = 0
        self.folder = folder
        with failing("opened", folder):
            check_folder(folder)
            kind = os.O_RDONLY if looks else os.O_RDWR | os.O_CREAT
            if not looks:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._users = os.open(folder / "users", kind | os.O_CLOEXEC, 0o600)
            with ExitStack() as stack:
                stack.callback(os.close, self._users)
                self._env = self._look() if looks else self._enter(mends=mends)
                stack.callback(self._env.close)
                self.limit = self.limit_for(limit)
                stack.pop_all()

    def limit_for(self, wanted: int | None) -> int:
        """Return the most bytes that the file may have for a cache that wants so many.

        Args:
            wanted: None means what it uses now, plus four fifths of what is free.

        Raises:
            DiskError: the database cannot be read.
        """
        with failing("read", self.folder):
            if wanted is None:
                wanted = (spare_bytes(self.folder) + SPARE) * 4 // 5 + self.used
            # The map bounds the file. Once it is full, nothing can be changed at all.
            return min(wanted, int(self._env.info()["map_size"]) - SPARE)

    def get(self, key: bytes) -> memoryview | None:
        """Return an unchecked copy of the record under `key`, or None.

        Raises:
            DiskError: the database or its disk is damaged.
        """
        with failing("read", self.folder), self._env.begin(buffers=True) as txn:
            record = txn.get(key)
            return None if record is None else copied(record)

    def put(
        self, batch: Sequence[tuple[bytes, bytes]], about: str, limit: int | None = None
    ) -> None:
        """Store records that are new, as many as fit.

        The file then has at most `limit` bytes; None means this disk's own limit.

        It waits until no other process writes. Transactions are short, because LMDB
        keeps in memory what one has written, until its end. As long as this is little,
        LMDB reuses the same memory. Fresh memory would take more time than the write.

        Raises:
            Full: the first does not fit; the text says why if the disk is full.
            DiskError: it cannot be written to.
        """
        with self._writing():
            for part in stretches(batch):
                records = within(part, self._room(part, limit or self.limit))
                if not records and part[0] == batch[0]:
                    raise Full(shortage(self.folder, room_of(batch[0][1])))
                self._put(records, about)
                if len(records) < len(part):
                    break

    def forget(self, key: bytes) -> None:
        """Delete a record that is damaged.

        Raises:
            DiskError: the database cannot be written to.
        """
        with self._writing(), self._env.begin(write=True) as txn:
            record = txn.pop(key)
            if record is not None:
                self._count(txn, key[:8], records=-1, nbytes=-room_of(record))

    def clear(self, namespace: bytes) -> int:
        """Delete a namespace; return how many records it had.

        Raises:
            DiskError: the database cannot be written to.
        """
        with self._writing():
            return self._drop(namespace)

    def open_namespace(self, namespace: bytes, about: str) -> Namespace:
        """Protect a namespace from eviction; return what was known about it.

        It stays in use until this process closes the disk, or ends.

        Raises:
            DiskError: the database cannot be written to.
        """
        with self._writing():
            change(self._users, fcntl.F_RDLCK, byte_of(namespace))
            with self._env.begin(write=True) as txn:
                return self._count(txn, namespace, about)

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return what is stored, by namespace.

        Raises:
            DiskError: the database cannot be read.
        """
        with failing("read", self.folder), self._env.begin(db=self._meta) as txn:
            return {bytes(name): Namespace.parsed(text) for name, text in txn.cursor()}

    def keys(self, namespace: bytes) -> Iterator[bytes]:
        """Yield the keys of a namespace in order, 1000 to a transaction.

        Raises:
            DiskError: the database cannot be read.
        """
        first = namespace
        while keys := self._keys_from(first, namespace):
            yield from keys
            first = keys[-1] + b"\0"

    @property
    def used(self) -> int:
        """Bytes of the file that are in use, in whole pages.

        Raises:
            DiskError: the database cannot be read.
        """
        with failing("read", self.folder):
            stat: dict[str, int] = self._env.stat()
            return PAGE * sum(
                stat[f"{it}_pages"] for it in ("branch", "leaf", "overflow")
            )

    def sync(self) -> None:
        """Flush everything written to the disk.

        Raises:
            DiskError: the disk fails, or another process holds the lease.
        """
        if FolderState.read(self.folder).clean:
            return
        with failing("written", self.folder), locked_folder(self.folder, PATIENCE_S):
            self._env.sync(True)  # noqa: FBT003 its only argument
            FolderState.write(self.folder, clean=True)

    def shrink(self) -> None:
        """Return the free pages of the file to the disk, and close.

        If somebody else has it open, the pages stay.

        Raises:
            DiskError: the disk is full, or fails.
        """
        if try_lock_file(self._users, fcntl.LOCK_EX):
            with self._writing():
                copy = self.folder / "compact"
                shutil.rmtree(copy, ignore_errors=True)  # left by a killed process
                copy.mkdir()
                self._env.copy(str(copy), compact=True)
                self._env.close()
                (copy / "data.mdb").replace(self.folder / "data.mdb")
                (self.folder / "lock.mdb").unlink(missing_ok=True)
                copy.rmdir()
        self.close()

    def close(self) -> None:
        """Close it. Idempotent. Call `sync` first, or a power cut empties it."""
        if self._users >= 0:
            self._env.close()
            os.close(self._users)
            self._users = -1

    # Opening

    def _enter(self, *, mends: bool) -> Any:
        enter(self.folder, self._users, mends=mends)
        env = self._opened()
        # Opening it is a write, even if it exists.
        with locked_folder(self.folder, PATIENCE_S):
            self._meta = env.open_db(b"namespaces")
        env.reader_check()
        return env

    def _look(self) -> Any:
        """Open it read-only. If nobody else has it open, no lock file is needed."""
        check_ours(self.folder)
        is_alone = try_lock_file(self._users, fcntl.LOCK_EX)
        if is_alone:
            check_left(self.folder)
        env = self._opened(readonly=True, create=False, lock=not is_alone)
        self._meta = env.open_db(b"namespaces", create=False)
        return env

    def _opened(self, **further: Any) -> Any:
        import lmdb

        size = MAP_BYTES
        while True:
            try:
                return lmdb.open(
                    str(self.folder),
                    map_size=size,
                    max_dbs=1,
                    max_readers=MAX_READERS,
                    mode=0o600,
                    metasync=False,
                    sync=False,
                    **further,
                )
            except lmdb.MemoryError:  # a limit of address space (ulimit -v)
                if size <= MIN_MAP_BYTES:
                    raise
                size //= 4

    # Writing: the lease is held

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lease; before anything is written, say that it is not synced."""
        with failing("written", self.folder), locked_folder(self.folder, PATIENCE_S):
            FolderState.write(self.folder, clean=False)
            yield

    def _put(self, records: Sequence[tuple[bytes, bytes]], about: str) -> None:
        """Store records in one transaction; those that are there stay."""
        with self._env.begin(write=True) as txn:
            new = [pair for pair in records if txn.put(*pair, overwrite=False)]
            for name, pairs in groupby(new, lambda pair: pair[0][:8]):
                sizes = [room_of(record) for _, record in pairs]
                self._count(txn, name, about, records=len(sizes), nbytes=sum(sizes))

    def _room(self, part: Sequence[tuple[bytes, bytes]], limit: int) -> int:
        """Return the bytes that a transaction may store; evict unused namespaces."""
        stat: dict[str, int] = self._env.stat()
        # Pages that it replaces or splits.
        churn = PAGE * min(len(part), stat["branch_pages"] + stat["leaf_pages"])
        room = self._free(limit, churn)
        wanted_bytes = limit // 16 - room
        if wanted_bytes <= 0:
            return room
        its_own = {key[:8] for key, _ in part}
        # Opened again, it has locks of its own: this process, too, may use a namespace.
        # Whoever begins to use one waits for the lease, and so not for these locks.
        with open(self.folder / "users", "r+b") as users:
            resting = {
                name: (namespace.used_s, namespace.nbytes)
                for name, namespace in self.namespaces().items()
                if name not in its_own and try_lock(users.fileno(), byte_of(name))
            }
        for name in victims(resting, time.time(), wanted_bytes):
            self.evicted += self._drop(name)
        return self._free(limit, churn)

    def _free(self, limit: int, churn: int) -> int:
        """Return the bytes the file may still grow, plus those free within it.

        Pages that the last transaction replaced become free only after the next one.
        """
        file: int = PAGE * (self._env.info()["last_pgno"] + 1)
        slack = min(limit // 16, MAX_SLACK_BYTES) + 2 * churn
        reusable = max(0, file - self.used - slack)
        return min(limit - file, spare_bytes(self.folder)) + reusable - 2 * churn

    def _drop(self, namespace: bytes) -> int:
        """Delete a namespace, about a thousand records to a transaction."""
        count = 0
        while keys := self._keys_from(namespace, namespace):
            with self._env.begin(write=True) as txn:
                count += sum(txn.delete(key) for key in keys)
        with self._env.begin(write=True, db=self._meta) as txn:
            txn.delete(namespace)
        return count

    def _keys_from(self, first: bytes, namespace: bytes) -> list[bytes]:
        with failing("read", self.folder), self._env.begin() as txn:
            cursor = txn.cursor()
            if not cursor.set_range(first):
                return []
            keys = islice(cursor.iternext(keys=True, values=False), STRETCH)
            return list(takewhile(lambda key: key.startswith(namespace), keys))

    def _count(
        self,
        txn: Any,
        namespace: bytes,
        about: str = "",
        *,
        records: int = 0,
        nbytes: int = 0,
    ) -> Namespace:
        """Add to the totals of a namespace; return its previous ones."""
        before = Namespace.parsed(txn.get(namespace, db=self._meta))
        after = replace(
            before,
            about=about or before.about,
            records=before.records + records,
            nbytes=before.nbytes + nbytes,
            used_s=time.time(),
        )
        txn.put(namespace, json.dumps(asdict(after)).encode(), db=self._meta)
        return before


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
        self.forget = disk.forget  # what is still on its way is not damaged
        self._off, self._tell = off, tell
        # Guards the records.
        self._lock = threading.Lock()
        # Records that wait, in order of arrival.
        self._waiting: deque[Waiting] = deque()
        # These, and those that are being written.
        self._on_way: dict[bytes, bytes] = {}
        self._nbytes = 0
        # Set while records wait, and on closing.
        self._arrival = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._unsynced_since_s: float | None = None
        # Whether the last record found no room; no more are accepted then.
        self.full = False

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
            self._arrival.set()
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
            self._arrival.set()

    def _next(self) -> list[Waiting]:
        """Take the next batch; [] if nothing waits."""
        with self._lock:
            count = min(BATCH, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            if not self._waiting and not self._closed.is_set():
                self._arrival.clear()
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
            with suppress(OSError):  # the cache is closed: nobody is waiting
                done()

    def _give_up(self, reason: str) -> None:
        self._end()
        while batch := self._next():
            self._settle(batch)
        self._off(reason)

    # The writer's thread

    def _work(self) -> None:
        with suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            while True:
                self._arrival.wait(None if self._unsynced_since_s is None else SYNC_S)
                if self._closed.wait(GATHER_S):
                    return
                if batch := self._next():
                    self._write(batch)
                since_s = None if self._closed.is_set() else self._unsynced_since_s
                if since_s is not None and (
                    not batch or time.monotonic() - since_s >= SYNC_S
                ):
                    self._disk.sync()
                    self._unsynced_since_s = None
        except DiskError as error:
            self._give_up(str(error))
        except Exception as error:  # noqa: BLE001 training goes on without it
            self._give_up(f"{type(error).__name__}: {error}")


class Process:
    """What this process has open, and which of its threads call LMDB.

    LMDB allows each database to be open once per process, and py-lmdb's
    `Environment.close` waits until no thread is inside a call of it. A forked child
    lacks those threads, so it would wait forever; yet it must close the database before
    it can open it again. So a fork waits for calls in flight, and the child closes what
    it inherited, and begins with a `Process` of its own.
    """

    def __init__(self) -> None:
        # The open disks by real path.
        self.disks: dict[str, Disk] = {}
        self.opening = threading.RLock()
        # Guards the calls in flight, by place, and how many threads are about to fork.
        self.changed = threading.Condition()
        self.calls: Counter[str] = Counter()
        self.forking = 0


_process = Process()
_mine = threading.local()
# Those that sources have open, by path. Weak: later, the user may open one another way.
databases: WeakValueDictionary[str, Any] = WeakValueDictionary()


def opening() -> AbstractContextManager[object]:
    """Return the lock that is held while a cache or its disk is opened or closed."""
    return _process.opening


def shared_disk(folder: Path, limit: int | None) -> Disk:
    """Return the disk of a folder, opening it unless another cache already has.

    Raises:
        DistrustError: the folder is not fit for use.
        DiskError: it cannot be opened.
    """
    path, disks = os.path.realpath(folder), _process.disks
    with opening():
        disk = disks[path] = disks.get(path) or Disk(folder, limit)
        disk.caches += 1
        return disk


def let_go(disk: Disk) -> None:
    """Close a disk, unless another cache still uses it."""
    with opening():
        disk.caches -= 1
        if not disk.caches:
            _process.disks.pop(os.path.realpath(disk.folder), None)
            disk.close()


@contextmanager
def calling(place: str) -> Iterator[None]:
    """Call LMDB for the database at a place: a fork waits until that is over.

    Waits first for a pending fork, unless nested in another such block.
    """
    process, depth = _process, getattr(_mine, "depth", 0)
    with process.changed:
        process.changed.wait_for(lambda: depth or not process.forking)
        process.calls[place] += 1
    _mine.depth = depth + 1
    try:
        yield
    finally:
        _mine.depth = depth
        with process.changed:
            process.calls[place] -= 1
            process.changed.notify_all()


@contextmanager
def failing(what: str, folder: Path) -> Iterator[None]:
    """Raise `DiskError` for whatever the system or LMDB raises inside; see `calling`.

    Raises:
        DiskError: the system or LMDB raised inside; the text says what cannot be done.
    """
    import lmdb

    try:
        with calling(str(folder)):
            yield
    except (OSError, lmdb.Error) as error:
        raise DiskError(
            f"the cache in {folder} cannot be {what} ({type(error).__name__}: {error})"
        ) from error


def _before() -> None:
    _process.changed.acquire()  # released after the fork
    _process.forking += 1
    _process.changed.wait_for(lambda: not _process.calls.total(), FORK_PATIENCE_S)


def _in_parent() -> None:
    _process.forking -= 1
    _process.changed.notify_all()
    _process.changed.release()


def _in_child() -> None:
    global _process
    parent, _process = _process, Process()
    opened = dict(databases) | {str(d.folder): d for d in parent.disks.values()}
    databases.clear()
    for place in opened.keys() - +parent.calls:
        opened[place].close()  # LMDB sees another process's: no file changes


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_in_parent, after_in_child=_in_child
    )
