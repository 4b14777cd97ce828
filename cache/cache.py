"""A cache: it looks for a sample in its tiers in order, and computes it if none has it.

Every process that works on samples gets a copy of the `Cache`, and opens the tiers when
it first needs them. A sample found on disk is stored in RAM, too; a computed one is
stored in both. One thread of the host computes each sample while others wait for it.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..errors import SpecError
from ..system.runtime_folder import runtime_folder
from ..system.shared_memory import nameless
from .arena_registry import Holder, join
from .disk import DiskError, opening
from .fingerprint.key import Fingerprint
from .memory import Arena
from .record import same
from .statistics import CacheStatistics, Counters, Counts, TierStatistics
from .tiers import Claim, Found, Here, Opening, Sleep

REPEATED = 3
"""Samples computed twice, to see whether the results differ."""
REPEATED_DRAWS = 64
"""How many are computed twice if the code reaches a random generator or a clock: it may
draw in one call of ten."""
RANDOM = (
    "{}: sample index {} differed when it was computed twice. A stage before the cache"
    " is random (most likely an augmentation in the dataset's __getitem__), so a cached"
    " sample would repeat it; move it into a map() that takes `rng`, after .cache()"
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
UNSHARABLE = "it cannot be shared here"
UNSHARED = (
    "only this process and its workers can use its RAM, as there is no folder in which"
    " other processes of this user could find it; set XDG_RUNTIME_DIR to a folder of"
    " your own"
)


Result = TypeVar("Result")


class RandomUpstreamError(SpecError):
    """A sample differs each time it is computed, so it must not be stored."""


@dataclass(slots=True)
class Lookup:
    """One sample's path through the cache: found, or computed and perhaps stored."""

    here: Here
    key: bytes
    index: int
    compute: Callable[[int], Awaitable[Any]]
    sleep: Sleep

    async def sample(self) -> Any:
        """Return the sample, as described at `Cache.sample`."""
        here = self.here
        claims, stored_before = here.claims, here.stored
        found = here.find(self.key)
        if found is not None:
            return await self._compared(found) if found.doubted else found.sample
        if claims is None or not here.admits(self.key):
            made, took_ns = await self._computed()
            refused = int(claims is not None)
            here.counters.add(misses=1, compute_ns=took_ns, refused=refused)
            return made
        claim = await claims.claim(self.key, self.sleep)
        try:
            return await self._claimed(claim, stored_before)
        except BaseException:
            claim.free()
            raise

    async def _claimed(self, claim: Claim, stored_before: object) -> Any:
        """Look again if anything was stored meanwhile; compute and store the sample."""
        here = self.here
        if claim.waited:
            here.counters.add(waits=1)
        found = here.find(self.key) if here.stored != stored_before else None
        if found is not None:
            claim.free()
            return await self._compared(found) if found.doubted else found.sample
        made, took_ns = await self._computed()
        again = [await self.compute(1)] if self._repeats() else []
        here.counters.add(misses=1, compute_ns=took_ns)
        if again and not same(made, again[0]):
            raise RandomUpstreamError(RANDOM.format(here.opening.name, self.index))
        if again:  # only now: a failure does not count
            here.counters.add(repeated=1)
        here.keep(self.key, made, took_ns, claim.free)
        return made

    async def _compared(self, found: Found) -> Any:
        """Compute a sample of an earlier run again; return what is right now."""
        here = self.here
        made, took_ns = await self._computed()
        here.counters.add(compared=1)
        if same(found.sample, made):
            here.counters.agree(self.key[:8], 1)
            # It may be in RAM alone, if its writer died before it reached the disk.
            here.keep(self.key, made, took_ns, bool)
        else:
            here.drop(self.key[:8])
            here.warn(CHANGED.format(self.index))
        return made

    async def _computed(self) -> tuple[Any, int]:
        """Return the sample, and how many nanoseconds it took."""
        began_ns = time.perf_counter_ns()
        made = await self.compute(0)
        return made, time.perf_counter_ns() - began_ns

    def _repeats(self) -> bool:
        """Whether to compute it twice: it is among the first that are stored."""
        here = self.here
        if here.sure:
            return False
        wanted = here.opening.repeated
        enough = here.counters.total("repeated") >= wanted
        here.sure = enough or here.records(self.key[:8]) >= wanted
        return not here.sure


def finished(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never suspends, and return its result.

    Raises:
        Exception: whatever the coroutine raises.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise RuntimeError(f"{coroutine} waits for an event loop, but there is none")


@dataclass(frozen=True, slots=True)
class Members:
    """The shared memory of a cache, as opened by the process that created it."""

    counters: Holder | None = None
    """None: each process counts for itself, as there is no shared memory."""
    arena: Holder | None = None
    foreign_arena: bool = False
    """Whether the arena held another run's records when this process joined it."""


class Cache:
    """Samples stored between two stages of a pipeline.

    Args:
        opening: which tiers to open, and what they hold.
        fingerprint: makes the keys of the samples; processes with the same one share
            the arena.
        ram: bytes of the RAM tier; 0 for none.
    """

    def __init__(self, opening: Opening, fingerprint: Fingerprint, ram: int) -> None:
        self.opening = opening
        self.fingerprint = fingerprint
        self._ram = ram
        self._members: Members | None = None
        self._here: Here | None = None
        # The process that `_here` belongs to.
        self._pid = -1
        self._last: CacheStatistics | None = None

    def open(self) -> None:
        """Create or find the shared memory, which other processes get from this one.

        Call it in the process that outlives all others.
        """
        with opening():
            if self._members is not None:
                return
            counters, counted = new_counters()
            arena = mine = None
            why = UNSHARABLE
            if self._ram:
                name = self.fingerprint.digest.hex()
                try:
                    arena, mine = join(name, self._ram, self.opening.samples)
                except OSError as error:
                    why = str(error)
            foreign = arena is not None and arena.records > 0
            self._members = Members(counted, mine, foreign)
            self._begin(counters, arena, why)

    def held(self, index: int, image_size: int | None) -> Any:
        """Return a sample that is stored and need not be compared, or None.

        A coroutine for each hit would take a sixth of its time.
        """
        here, key = self._mine(), self.fingerprint.key(index, image_size)
        found = here.find(key) if here.trusts(key[:8]) else None
        return None if found is None else found.sample

    def sample(
        self,
        index: int,
        image_size: int | None,
        compute: Callable[[int], Awaitable[Any]],
        sleep: Sleep,
    ) -> Coroutine[Any, Any, Any]:
        """Return a sample: the stored one, or a new one, which is stored if it fits.

        It suspends only where `compute` or `sleep` does. If neither does, `finished`
        runs it without an event loop.

        Args:
            index: index of the sample in the dataset.
            image_size: the image size that the sample is made for.
            compute: computes the sample. Its argument counts the calls for this sample:
                0, then perhaps 1. If the two results differ, the sample is random.
            sleep: waits while another thread or process computes the sample.

        Raises:
            RandomUpstreamError: the sample differs each time it is computed.
            UnstorableError: it holds something that cannot be stored.
            IndexError: the dataset has no such sample.
            Exception: whatever `compute` raises.
        """
        key = self.fingerprint.key(index, image_size)
        return Lookup(self._mine(), key, index, compute, sleep).sample()

    def statistics(self) -> CacheStatistics | None:
        """Return the counts of all processes; None before the first sample."""
        if self._here is None or self._pid != os.getpid():
            return self._last
        counts = self._here.counters.totals()
        tiers = tuple(_tiers(self._here, counts))
        return CacheStatistics(**asdict(counts), name=self.opening.name, tiers=tiers)

    def flush(self, *, sync: bool = False) -> None:
        """Write what this process computed, before it ends.

        Args:
            sync: whether the records must survive a power cut.
        """
        if self._here is not None and self._pid == os.getpid():
            self._here.close(sync=sync)
            self._here = None

    def close(self) -> None:
        """Close all tiers; what is on disk stays. The cache may be used again."""
        self._last = self.statistics()
        self.flush(sync=True)
        self._members = None

    def _mine(self) -> Here:
        """Return this process's view, opened now if this is its first sample."""
        if self._pid == os.getpid():  # checked first, because it is written last
            here = self._here
            if here is not None:
                return here
        with opening():
            if self._here is None or self._pid != os.getpid():
                return self._enter()
            return self._here

    def _enter(self) -> Here:
        """Open the shared memory that another process created."""
        members = self._members or Members()
        found = None if members.counters is None else members.counters.open()
        counters = new_counters()[0] if found is None else Counters(found)
        found = None if members.arena is None else members.arena.open()
        return self._begin(counters, None if found is None else Arena(found))

    def _begin(
        self, counters: Counters, arena: Arena | None, why_none: str = UNSHARABLE
    ) -> Here:
        foreign = self._members is not None and self._members.foreign_arena
        here = Here(self.opening, arena, counters, foreign_arena=foreign)
        if self._ram and arena is None:
            here.warn(f"it goes on without RAM: {why_none}", "ram_warnings")
        elif arena is not None and arena.capacity != self._ram:
            here.warn(OTHER_RAM.format(arena.capacity, self._ram), "ram_warnings")
        elif arena is not None and runtime_folder() is None:
            here.warn(UNSHARED, "ram_warnings")
        weakref.finalize(self, finish, here, os.getpid())
        self._here = here
        self._pid = os.getpid()
        return here

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None, "_pid": -1, "_last": None}


def new_counters() -> tuple[Counters, Holder | None]:
    """Return counters and where others find them; None if there is no shared memory."""
    with suppress(OSError), ExitStack() as stack:
        descriptor = nameless("penstock-counters")
        stack.callback(os.close, descriptor)
        found = Counters(descriptor), Holder.me(descriptor)
        stack.pop_all()
        return found
    return Counters(None), None


def finish(here: Here, pid: int) -> None:
    """Close the tiers of a cache that was garbage collected."""
    if os.getpid() == pid:
        here.close(sync=True)


def _tiers(here: Here, counts: Counts) -> Iterator[TierStatistics]:
    arena, disk = here.arena, here.disk
    if arena is not None:
        saved_s = counts.saved_s(counts.ram_hits, counts.ram_ns)
        size = arena.records, arena.used, arena.capacity, arena.evicted
        yield TierStatistics("RAM", counts.ram_hits, *size, saved_s)
    with suppress(DiskError):  # the next use of the disk reports it
        if disk is not None:
            saved_s = counts.saved_s(counts.disk_hits, counts.disk_ns)
            records = sum(each.records for each in disk.namespaces().values())
            size = records, disk.used, here.disk_limit, disk.evicted
            yield TierStatistics("disk", counts.disk_hits, *size, saved_s)
