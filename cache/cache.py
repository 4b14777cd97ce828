"""A cache: it looks for a sample in its tiers in order, and computes it if none has it.

Every process that works on samples gets a copy of the `Cache`, and opens the tiers when
it first needs them. A sample found on disk is stored in RAM, too; a computed one is
stored in both. One thread of the host computes each sample while others wait for it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..system.runtime_folder import runtime_folder
from ..system.shared_memory import nameless
from .arena_registry import Holder, join, leave
from .disk import DiskError
from .fingerprint.key import Fingerprint
from .memory import Arena
from .record import same
from .statistics import CacheStatistics, Counters, TierStatistics, saved_s
from .structure import UnstorableError
from .tiers import Claim, Found, Here, Opening

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
UNSHARED = (
    "only this process and its workers can use its RAM, as there is no folder in which"
    " other processes of this user could find it; set XDG_RUNTIME_DIR to a folder of"
    " your own"
)


class RandomUpstreamError(SpecError):
    """A sample differs each time it is computed, so it must not be stored."""


class Lookup:
    """One sample's path through the cache: found, or computed and perhaps stored.

    The `with` block surrounds the computation; leaving it releases the claim.
    """

    def __init__(self, here: Here, key: bytes, index: int) -> None:
        self._here = here
        self.claims = here.claims
        """Where to claim the sample; None means that nothing is claimed or stored."""
        self.key = key
        self._index = index
        self._stored_before = here.stored
        self._found = here.find(key)
        self._claim: Claim | None = None
        self._handed_on = False
        self._took_ns = 0

    @property
    def wants_claim(self) -> bool:
        """Whether this process should compute the sample and store it."""
        here = self._here
        return self._found is None and self.claims is not None and here.admits(self.key)

    def claimed(self, claim: Claim) -> None:
        """Record a claim. Look again if anything was stored since the first look."""
        here = self._here
        self._claim = claim
        if claim.waited:
            here.counters.add(waits=1)
        if here.stored != self._stored_before:
            self._found = here.find(self.key)
        if self._found is not None:
            self._free()

    @property
    def settled(self) -> bool:
        """Whether it was found, and needs no comparison."""
        return self._found is not None and not self._found.doubted

    @property
    def sample(self) -> Any:
        """The sample that was found."""
        assert self._found is not None
        return self._found.sample

    def numbers(self) -> Iterator[int]:
        """Yield a number for each time that the caller must compute the sample."""
        began_ns = time.perf_counter_ns()
        yield 0
        self._took_ns = time.perf_counter_ns() - began_ns
        if self._found is None and self._repeats():
            yield 1

    def finish(self, made: Sequence[Any]) -> Any:
        """Compare and store the results, and return the sample.

        A cache that penstock added by itself gives itself up instead of raising.

        Raises:
            RandomUpstreamError: the sample differs each time it is computed.
            UnstorableError: it holds something that cannot be stored.
        """
        here = self._here
        if self._found is not None:
            self._compare(self._found, made[0])
            return made[0]
        here.counters.add(misses=1, compute_ns=self._took_ns)
        if len(made) > 1:
            if not same(*made):
                return self._refused(
                    RandomUpstreamError(RANDOM.format(here.opening.name, self._index)),
                    made[0],
                )
            here.counters.add(repeated=1)  # only now: a failure does not count
        if self._claim is not None and self._claim.ours:
            try:
                here.keep(self.key, made[0], self._took_ns, self._free)
            except UnstorableError as error:
                return self._refused(error, made[0])
            self._handed_on = True
        elif self._claim is None and self.claims is not None:
            here.counters.add(refused=1)
        return made[0]

    def _refused(self, error: Exception, sample: Any) -> Any:
        """Raise the error, or give up a cache that the user did not ask for."""
        if not self._here.opening.optional:
            raise error
        self._here.give_up(str(error))
        return sample

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if not self._handed_on:
            self._free()

    def _free(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None and claim.ours and self.claims is not None:
            self.claims.free(self.key)

    def _repeats(self) -> bool:
        """Whether to compute it twice: it is among the first that are stored."""
        here = self._here
        if self._claim is None or here.sure:
            return False
        wanted = here.opening.repeated
        enough = here.counters.total("repeated") >= wanted
        here.sure = enough or here.records(self.key[:8]) >= wanted
        return not here.sure

    def _compare(self, found: Found, made: Any) -> None:
        here = self._here
        here.counters.add(compared=1)
        if same(found.sample, made):
            here.counters.agree(self.key[:8], 1)
            # It may be in RAM alone, if its writer died before it reached the disk.
            here.keep(self.key, made, self._took_ns, bool)
        else:
            here.drop(self.key[:8])
            here.warn(CHANGED.format(self._index))


@dataclass(frozen=True, slots=True)
class Members:
    """The shared memory of a cache, as opened by the process that created it."""

    counters: Holder | None = None
    """None: each process counts for itself, as there is no shared memory."""
    arena: Holder | None = None
    why_none: str = ""
    """Why there is no arena, if one was wanted."""
    foreign_arena: bool = False
    """Whether the arena held another run's records when this process joined it."""


class Cache:
    """Samples stored between two stages of a pipeline.

    Args:
        opening: which tiers to open, and what they hold.
        fingerprint: makes the keys of the samples.
        name: letters and digits by which processes of this host find the arena.
        ram: bytes of the RAM tier; 0 for none.
    """

    def __init__(
        self, opening: Opening, fingerprint: Fingerprint, name: str, ram: int
    ) -> None:
        self.opening = opening
        self.fingerprint = fingerprint
        self._name = name
        self._ram = ram
        self._members: Members | None = None
        self._here: Here | None = None
        # The process that `_here` belongs to.
        self._pid = -1
        self._last: CacheStatistics | None = None

    def open(self) -> None:
        """Create the shared memory. Call it in the process that outlives all others."""
        with _lock:
            if self._members is None:
                self._make()

    def sample(
        self, index: int, image_size: int | None, compute: Callable[[int], Any]
    ) -> Any:
        """Return a sample: the stored one, or a new one, which is stored if it fits.

        Args:
            index: index of the sample in the dataset.
            image_size: the image size that the sample is made for.
            compute: computes the sample. Its argument counts the calls for this sample:
                0, then perhaps 1. If the two results differ, the sample is random.

        Raises:
            RandomUpstreamError: the sample differs each time it is computed.
            UnstorableError: it holds something that cannot be stored.
            IndexError: the dataset has no such sample.
            Exception: whatever `compute` raises.
        """
        lookup = Lookup(self._mine(), self.fingerprint.key(index, image_size), index)
        if lookup.wants_claim:
            assert lookup.claims is not None
            lookup.claimed(lookup.claims.claim(lookup.key))
        if lookup.settled:
            return lookup.sample
        with lookup:
            made = [compute(number) for number in lookup.numbers()]
            return lookup.finish(made)

    async def sample_in_loop(
        self,
        index: int,
        image_size: int | None,
        compute: Callable[[int], Awaitable[Any]],
    ) -> Any:
        """Act like `sample` in an event loop, without blocking other coroutines.

        Raises:
            RandomUpstreamError: the sample differs each time it is computed.
            UnstorableError: it holds something that cannot be stored.
            IndexError: the dataset has no such sample.
            Exception: whatever `compute` raises.
        """
        lookup = Lookup(self._mine(), self.fingerprint.key(index, image_size), index)
        if lookup.wants_claim:
            assert lookup.claims is not None
            lookup.claimed(await lookup.claims.claim_in_loop(lookup.key))
        if lookup.settled:
            return lookup.sample
        with lookup:
            made = [await compute(number) for number in lookup.numbers()]
            return lookup.finish(made)

    def statistics(self) -> CacheStatistics | None:
        """Return the counts of all processes; None before the first sample."""
        if self._here is None or self._pid != os.getpid():
            return self._last
        here = self._here
        counts = here.counters.totals()
        share = counts.stored_bytes / counts.body_bytes if counts.body_bytes else 1.0
        return CacheStatistics(
            self.opening.name,
            _tiers(here),
            counts.misses,
            counts.waits,
            counts.refused,
            counts.damaged,
            share,
        )

    def flush(self) -> None:
        """Write what this process computed, before it ends; without a sync."""
        if self._here is not None and self._pid == os.getpid():
            self._here.close()
            self._here = None

    def close(self) -> None:
        """Close all tiers; what is on disk stays. The cache may be used again."""
        self._last = self.statistics()
        if self._here is not None and self._pid == os.getpid():
            self._here.close(sync=True)
            self._here = None
        members, self._members = self._members, None
        arena = None if members is None else members.arena
        if arena is not None and arena.pid == os.getpid():
            leave(self._name, arena)

    def _mine(self) -> Here:
        """Return this process's view, opened now if this is its first sample."""
        if self._pid == os.getpid():  # checked first, because it is written last
            here = self._here
            if here is not None:
                return here
        with _lock:
            if self._here is None or self._pid != os.getpid():
                self._here = self._enter()
                self._pid = os.getpid()
            return self._here

    def _make(self) -> None:
        """Create or find the shared memory. Other processes get it from this one."""
        counters, counted = new_counters()
        arena = mine = None
        why = ""
        if self._ram:
            try:
                arena, mine = join(self._name, self._ram, self.opening.samples)
            except OSError as error:
                why = str(error)
        foreign = arena is not None and arena.records > 0
        self._members = Members(counted, mine, why, foreign)
        self._here = self._begun(counters, arena)
        self._pid = os.getpid()

    def _enter(self) -> Here:
        """Open the shared memory that another process created."""
        members = self._members or Members()
        found = None if members.counters is None else members.counters.open()
        counters = new_counters()[0] if found is None else Counters(found)
        found = None if members.arena is None else members.arena.open()
        return self._begun(counters, None if found is None else Arena(found))

    def _begun(self, counters: Counters, arena: Arena | None) -> Here:
        here = Here(self.opening, arena, counters)
        here.foreign_arena = self._members is not None and self._members.foreign_arena
        if self._ram and arena is None:
            why = self._members.why_none if self._members else ""
            why = why or "it cannot be shared here"
            here.warn(f"it goes on without RAM: {why}", "ram_warnings")
        elif arena is not None and arena.capacity != self._ram:
            here.warn(OTHER_RAM.format(arena.capacity, self._ram), "ram_warnings")
        elif arena is not None and runtime_folder() is None:
            here.warn(UNSHARED, "ram_warnings")
        weakref.finalize(self, finish, here, os.getpid())
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


def _tiers(here: Here) -> tuple[TierStatistics, ...]:
    counts = here.counters.totals()
    found = []
    if here.arena is not None:
        arena, hits = here.arena, counts.ram_hits
        saved = saved_s(counts, hits, counts.ram_ns)
        size = arena.records, arena.used, arena.capacity, arena.evicted
        found.append(TierStatistics("RAM", hits, *size, saved))
    disk, hits = here.disk, counts.disk_hits
    if disk is not None:
        saved = saved_s(counts, hits, counts.disk_ns)
        with suppress(DiskError):  # the next use of the disk reports it
            records = sum(each.records for each in disk.namespaces().values())
            size = records, disk.used, here.disk_limit, disk.evicted
            found.append(TierStatistics("disk", hits, *size, saved))
    return tuple(found)


# Held while a cache is opened.
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child, replace the lock: a parent's thread may have held it."""
    global _lock  # noqa: PLW0603 one a process
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
