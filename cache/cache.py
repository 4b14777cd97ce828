"""A cache: it looks for a sample in its tiers in order, and computes it if none has it.

Every process that works on samples gets a copy of the `Cache`, and opens the tiers when
it first needs them. A sample found on disk is stored in RAM, too; a computed one is
stored in both.

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
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from xxhash import xxh3_64_digest

from ..errors import SpecError
from ..system.file_locks import release, try_lock
from ..system.forking import interrupts_deferred
from ..system.garbage import close_elsewhere
from ..system.shared_memory import runtime_folder, shared_file, titled
from .codec import CODECS
from .disk import Disk, DiskError, Writer, let_go, opening, shared_disk
from .fingerprint import Fingerprint
from .folder import DistrustError, byte_of, folder_in
from .memory import Arena, Full, existing, join
from .record import Picker, RecordError, decode, encode, same
from .statistics import NBYTES, CacheStatistics, Counters, TierStatistics

# Samples computed twice, to see whether the results differ.
REPEATED = 3
# How many are computed twice if the code reaches a random generator or a clock: it may
# draw in one call of ten.
REPEATED_DRAWS = 64
# Records of an earlier run that each run computes again for comparison.
COMPARED = 16
PATIENCE_S = 30.0
# How long a finaliser waits until a cache is closed: as long as that waits for the
# writer.
CLOSE_S = 10.0
FIRST_PAUSE_S = 0.0005
# The system offers no time limit for waiting on another process's lock, so it is tried
# repeatedly, with pauses that double up to a hundredth of a second. A thread that frees
# one wakes the threads of its own process.
MAX_PAUSE_S = 0.01

RANDOM = (
    "{}: sample index {} differed when it was computed twice. A stage before the cache"
    " is random (most likely an augmentation in the dataset's __getitem__), so a cached"
    " sample would repeat it; move it into a map() that takes `rng`, after .cache(). Or"
    " it works in place on data that stays, as `x.div_(255)` does; let it return new"
    " data, as `x / 255` does"
)
CHANGED = (
    "sample index {}, stored by an earlier run, differs from what is computed now,"
    " although code and data look the same; all that it stored is dropped and computed"
    " again (pass .cache(version=...), and change it whenever something changes that"
    " penstock cannot see)"
)
OTHER_RAM = (
    "its RAM holds {} bytes, not the {} requested: another pipeline or process on this"
    " host has the same samples in RAM, and both share the size set first"
)
STOPPED = (
    "another process was stopped while it stored a sample in RAM; nothing more can be"
    " stored there until that process continues or ends"
)
UNSHARABLE = "it cannot be shared here"
UNSHARED = (
    "only this process and its workers can use its RAM, as there is no folder in which"
    " other processes of this user could find it; set XDG_RUNTIME_DIR to a folder of"
    " your own"
)

Result = TypeVar("Result")


class RandomUpstreamError(SpecError):
    """A sample differs each time it is computed, so it must not be stored."""


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
    repeated: int = REPEATED
    """Samples computed twice, to see whether the results differ."""


class Found(NamedTuple):
    """A sample that was stored."""

    sample: Any
    doubted: bool
    """Whether it must be computed again and compared before this run trusts it."""


class Claims:
    """The keys of the samples that this process is computing, locked on the host.

    Args:
        descriptor: the file that all processes share, as opened by this process; None
            if there is none: then only the threads of this process share the claims.
    """

    def __init__(self, descriptor: int | None) -> None:
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
        while (
            held_claim := self._try(key, claim)
        ) is not claim and time.monotonic() < end_s:
            if in_loop:
                await asyncio.sleep(pause_s)
            else:
                held_claim.wait(pause_s)  # whatever else might run in this thread
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return claim

    def free(self, key: bytes, claim: threading.Event) -> None:
        """Release a claim, unless others hold it. Idempotent."""
        with self._lock:
            if self._mine.get(key) is claim:
                del self._mine[key]
                if self._descriptor is not None:
                    release(self._descriptor, byte_of(xxh3_64_digest(key)))
        claim.set()

    def _try(self, key: bytes, claim: threading.Event) -> threading.Event:
        """Return the claim that this process holds now, or one that nobody sets."""
        with self._lock:
            # The lock is this process's, so it does not keep out other threads.
            # Its byte stands for all of the key: a cache of other data or code has the
            # same indices in the same folder, and need not wait for this one.
            if key not in self._mine and (
                self._descriptor is None
                or try_lock(self._descriptor, byte_of(xxh3_64_digest(key)))
            ):
                self._mine[key] = claim
            return self._mine.get(key) or threading.Event()


class Here:
    """Finds and stores samples. Any thread of the process may use it.

    Args:
        opening: what to open.
        arena: this process's view of the RAM tier; `close` closes it.
        counters: counts of all processes; `close` closes them.
        stack: closes all that is opened here, should the opening fail; `close` does.
        foreign_arena: whether the arena held records of another run when this run
            joined it.
    """

    def __init__(
        self,
        opening: Opening,
        arena: Arena | None,
        counters: Counters,
        stack: ExitStack,
        *,
        foreign_arena: bool,
    ) -> None:
        self.opening, self.arena, self.counters = opening, arena, counters
        # The process that it belongs to.
        self.pid = os.getpid()
        self._foreign_arena = foreign_arena
        # Held for the first look at a namespace: see `trusts`.
        self._looking = threading.Lock()
        # For each namespace that was opened on disk, whether its records are right.
        self._trust: dict[bytes, bool] = {}
        # Whether enough samples were computed twice, by all processes together.
        self.sure = False
        self._last_bytes = 0
        self.stack = stack
        stack.callback(counters.close)
        if arena is not None:
            stack.callback(arena.close)
        # Largest size of the file on disk in bytes; 0 without a disk.
        self.disk_limit = 0
        self.disk = disk = self._opened_disk()
        self.claims = self._open_claims()
        self._writer: Writer | None = None
        # Ends the writer's thread, even if the disk was given up meanwhile.
        self._end_writing: Callable[[], object] = bool
        if disk is not None:
            self._writer = Writer(
                disk,
                about=opening.about,
                limit=self.disk_limit,
                off=self._disk_off,
                tell=partial(self.warn, kind="disk full"),
            )
            self._end_writing = self._writer.close
        capacity = max(0 if arena is None else arena.capacity, self.disk_limit)
        self._picker = Picker(opening.codec, opening.name, opening.samples, capacity)

    def trusts(self, namespace: bytes) -> bool:
        """Whether nothing stored there has to be compared with what is computed now.

        Records from before this run are compared until its processes have computed
        `COMPARED` of them again with equal results. The first thread holds the lock
        while it looks, so that no other reads a record before that.
        """
        if self._trust.get(namespace):
            return True
        with self._looking:
            if namespace not in self._trust and not self._left(namespace):
                self.counters.agree(namespace, COMPARED)
            self._trust[namespace] = self.counters.agree(namespace, 0) >= COMPARED
            return self._trust[namespace]

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
                    self.warn(
                        "a record was damaged; damaged records are computed again",
                        "damaged",
                    )
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
        arena, writer = self.arena, self._writer  # other threads may give one up
        if arena is not None and arena.admits(key, self._last_bytes):
            return True
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
        record = self._picker.encoded(sample, key, took_ns)
        nbytes = self._last_bytes = sum(map(len, record))
        if in_ram := self._keep_in_ram(key, *record):
            done()
        writer = self._writer
        on_way = (
            writer is not None
            and not writer.full  # the copy would be made for nothing
            and writer.offer(key, b"".join(record), done)
        )
        if in_ram or on_way:
            self.counters.add(stored=1, stored_bytes=nbytes)
        else:
            self.counters.add(refused=1)
            done()

    def drop(self, namespace: bytes) -> None:
        """Delete a namespace on disk, and all of RAM: a record was no longer right.

        The doubt remains: that run may still be going on, and store more of the same.
        """
        self.counters.agree(namespace, -COMPARED)
        arena, disk = self.arena, self.disk  # other threads may give one up
        try:
            if arena is not None:
                arena.clear()
        except TimeoutError:
            self.arena = None
            self.warn(STOPPED, "RAM stopped")
        try:
            if disk is not None:
                disk.clear(namespace)
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
        with self.stack, suppress(DiskError):
            self._end_writing()
            if sync and (disk := self.disk) is not None:
                disk.sync()

    # RAM

    def _keep_in_ram(self, key: bytes, *record: bytes | memoryview) -> bool:
        if (arena := self.arena) is None:
            return False
        try:
            arena.put(key, *record)
        except Full as full:
            if str(full):
                self.warn(str(full), "RAM short")
        except TimeoutError:
            self.warn(STOPPED, "RAM stopped")
        except OSError as error:  # no memory is left
            self.warn(f"it goes on without RAM: {error}", "no RAM")
            self.arena = None
        else:
            return True
        return False

    # Disk

    def _opened_disk(self) -> Disk | None:
        if self.opening.disk is None:
            return None
        try:
            disk = shared_disk(folder_in(self.opening.disk), self.opening.disk_limit)
            self.stack.callback(let_go, disk)
            # Its own limit, as another cache may have opened the disk.
            self.disk_limit = disk.limit_for(self.opening.disk_limit)
        except (DiskError, DistrustError) as error:
            self._disk_off(str(error))
            return None
        return disk

    def _open_claims(self) -> Claims:
        """Return the claims, which keep two workers from computing one sample."""
        descriptor = None
        try:
            if self.disk is not None:
                kind = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                descriptor = os.open(self.disk.folder / "claims", kind, 0o600)
            elif self.arena is not None:
                descriptor = self.arena.reopened()
        except OSError as error:
            self.warn(
                "its claims cannot be opened, so several workers may compute the same"
                f" sample: {error}",
                "no claims",
            )
        if descriptor is not None:
            self.stack.callback(os.close, descriptor)
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
        self.warn(f"it goes on without its disk: {reason}", "no disk")
        self.disk = self._writer = None

    def warn(self, text: str, kind: str) -> None:
        """Log a warning, only the first of a kind of `KINDS` over all processes."""
        if self.counters.first(kind):
            logging.getLogger("penstock").warning("%s: %s", self.opening.name, text)


@dataclass(slots=True)
class Lookup:
    """One sample's path through the cache: found, or computed and perhaps stored."""

    here: Here
    key: bytes
    index: int
    compute: Callable[[], Awaitable[Any]]
    in_loop: bool

    async def sample(self, found: Found | None) -> Any:
        """Return the sample, as described at `Cache.sample`."""
        here = self.here
        if found is not None:
            return await self._compared(found) if found.doubted else found.sample
        if not here.admits(self.key):
            sample, took_ns = await self._computed()
            here.counters.add(
                misses=1,
                compute_ns=took_ns,
                refused=here.arena is not None or here.disk is not None,
            )
            return sample
        claim = await here.claims.claim(self.key, in_loop=self.in_loop)
        free = partial(here.claims.free, self.key, claim)
        try:
            return await self._claimed(free)
        except BaseException:
            free()
            raise

    async def _claimed(self, free: Callable[[], object]) -> Any:
        """Look if somebody stored it meanwhile; otherwise compute and store it."""
        here = self.here
        hit = here.find(self.key)
        if hit is not None:
            free()
            return await self.sample(hit)
        sample, took_ns = await self._computed()
        here.counters.add(misses=1, compute_ns=took_ns)
        if not here.sure:
            here.sure = here.counters.total("repeated") >= here.opening.repeated
        if not here.sure:  # it is among the first that this run computes
            # A copy, as code that works in place returns one object both times.
            sample = decode(bytearray(encode(sample, self.key, CODECS[0])), self.key)
            if not same(sample, await self.compute()):
                raise RandomUpstreamError(RANDOM.format(here.opening.name, self.index))
            here.counters.add(repeated=1)  # only now: a failure does not count
        here.keep(self.key, sample, took_ns, free)
        return sample

    async def _compared(self, hit: Found) -> Any:
        """Compute a sample of an earlier run again; return what is right now."""
        here = self.here
        sample, took_ns = await self._computed()
        here.counters.add(compared=1)
        if same(hit.sample, sample):
            here.counters.agree(self.key[:8], 1)
            # It may be in RAM alone, if its writer died before it reached the disk.
            here.keep(self.key, sample, took_ns, bool)
        else:
            here.drop(self.key[:8])
            here.warn(CHANGED.format(self.index), "changed")
        return sample

    async def _computed(self) -> tuple[Any, int]:
        """Return the sample, and how many nanoseconds it took."""
        began_ns = time.perf_counter_ns()
        sample = await self.compute()
        return sample, time.perf_counter_ns() - began_ns


def finished(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never suspends, and return its result.

    Raises:
        Exception: whatever the coroutine raises.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast("Result", done.value)
    raise RuntimeError(f"{coroutine} waits for an event loop, but there is none")


class Cache:
    """Samples stored between two stages of a pipeline.

    Args:
        opening: which tiers to open, and what they hold.
        fingerprint: makes the keys of the samples; processes with the same one share
            the arena.
        ram: bytes of the RAM tier; 0 for none.
    """

    def __init__(self, opening: Opening, fingerprint: Fingerprint, ram: int) -> None:
        self.opening, self.fingerprint, self._ram = opening, fingerprint, ram
        # The process that opened it, and the titles of the memory that it shares.
        self._opener = 0
        self._counters_title = self._arena_title = ""
        # Whether the arena held another run's records when that process joined it.
        self._foreign_arena = False
        # As the process that opened it sees it; a forked one opens its own.
        self._here: Here | None = None
        self._last: CacheStatistics | None = None

    def open(self) -> None:
        """Create or find the shared memory, which other processes get from this one.

        Call it in the process that outlives all others.
        """
        with opening(), ExitStack() as stack:
            if self._opener:
                return
            self._counters_title = f"penstock-counters-{os.urandom(8).hex()}"
            arena, why = None, UNSHARABLE
            if self._ram:
                try:
                    arena, self._arena_title = join(
                        self.fingerprint.digest.hex(), self._ram, self.opening.samples
                    )
                    stack.callback(arena.close)
                except OSError as error:
                    why = str(error)
            self._foreign_arena = arena is not None and arena.records > 0
            counters = None
            with suppress(OSError):  # then each process counts for itself
                counters = shared_file(self._counters_title, NBYTES)
            self._begin(stack, Counters(counters), arena, os.getpid(), why)

    def find(self, index: int, image_size: int | None) -> Found | None:
        """Return a sample that is stored, or None.

        Serve it if it is not doubted; otherwise, call `sample`. A coroutine for each
        hit would take a sixth of its time.
        """
        return self._mine().find(self.fingerprint.key(index, image_size))

    def sample(
        self,
        index: int,
        image_size: int | None,
        found: Found | None,
        compute: Callable[[], Awaitable[Any]],
        *,
        in_loop: bool,
    ) -> Coroutine[Any, Any, Any]:
        """Return a sample: the stored one, or a new one, which is stored if it fits.

        Without an event loop, `finished` runs it, unless `compute` suspends.

        Args:
            index: index of the sample in the dataset.
            image_size: the image size that the sample is made for.
            found: what `find` returned.
            compute: computes the sample. If two results differ, the sample is random.
            in_loop: whether an event loop runs it, and runs other coroutines while
                another thread or process computes the sample.

        Raises:
            RandomUpstreamError: the sample differs each time it is computed.
            UnstorableError: it holds something that cannot be stored.
            IndexError: the dataset has no such sample.
            Exception: whatever `compute` raises.
        """
        key = self.fingerprint.key(index, image_size)
        lookup = Lookup(self._mine(), key, index, compute=compute, in_loop=in_loop)
        return lookup.sample(found)

    def statistics(self) -> CacheStatistics | None:
        """Return the counts of all processes; None before the first sample."""
        here = self._opened()
        if here is None:
            return self._last
        counts = here.counters.totals()
        return replace(counts, name=here.opening.name, tiers=(*_tiers(here, counts),))

    def flush(self, *, sync: bool = False) -> None:
        """Write what this process computed, before it ends.

        Args:
            sync: whether the records must survive a power cut.
        """
        here, self._here = self._here, None
        if here is not None:
            here.close(sync=sync)

    def close(self) -> None:
        """Close all tiers; what is on disk stays. The cache may be used again."""
        self._last = self.statistics()
        self.flush(sync=True)
        self._opener = 0

    def _opened(self) -> Here | None:
        """Return this process's view, if it is open."""
        here = self._here
        return here if here is not None and here.pid == os.getpid() else None

    def _mine(self) -> Here:
        """Return this process's view, opened now if this is its first sample."""
        here = self._opened()
        if here is None:
            with opening(), ExitStack() as stack:
                here = self._opened()  # another thread may have opened it
                if here is None:  # open the shared memory that another process created
                    opener, title = self._opener, self._arena_title
                    counters = next(titled(self._counters_title, opener), None)
                    arena = existing(title, opener) if title else None
                    here = self._begin(stack, Counters(counters), arena, opener)
        return here

    def _begin(
        self,
        stack: ExitStack,
        counters: Counters,
        arena: Arena | None,
        opener: int,
        why_none: str = UNSHARABLE,
    ) -> Here:
        """Open the rest. The stack closes all of it if a Ctrl-C comes meanwhile."""
        here = Here(
            self.opening, arena, counters, stack, foreign_arena=self._foreign_arena
        )
        if self._ram and arena is None:
            here.warn(f"it goes on without RAM: {why_none}", "no RAM")
        elif arena is not None and arena.capacity != self._ram:
            here.warn(OTHER_RAM.format(arena.capacity, self._ram), "other RAM")
        elif arena is not None and runtime_folder() is None:
            here.warn(UNSHARED, "unshared RAM")
        with interrupts_deferred():
            here.stack = stack.pop_all()
            self._opener = opener
            self._here = here
            # If it is garbage collected, or when the program ends.
            finaliser = weakref.finalize(
                self, close_elsewhere, partial(here.close, sync=True), CLOSE_S
            )
            here.stack.callback(finaliser.detach)
        return here

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None, "_last": None}


def _tiers(here: Here, counts: CacheStatistics) -> Iterator[TierStatistics]:
    arena, disk = here.arena, here.disk
    if arena is not None:
        yield TierStatistics(
            name="RAM",
            hits=counts.ram_hits,
            records=arena.records,
            nbytes=arena.used,
            capacity=arena.capacity,
            evictions=arena.evicted,
            seconds_saved=counts.saved_s(counts.ram_hits, counts.ram_ns),
        )
    with suppress(DiskError):  # the next use of the disk reports it
        if disk is not None:
            yield TierStatistics(
                name="disk",
                hits=counts.disk_hits,
                records=sum(
                    namespace.records for namespace in disk.namespaces().values()
                ),
                nbytes=disk.used,
                capacity=here.disk_limit,
                evictions=disk.evicted,
                seconds_saved=counts.saved_s(counts.disk_hits, counts.disk_ns),
            )
