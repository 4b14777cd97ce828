"""The tier on local disk: LMDB, shared by the processes and the jobs of a host.

    FOLDER/data.mdb lock.mdb   the database: records by key, and what namespaces hold
    FOLDER/users               locked (shared) by every process that has it open
    FOLDER/writer              locked by the one process that is writing
    FOLDER/state.json          whether all that was written is on the disk

LMDB's rules (lmdb.h, "Caveats"): opened once a process, never used over a fork, not
mapped writable (a full disk would be a SIGBUS), mapped once for all sizes to come, no
long transactions. Commits are not synced one by one: what a power cut may have torn is
found by the state file, and emptied; a killed process tears nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

from .folder import (
    VERSION,
    DistrustError,
    FolderState,
    boot_id,
    check_folder,
    check_pages,
    leased,
    shortage,
    spare_bytes,
)
from .memory import Full, copied, victims

__all__ = [
    "Disk",
    "DiskError",
    "Namespace",
    "failing",
    "was_quiet",
]

# Calls of LMDB: what they raise, and how many are going on when this process forks.
#
# py-lmdb's `Environment.close` waits until no thread is in a call of it. In a forked
# child those threads are not there, so it would wait for ever; and it must be closed
# there before it can be opened anew.

PATIENCE_S = 5.0
"""Before a fork; a sync to a slow disk may take longer."""

_lock = threading.Lock()
_changed = threading.Condition(_lock)
_calls = 0
_forking = 0
"""Threads that are about to."""
_quiet = True
"""Whether this process was forked while none was in flight."""
_mine = threading.local()


class DiskError(Exception):
    """The tier cannot be used, or not any more; the text says why."""


class failing:  # noqa: N801 to be read in a `with`
    """Turns whatever the system or LMDB raises within into `DiskError`.

    It waits for a fork that is due, unless it stands within another.
    """

    __slots__ = ("_folder", "_what")

    def __init__(self, what: str, folder: Path) -> None:
        self._what = what
        self._folder = folder

    def __enter__(self) -> None:
        global _calls  # noqa: PLW0603 one a process
        depth = getattr(_mine, "depth", 0)
        with _lock:
            while _forking and not depth:
                _changed.wait()
            _calls += 1
        _mine.depth = depth + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _calls  # noqa: PLW0603 one a process
        _mine.depth -= 1
        with _lock:
            _calls -= 1
            if _forking and not _calls:
                _changed.notify_all()
        if error is not None:
            self._translate(error)

    def _translate(self, error: BaseException) -> None:
        import lmdb

        if isinstance(error, OSError | lmdb.Error):
            raise DiskError(
                f"the cache in {self._folder} cannot be {self._what}"
                f" ({type(error).__name__}: {error})"
            ) from error


def was_quiet() -> bool:
    """Whether a forked child may close what it inherited."""
    return _quiet


def _before() -> None:
    global _forking  # noqa: PLW0603 one a process
    _changed.acquire()  # until it has forked
    _forking += 1
    _changed.wait_for(lambda: not _calls, PATIENCE_S)


def _in_parent() -> None:
    global _forking  # noqa: PLW0603 one a process
    _forking -= 1
    _changed.notify_all()
    _changed.release()


def _in_child() -> None:
    global _calls, _changed, _forking, _lock, _quiet  # noqa: PLW0603 one a process
    _quiet = not _calls
    _calls = _forking = 0
    _lock = threading.Lock()
    _changed = threading.Condition(_lock)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_in_parent, after_in_child=_in_child
    )


MAP_BYTES = 1 << 40
"""Address space that is reserved: files are sparse, so it takes what is stored."""
MIN_MAP_BYTES = 1 << 34
MAX_READERS = 4096
PAGE = 4096
NODE = 40
"""Bytes of a page that a small record takes beside itself, about."""
TRANSACTION_BYTES = 1 << 20
"""Of records: photos take 70 us each, in transactions of 16 MB and more 200 to 800."""
STRETCH = 1000
"""Keys looked at in one transaction."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The records that one data set, made by one code, has at one image size."""

    about: str
    """What it holds, for people."""
    records: int = 0
    nbytes: int = 0
    """On the disk, in whole pages."""
    used_s: float = 0.0
    """When it was last opened or written to, in seconds since 1970."""
    session: str = ""
    """Of which it is known that records are right: see `Disk.vouch`."""


def room_of(record: bytes | bytearray | memoryview) -> int:
    """Return the bytes of the database that a record takes."""
    nbytes = len(record) + NODE
    return nbytes if nbytes < PAGE // 2 else -(-nbytes // PAGE) * PAGE


class Disk:
    """One process' view of the database in a folder.

    Args:
        folder: made if need be; nothing else should be in it.
        limit: most bytes of records; None: four fifths of what is free now.

    Raises:
        DistrustError: the folder is not fit: see trust.py.
        DiskError: it cannot be opened.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        import lmdb

        self._lmdb = lmdb
        self.evicted = 0
        """Records of others, dropped by this process to make room."""
        self.folder = folder
        self.session = ""
        """Of those who have it open: see `vouch`."""
        self.told: str | None = None
        """What was found amiss, and mended, when it was opened."""
        with failing("opened", folder):
            check_folder(folder)
            self._users = os.open(folder / "users", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._enter()
                self._env = self._open(folder)
            except BaseException:
                os.close(self._users)
                raise
            with leased(self.folder):  # to open it is a write, also where it is there
                self._meta = self._env.open_db(b"namespaces")
            self._env.reader_check()
        free = os.statvfs(folder)
        usable = free.f_bavail * free.f_frsize
        self.limit = usable * 4 // 5 + self.used if limit is None else limit

    def get(self, key: bytes) -> memoryview | None:
        """Return a copy of the record under `key`, unchecked; None: there is none.

        Raises:
            DiskError: the database is damaged, or its disk is.
        """
        with failing("read", self.folder), self._env.begin(buffers=True) as txn:
            found = txn.get(key)
            return None if found is None else copied(found)

    def put(self, batch: Sequence[tuple[bytes, bytes]], about: str) -> int:
        """Store records of one namespace; return how many are new.

        Waits until no other process writes. Each transaction is a short one: LMDB holds
        all that one writes in memory of its own until its end, and where that is little
        it is the same memory again, while fresh memory takes more time than the write.

        Raises:
            Full: there is no room for the first of them; says why if the disk is full.
            DiskError: it cannot be written to.
        """
        with failing("written", self.folder), leased(self.folder):
            self._mark(clean=False)
            fitting = within(batch, self._room(batch[0][0][:8]))
            stored = sum(self._put(part, about) for part in stretches(fitting))
        if not fitting:
            raise Full(shortage(self.folder, room_of(batch[0][1])))
        return stored

    def forget(self, key: bytes) -> None:
        """Delete a record that is damaged."""
        with failing("written", self.folder), leased(self.folder):
            self._mark(clean=False)
            with self._env.begin(write=True) as txn:
                record = txn.pop(key)
                if record is not None:
                    self._count(txn, key[:8], "", -1, -room_of(record))

    def clear(self, namespace: bytes | None = None) -> int:
        """Delete a namespace, or all; return how many records that were."""
        with failing("written", self.folder), leased(self.folder):
            self._mark(clean=False)
            names = list(self.namespaces()) if namespace is None else [namespace]
            return sum(map(self._drop, names))

    def open_namespace(self, namespace: bytes, about: str) -> Namespace:
        """Note that a namespace is in use; return what was known of it."""
        with failing("written", self.folder), leased(self.folder):
            self._mark(clean=False)
            with self._env.begin(write=True) as txn:
                return self._count(txn, namespace, about, 0, 0)

    def vouch(self, namespace: bytes) -> None:
        """Note that records of a namespace were computed anew, and are the same.

        It holds for this session: from when one process opened the folder alone until
        nobody has it open any more.
        """
        with failing("written", self.folder), leased(self.folder):
            self._mark(clean=False)
            with self._env.begin(write=True) as txn:
                known = parsed(txn.get(namespace, db=self._meta))
                self._note(txn, namespace, replace(known, session=self.session))

    def namespaces(self) -> dict[bytes, Namespace]:
        """Return what is stored."""
        with failing("read", self.folder), self._env.begin(db=self._meta) as txn:
            return {bytes(name): parsed(text) for name, text in txn.cursor()}

    def keys(self, namespace: bytes) -> Iterator[bytes]:
        """Yield the keys of a namespace, in their order; one transaction each 1000."""
        last: bytes | None = namespace
        while last is not None:
            keys = self._keys_from(last, namespace)
            yield from keys
            last = keys[-1] + b"\0" if keys else None

    @property
    def used(self) -> int:
        """Bytes of all records, in whole pages."""
        return sum(each.nbytes for each in self.namespaces().values())

    def sync(self) -> None:
        """Have all that is written on the disk."""
        if FolderState.read(self.folder).clean:
            return
        with failing("written", self.folder), leased(self.folder):
            self._env.sync(True)  # noqa: FBT003 its only argument
            self._mark(clean=True)

    def close(self) -> None:
        """Let go of it. Idempotent; synced before, or a power cut empties it."""
        if self._users >= 0:
            self._env.close()
            os.close(self._users)
            self._users = -1

    # Opening

    def _enter(self, tries: int = 3) -> None:
        """Join those who have it open; alone, look whether it is whole."""
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            self._begin_session()
        fcntl.flock(self._users, fcntl.LOCK_SH)  # not at once: another may be before us
        state = FolderState.read(self.folder)
        if state.version == VERSION and state.boot == boot_id():
            self.session = state.session
            return
        if not tries:
            raise DistrustError(f"{self.folder} was left by who looked through it")
        fcntl.flock(self._users, fcntl.LOCK_UN)
        self._enter(tries - 1)  # it was not looked through to the end: it is ours to do

    def _begin_session(self) -> None:
        """Alone, look whether the folder was left whole; else empty it."""
        data, left = self.folder / "data.mdb", FolderState.read(self.folder)
        try:
            if data.exists():
                self._check_left(data, left)
        except DistrustError as error:
            self.told = f"{error}; it is emptied, and filled anew"
            self._wipe()
            left = FolderState("", clean=True)
        self.session = secrets.token_hex(8)
        # What was not synced on this boot still is not.
        self._mark(clean=left.clean or not data.exists())

    def _check_left(self, data: Path, left: FolderState) -> None:
        if left.version != VERSION:
            raise DistrustError(f"{self.folder} was written by another version")
        if not left.survived:
            raise DistrustError(f"{self.folder} was not closed before a power cut")
        if data.stat().st_size:
            check_pages(data)

    def _wipe(self) -> None:
        for name in ("data.mdb", "lock.mdb", "state.json"):
            (self.folder / name).unlink(missing_ok=True)

    def _open(self, folder: Path) -> Any:
        settings: dict[str, Any] = {
            "subdir": True,
            "max_dbs": 1,
            "max_readers": MAX_READERS,
            "mode": 0o600,
            "writemap": False,
            "metasync": False,
            "sync": False,
            "max_spare_txns": 0,
        }
        size = MAP_BYTES
        while True:
            try:
                return self._lmdb.open(str(folder), map_size=size, **settings)
            except self._lmdb.MemoryError:  # a limit of address space (ulimit -v)
                if size <= MIN_MAP_BYTES:
                    raise
                size //= 4

    # Writing: the lease is held

    def _mark(self, *, clean: bool) -> None:
        """Write down whether all is on the disk, before it is no longer so."""
        FolderState.now(self.session, clean=clean).write(self.folder)

    def _put(self, records: Sequence[tuple[bytes, bytes]], about: str) -> int:
        """Store records in one transaction; return how many are new."""
        with self._env.begin(write=True) as txn:
            new = [each for each in records if txn.put(*each, overwrite=False)]
            nbytes = sum(room_of(record) for _, record in new)
            self._count(txn, records[0][0][:8], about, len(new), nbytes)
        return len(new)

    def _room(self, namespace: bytes) -> int:
        """Return the bytes that may be written; evicts what nobody uses."""
        held = self.namespaces()
        spare = spare_bytes(self.folder)
        room = self.limit - sum(each.nbytes for each in held.values())
        others = {
            name: (each.used_s, each.nbytes)
            for name, each in held.items()
            if name != namespace
        }
        wanted = self.limit // 16 - min(room, spare)
        for name in victims(others, time.time(), wanted):
            self.evicted += self._drop(name)
            room += held[name].nbytes
            spare += held[name].nbytes  # its pages are used again
        return min(room, spare)

    def _drop(self, namespace: bytes) -> int:
        """Delete a namespace, some thousand records a transaction."""
        dropped = 0
        while keys := self._keys_from(namespace, namespace):
            with self._env.begin(write=True) as txn:
                dropped += sum(txn.delete(key) for key in keys)
        with self._env.begin(write=True, db=self._meta) as txn:
            txn.delete(namespace)
        return dropped

    def _keys_from(self, first: bytes, namespace: bytes) -> list[bytes]:
        with failing("read", self.folder), self._env.begin() as txn:
            cursor = txn.cursor()
            if not cursor.set_range(first):
                return []
            keys = islice(cursor.iternext(keys=True, values=False), STRETCH)
            return list(takewhile(lambda key: key.startswith(namespace), keys))

    def _count(
        self, txn: Any, namespace: bytes, about: str, records: int, nbytes: int
    ) -> Namespace:
        """Add to what is known of a namespace; return what was known before."""
        before = parsed(txn.get(namespace, db=self._meta))
        after = replace(
            before,
            about=about or before.about,
            records=before.records + records,
            nbytes=before.nbytes + nbytes,
            used_s=time.time(),
            session=before.session if before.records else self.session,
        )
        self._note(txn, namespace, after)
        return before

    def _note(self, txn: Any, name: bytes, known: Namespace) -> None:
        txn.put(name, json.dumps(asdict(known)).encode(), db=self._meta)

    def __repr__(self) -> str:
        state = "closed" if self._users < 0 else f"at most {self.limit} bytes"
        return f"<Disk {str(self.folder)!r}: {state}>"


def within(
    batch: Sequence[tuple[bytes, bytes]], room: int
) -> Sequence[tuple[bytes, bytes]]:
    """Return the first of the records, as many as there is room for."""
    sums = accumulate(room_of(record) for _, record in batch)
    return batch[: sum(nbytes <= room for nbytes in sums)]


def stretches(
    records: Sequence[tuple[bytes, bytes]],
) -> Iterator[Sequence[tuple[bytes, bytes]]]:
    """Yield the records in parts, each what one transaction stores."""
    begin = nbytes = 0
    for end, (_, record) in enumerate(records, 1):
        nbytes += len(record)
        if nbytes >= TRANSACTION_BYTES or end == len(records):
            yield records[begin:end]
            begin, nbytes = end, 0


def parsed(text: bytes | None) -> Namespace:
    """Return what is written of a namespace; nothing, if that cannot be read."""
    with suppress(ValueError, TypeError, RecursionError):
        return Namespace(**json.loads(text or b"{}"))
    return Namespace("")
