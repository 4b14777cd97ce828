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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ..errors import SpecError
from ..system.shared_memory import runtime_folder, shared_file, titled
from .disk import DiskError, opening
from .fingerprint import Fingerprint
from .memory import Arena, existing, join
from .record import same
from .statistics import NBYTES, CacheStatistics, Counters, TierStatistics
from .tiers import Found, Here, Opening

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
    compute: Callable[[], Awaitable[Any]]
    in_loop: bool

    async def sample(self, found: Found | None) -> Any:
        """Return the sample, as described at `Cache.sample`."""
        here, claims = self.here, self.here.claims
        if found is not None:
            return await self._compared(found) if found.doubted else found.sample
        if claims is None or not here.admits(self.key):
            made, took_ns = await self._computed()
            refused = int(claims is not None)
            here.counters.add(misses=1, compute_ns=took_ns, refused=refused)
            return made
        claim = await claims.claim(self.key, in_loop=self.in_loop)
        free = partial(claims.free, self.key, claim)
        try:
            return await self._claimed(free)
        except BaseException:
            free()
            raise

    async def _claimed(self, free: Callable[[], object]) -> Any:
        """Look if somebody stored it meanwhile; otherwise compute and store it."""
        here = self.here
        found = here.find(self.key)
        if found is not None:
            free()
            return await self.sample(found)
        made, took_ns = await self._computed()
        again = [await self.compute()] if self._repeats() else []
        here.counters.add(misses=1, compute_ns=took_ns)
        if again and not same(made, again[0]):
            raise RandomUpstreamError(RANDOM.format(here.opening.name, self.index))
        if again:  # only now: a failure does not count
            here.counters.add(repeated=1)
        here.keep(self.key, made, took_ns, free)
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
        made = await self.compute()
        return made, time.perf_counter_ns() - began_ns

    def _repeats(self) -> bool:
        """Whether to compute it twice: it is among the first that this run computes."""
        here = self.here
        if not here.sure:
            here.sure = here.counters.total("repeated") >= here.opening.repeated
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
        with opening():
            if self._opener:
                return
            self._opener = os.getpid()
            self._counters_title = f"penstock-counters-{os.urandom(8).hex()}"
            arena, why = None, UNSHARABLE
            if self._ram:
                name, samples = self.fingerprint.digest.hex(), self.opening.samples
                try:
                    arena, self._arena_title = join(name, self._ram, samples)
                except OSError as error:
                    why = str(error)
            self._foreign_arena = arena is not None and arena.records > 0
            counters = None
            with suppress(OSError):  # then each process counts for itself
                counters = shared_file(self._counters_title, NBYTES)
            self._begin(Counters(counters), arena, why)

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
        return Lookup(self._mine(), key, index, compute, in_loop).sample(found)

    def statistics(self) -> CacheStatistics | None:
        """Return the counts of all processes; None before the first sample."""
        here = self._opened()
        if here is None:
            return self._last
        counts = here.counters.totals()
        tiers = tuple(_tiers(here, counts))
        return replace(counts, name=self.opening.name, tiers=tiers)

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
            with opening():  # another thread may be opening it
                here = self._opened() or self._enter()
        return here

    def _enter(self) -> Here:
        """Open the shared memory that another process created."""
        counters = next(titled(self._counters_title, self._opener), None)
        title = self._arena_title
        arena = existing(title, self._opener) if title else None
        return self._begin(Counters(counters), arena)

    def _begin(
        self, counters: Counters, arena: Arena | None, why_none: str = UNSHARABLE
    ) -> Here:
        here = Here(self.opening, arena, counters, foreign_arena=self._foreign_arena)
        if self._ram and arena is None:
            here.warn(f"it goes on without RAM: {why_none}", "ram_warnings")
        elif arena is not None and arena.capacity != self._ram:
            here.warn(OTHER_RAM.format(arena.capacity, self._ram), "ram_warnings")
        elif arena is not None and runtime_folder() is None:
            here.warn(UNSHARED, "ram_warnings")
        weakref.finalize(self, here.close, sync=True)  # if it is garbage collected
        self._here = here
        return here

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None, "_last": None}


def _tiers(here: Here, counts: CacheStatistics) -> Iterator[TierStatistics]:
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
