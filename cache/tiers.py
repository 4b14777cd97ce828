"""The tiers as one process has them open, and who computes a sample that neither holds.

One thread of one process of the host computes a sample, and all others wait for it. A
claim is a locked byte of a file that all processes share, so it ends with the process
that holds it. A waiting thread may hold claims of caches further down the pipeline, but
never of one further up, so no circle can form. After `PATIENCE_S` it computes the
sample itself: a process that was stopped in the middle delays others only once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_digest

from ..system.file_locks import release, try_lock
from .disk import Disk, DiskError, byte_of, let_go, shared_disk
from .folder import DistrustError, folder_in
from .memory import Arena, Full
from .record import Picker, RecordError, decode
from .statistics import Counters
from .writer import Writer

LOGGER = logging.getLogger("penstock")
COMPARED = 16
"""Records of an earlier run that each run computes again for comparison."""
PATIENCE_S = 30.0
FIRST_PAUSE_S = 0.0005
MAX_PAUSE_S = 0.01
"""The system offers no time limit for waiting on another process's lock, so it is tried
repeatedly, with pauses that double up to a hundredth of a second. A thread that frees
one wakes the threads of its own process."""

STOPPED = (
    "another process was stopped while it stored a sample in RAM; nothing more can be"
    " stored there until that process continues or ends"
)

DAMAGED = "a record was damaged; damaged records are computed again"


class Claims:
    """The keys of the samples that this process is computing, locked on the host.

    Args:
        descriptor: the file that all processes share, as opened by this process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        # For each key, an event that is set when it is freed.
        self._mine: dict[bytes, threading.Event] = {}

    async def claim(self, key: bytes, *, in_loop: bool) -> threading.Event:
        """Claim a key; wait while others hold it, for up to `PATIENCE_S`.

        Others may have stored the sample meanwhile, so the caller looks for it again.

        Args:
            key: the key of a sample.
            in_loop: whether to let an event loop run other coroutines meanwhile.

        Returns:
            what `free` needs.
        """
        claim = threading.Event()
        end_s = time.monotonic() + PATIENCE_S
        pause_s = FIRST_PAUSE_S
        while (held := self._try(key, claim)) is not claim and time.monotonic() < end_s:
            if in_loop:
                await asyncio.sleep(pause_s)
            else:
                held.wait(pause_s)  # whatever else might run in this thread
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return claim

    def free(self, key: bytes, claim: threading.Event) -> None:
        """Release a claim, unless others hold it. Idempotent."""
        with self._lock:
            if self._mine.get(key) is claim:
                del self._mine[key]
                release(self._descriptor, place(key))
        claim.set()

    def _try(self, key: bytes, claim: threading.Event) -> threading.Event:
        """Return the claim that this process holds now, or one that nobody sets."""
        with self._lock:
            # The lock is this process's, so it does not keep out other threads.
            if key not in self._mine and try_lock(self._descriptor, place(key)):
                self._mine[key] = claim
            return self._mine.get(key) or threading.Event()


def place(key: bytes) -> int:
    """Return the byte that stands for a key, derived from all of the key.

    Caches of other data or code store the same indices in the same folder, and one
    stage may compute for two caches. The key differs between them, so none of them
    waits for another's sample.
    """
    return byte_of(xxh3_64_digest(key))


@dataclass(frozen=True, slots=True)
class Opening:
    """What a process needs to open the tiers."""

    name: str
    """Name of the cache in the log, such as `Cache(ID:2)`."""
    about: str
    """Description of the stored samples: `Folder(500) > decode`."""
    codec: str
    samples: int
    """Number of samples in the dataset."""
    disk: Path | None
    """The folder that the user names."""
    disk_limit: int | None
    """Largest size of the file on disk in bytes; None: the disk's own limit."""
    repeated: int = 3
    """Samples computed twice, to see whether the results differ."""


class Found(NamedTuple):
    """A sample that was stored."""

    sample: Any
    doubted: bool
    """Whether it must be computed again and compared before this run trusts it."""


class Here:
    """Finds and stores samples. Any thread of the process may use it.

    Args:
        opening: what to open.
        arena: this process's view of the RAM tier; `close` closes it.
        counters: counts of all processes; `close` closes them.
        foreign_arena: whether the arena held records of another run when this run
            joined it.
    """

    def __init__(
        self,
        opening: Opening,
        arena: Arena | None,
        counters: Counters,
        *,
        foreign_arena: bool,
    ) -> None:
        self.opening = opening
        self.pid = os.getpid()
        """The process that it belongs to."""
        self.arena = arena
        self.counters = counters
        self._foreign_arena = foreign_arena
        self._looking = threading.Lock()
        # Namespaces that were opened on disk.
        self._known: set[bytes] = set()
        # Those whose records need no comparison.
        self._trusted: set[bytes] = set()
        self.sure = False
        """Whether enough samples were computed twice, by all processes together."""
        self._last_bytes = 0
        self._stack = ExitStack()
        self._stack.callback(counters.close)
        if arena is not None:
            self._stack.callback(arena.close)
        self.disk = disk = self._opened_disk()
        self.disk_limit = 0 if disk is None else opening.disk_limit or disk.limit
        """Largest size of the file on disk in bytes; 0 without a disk."""
        self.claims = self._open_claims()
        self._writer: Writer | None = None
        if disk is not None:
            tell = partial(self.warn, kind="disk_warnings")
            off, limit = self._disk_off, self.disk_limit
            self._writer = Writer(disk, opening.about, off, tell, limit)
        capacity = max(0 if arena is None else arena.capacity, self.disk_limit)
        about = opening.codec, opening.name, opening.samples
        self._picker = Picker(*about, capacity)

    def trusts(self, namespace: bytes) -> bool:
        """Whether nothing stored there has to be compared with what is computed now.

        Records from before this run are compared until its processes have computed
        `COMPARED` of them again with equal results. The first thread holds the lock
        while it looks, so that no other reads a record before that.
        """
        if namespace in self._trusted:
            return True
        with self._looking:
            if namespace not in self._known and not self._left(namespace):
                self.counters.agree(namespace, COMPARED)
            self._known.add(namespace)
            if self.counters.agree(namespace, 0) >= COMPARED:
                self._trusted.add(namespace)
            return namespace in self._trusted

    def find(self, key: bytes) -> Found | None:
        """Return the sample under `key`; None if it is missing or damaged."""
        # Ask this first: a record that is read before a drop then stays doubted.
        doubted = not self.trusts(key[:8])
        for kind, tier in (("ram", self.arena), ("disk", self._writer)):
            if tier is None:
                continue
            began_ns = time.perf_counter_ns()
            try:
                record = tier.get(key)
                if record is None:
                    continue
                sample = decode(record, key)
            except RecordError:
                self.counters.add(damaged=1)
                if kind == "disk":
                    self.warn(DAMAGED)
                with suppress(TimeoutError, DiskError):
                    tier.forget(key)
            except DiskError as error:
                self._disk_off(str(error))
            else:
                took_ns = time.perf_counter_ns() - began_ns
                self.counters.add(**{f"{kind}_hits": 1, f"{kind}_ns": took_ns})
                if kind == "disk" and not doubted:
                    self._keep_in_ram(key, record)
                return Found(sample, doubted)
        return None

    def admits(self, key: bytes) -> bool:
        """Whether a sample of the last one's size would be stored."""
        if self.arena is not None and self.arena.admits(key, self._last_bytes):
            return True
        writer = self._writer
        return writer is not None and not writer.full

    def keep(
        self, key: bytes, sample: Any, took_ns: int, done: Callable[[], object]
    ) -> None:
        """Store a sample; call `done` once others can see it.

        Args:
            key: the key of the sample.
            sample: the sample itself.
            took_ns: how long it took to compute, in nanoseconds.
            done: called at least once, even if there was no room; not if this raises.

        Raises:
            UnstorableError: it holds something that cannot be stored.
        """
        record, body_bytes = self._picker.encoded(sample, key, took_ns)
        nbytes = self._last_bytes = sum(map(len, record))
        in_ram = self._keep_in_ram(key, *record)
        if in_ram:
            done()
        writer = self._writer
        on_way = writer is not None and writer.offer(key, b"".join(record), done)
        if in_ram or on_way:
            self.counters.add(stored=1, stored_bytes=nbytes, body_bytes=body_bytes)
        else:
            self.counters.add(refused=1)
            done()

    def drop(self, namespace: bytes) -> None:
        """Delete a namespace on disk, and all of RAM: a record was no longer right.

        The doubt remains: that run may still be going on, and store more of the same.
        """
        self.counters.agree(namespace, -COMPARED)
        if self.arena is not None:
            try:
                self.arena.clear()
            except TimeoutError:
                self.arena = None
                self.warn(STOPPED, "ram_warnings")
        if self.disk is not None:
            try:
                self.disk.clear(namespace)
            except DiskError as error:
                self._disk_off(str(error))

    def close(self, *, sync: bool = False) -> None:
        """Write what is waiting, and close everything. Idempotent.

        In a forked process, which must not use any of it, it does nothing.

        Args:
            sync: whether the records must survive a power cut; for the last to close.
        """
        if self.pid != os.getpid():
            return
        with self._stack:
            if self._writer is not None:
                self._writer.close()
            with suppress(DiskError):
                if sync and self.disk is not None:
                    self.disk.sync()

    # RAM

    def _keep_in_ram(self, key: bytes, *record: bytes | memoryview) -> bool:
        if self.arena is None:
            return False
        try:
            self.arena.put(key, *record)
        except Full as full:
            if str(full):
                self.warn(str(full), "ram_warnings")
        except TimeoutError:
            self.warn(STOPPED, "ram_warnings")
        except OSError as error:  # no memory is left
            self.warn(f"it goes on without RAM: {error}", "ram_warnings")
            self.arena = None
        else:
            return True
        return False

    # Disk

    def _opened_disk(self) -> Disk | None:
        opening = self.opening
        if opening.disk is None:
            return None
        try:
            disk = shared_disk(folder_in(opening.disk), opening.disk_limit)
        except (DiskError, DistrustError) as error:
            self.warn(f"it goes on without its disk: {error}", "disk_warnings")
            return None
        self._stack.callback(let_go, disk)
        return disk

    def _open_claims(self) -> Claims | None:
        """Return the claims, which keep two workers from computing one sample."""
        path = None if self.disk is None else self.disk.folder / "claims"
        try:
            if path is not None:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            elif self.arena is not None:
                descriptor = self.arena.reopened()
            else:
                return None
        except OSError as error:
            self.warn(
                "its claims cannot be opened, so several workers may compute the same"
                f" sample: {error}"
            )
            return None
        self._stack.callback(os.close, descriptor)
        return Claims(descriptor)

    def _left(self, namespace: bytes) -> bool:
        """Whether records of a namespace were there before; mark it as in use."""
        disk = self.disk
        try:
            if disk and disk.open_namespace(namespace, self.opening.about).records:
                return True
        except DiskError as error:
            self._disk_off(str(error))
        return self._foreign_arena

    def _disk_off(self, reason: str) -> None:
        if self.disk is not None:
            self.warn(f"it goes on without its disk: {reason}", "disk_warnings")
        self.disk = self._writer = None

    def warn(self, text: str, kind: str = "warnings") -> None:
        """Log a warning, only the first of a kind over all processes."""
        if self.counters.first(kind):
            LOGGER.warning("%s: %s", self.opening.name, text)
