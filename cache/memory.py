"""The RAM tier: one arena of shared memory for all processes of the host.

    header | slots, a hash table | records, one after another

The arena grows at its end only. No record is moved or overwritten, so reading takes no
lock: each record shows whether it is whole and which key it has, and a record whose
writer died halfway fails that check. When the arena is full and nobody asks for its
content any more (another image size is in force), it is emptied as a whole. The size
of its first record stands for that content.

Nothing else is evicted. An epoch asks for each sample once, in random order, so all are
worth the same: with room for a share of the samples, that share is found. Evicting the
least recently used would keep those that come last in the next epoch, and evict most of
them before they are asked for (J. Mohan et al., "Analyzing and Mitigating Data Stalls
in DNN Training", VLDB 2021, section 4.2, MinIO; `benchmarks/cache.py` shows both).

It takes memory only as it fills, and stops while some of what was free remains: memory
that a control group or another process needs is not the cache's to take.

It is as fast as LMDB on tmpfs (records of 100 KB: a get takes 14 us in both;
`benchmarks/cache.py gets` prints both). It has no name, so nothing of it is left when
the last process that has it open ends, however it ends. By its title, other processes
of the user find it in /proc. While one looks for it, and perhaps creates it, that
process holds a lock.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from ..system.file_locks import ByteLock, locked_folder
from ..system.resources import effective_memory_bytes
from ..system.shared_memory import nameless, runtime_folder, titled

MAGIC = int.from_bytes(b"penstock", sys.byteorder)
VERSION = 4
PAGE = 4096
HEADER = struct.Struct("=13Q")
# Positions of the header's words, after magic and version. Each word is read and
# written as a whole, so readers take no lock.
(
    _GENERATION,
    _SLOTS,
    _CAPACITY,
    _END,
    _RECORDS,
    _EVICTED,
    _LOOKUPS,
    _TAKEN,  # up to there the file may grow without another check of the free memory
    _RESERVE,  # bytes of memory that stay free
    _OWNER,  # the namespace of the first record
    _ASKED,  # the lookup count when that was last asked for
) = range(2, 13)
# Key, where its record begins, its length, the generation it belongs to.
SLOT = struct.Struct("<16sQII")
MIN_SLOTS = 1 << 10
# Bytes of capacity for each slot: with smaller records, the slots run out first.
RECORD_BYTES = 512
# Most parts written in one call: Linux takes 1024 (IOV_MAX).
MAX_PARTS = 1000
Part = bytes | bytearray | memoryview
# Returns a namespace as a word of the header.
number = partial(int.from_bytes, byteorder=sys.byteorder)
# Bytes that take 0.2 ms to copy. A smaller copy keeps the GIL: when other threads want
# it, too, getting it back takes some 50 us.
LARGE = 1 << 21
# Slots tried before giving up on a key: at half full, runs are far shorter.
MAX_PROBES = 64
# Bytes that it grows between two checks of the free memory.
GRAIN = 1 << 24
# One part in this many of the memory that is free at first stays free.
RESERVE_SHARE = 8
# How long to wait before checking the free memory again after it ran short.
SHORT_S = 1.0
# The byte of the file that a writer locks.
WRITING = 0
# Seconds to wait for others that look for the same arena. A look at 10,000 open files
# takes some 100 ms, and the ranks of a host look in turn.
LOOKING_PATIENCE_S = 30.0

SHORT = (
    "its RAM holds {} of {} bytes and takes no more for now, as little memory is free"
    " in this machine or control group; other samples are computed each time. Pass a"
    " smaller `ram`, or provide more memory"
)


class Full(Exception):
    """There is no room for a record. The text is a warning for users, if not empty."""


def copied(view: memoryview) -> memoryview:
    """Return a writable copy, made without the GIL: it may have to wait for a disk."""
    return np.frombuffer(view, np.uint8).copy().data


def write_all(descriptor: int, parts: Sequence[Part], offset: int) -> None:
    """Write to the file, not to its mapping, so that no page must be mapped first."""
    if len(parts) > MAX_PARTS:
        parts = [b"".join(parts)]
    nbytes = os.pwritev(descriptor, parts, offset)
    if nbytes < sum(map(len, parts)):  # a short write, perhaps due to a signal
        rest = memoryview(b"".join(parts))
        while nbytes < len(rest):
            nbytes += os.pwrite(descriptor, rest[nbytes:], offset + nbytes)


class Arena:
    """Records by key, in memory that processes share.

    Args:
        descriptor: the arena's file; `close` closes it.
        capacity: bytes of records in a new arena; None if the file already is one.
        samples: expected number of keys, for the hash table of a new arena.

    Raises:
        ValueError: the file is not an arena of this version.
        OSError: it cannot be mapped, or not be made this large.
    """

    def __init__(
        self, descriptor: int, capacity: int | None = None, samples: int = 0
    ) -> None:
        self._descriptor = descriptor
        if capacity is not None:
            self._make(capacity, samples)
        size = os.fstat(descriptor).st_size
        if size < PAGE:
            raise ValueError("not an arena: the file is too short")
        self._memory = mmap.mmap(descriptor, size)
        self._words = memoryview(self._memory)[:PAGE].cast("Q")
        # One record at a time is appended: the first keeps out the threads of this
        # process, which the second, a lock between processes, does not see.
        self._lock = threading.Lock()
        self._writer = ByteLock(descriptor, WRITING)
        self._short_until_s = 0.0
        magic, version, _, self._slots, self.capacity = self._words[:_END]
        self._start = PAGE + self._slots * SLOT.size
        if (magic, version) != (MAGIC, VERSION) or self._start + self.capacity > size:
            self._unmap()
            raise ValueError(f"no arena of version {VERSION}: {magic:#x}, {version}")

    def get(self, key: bytes) -> memoryview | None:
        """Return an unchecked copy of the record under `key`, or None."""
        words = self._words
        words[_LOOKUPS] += 1
        if words[_OWNER] == number(key[:8]):
            words[_ASKED] = words[_LOOKUPS]
        _, begin, length = self._find(key)
        if not length:
            return None
        with memoryview(self._memory) as whole, whole[begin : begin + length] as view:
            return copied(view) if length >= LARGE else memoryview(bytearray(view))

    def put(self, key: bytes, *record: Part) -> None:
        """Store a record, given in parts, unless the key already has one.

        Raises:
            Full: there is no room, and the content is in use. The text says why if
                memory is short.
            TimeoutError: another process was stopped while it stored a record.
            OSError: no memory is left.
        """
        nbytes = sum(map(len, record))
        words = self._words
        with self._lock, self._writer:
            at, _, length = self._find(key)
            if length:
                return
            if not at or nbytes > self._room:
                if nbytes > self.capacity or not self._may_empty(key[:8]):
                    raise Full
                self._reset()
                at, *_ = self._find(key)
            begin = words[_END]
            if begin + nbytes > words[_TAKEN]:
                self._take(begin + nbytes)
            words[_END] = begin + nbytes  # first, so a writer that dies leaves a gap
            write_all(self._descriptor, record, begin)
            self._set_slot(at, key, begin, nbytes)  # last: who sees it, finds a record
            if not words[_RECORDS]:
                words[_OWNER], words[_ASKED] = number(key[:8]), words[_LOOKUPS]
            words[_RECORDS] += 1

    def admits(self, key: bytes, nbytes: int) -> bool:
        """Whether a record of this size would be stored."""
        return nbytes <= self._room or (
            nbytes <= self.capacity and self._may_empty(key[:8])
        )

    def forget(self, key: bytes) -> None:
        """Remove the record under this key, because it is damaged.

        Raises:
            TimeoutError: another process was stopped while it stored a record.
        """
        with self._lock, self._writer:
            at, _, length = self._find(key)
            if length:
                self._set_slot(at, key, 0, 0)

    def clear(self) -> None:
        """Drop everything.

        Raises:
            TimeoutError: another process was stopped while it stored a record.
        """
        with self._lock, self._writer:
            self._reset()

    @property
    def used(self) -> int:
        """Bytes that records take."""
        return self._words[_END] - self._start

    @property
    def records(self) -> int:
        """Number of records."""
        return self._words[_RECORDS]

    @property
    def evicted(self) -> int:
        """Number of records dropped to make room so far."""
        return self._words[_EVICTED]

    def reopened(self) -> int:
        """Return another descriptor of the file, with locks of its own.

        Raises:
            OSError: the limit of open files is reached.
        """
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap the memory. It is freed when the last process does so. Idempotent."""
        if self._descriptor >= 0:
            self._unmap()
            os.close(self._descriptor)
            self._descriptor = -1

    # Within the file

    def _make(self, capacity: int, samples: int) -> None:
        wanted_slots = max(MIN_SLOTS, min(2 * samples, capacity // RECORD_BYTES))
        slots = 1 << (wanted_slots - 1).bit_length()
        start = PAGE + slots * SLOT.size
        os.ftruncate(self._descriptor, start + capacity)  # sparse: only use takes room
        reserve = effective_memory_bytes() // RESERVE_SHARE
        words = (1, slots, capacity, start, 0, 0, 0, start, reserve, 0, 0)
        os.pwrite(self._descriptor, HEADER.pack(MAGIC, VERSION, *words), 0)

    def _take(self, end: int) -> None:
        """Let the file grow to `end` and some more, if there is memory for it."""
        words = self._words
        if time.monotonic() < self._short_until_s:
            raise Full
        free = effective_memory_bytes() - words[_RESERVE]
        grows = end - words[_TAKEN]
        if grows > free:
            self._short_until_s = time.monotonic() + SHORT_S
            raise Full(SHORT.format(self.used, self.capacity))
        words[_TAKEN] = end + min(GRAIN, (free - grows) // 2)

    def _unmap(self) -> None:
        self._words.release()
        self._memory.close()

    def _set_slot(self, at: int, key: bytes, begin: int, length: int) -> None:
        """Set a slot. Not with `pack_into`, which fills it with zeros first."""
        era = self._words[_GENERATION]
        self._memory[at : at + SLOT.size] = SLOT.pack(key, begin, length, era)

    def _find(self, key: bytes) -> tuple[int, int, int]:
        """Return where a key's slot is, and where its record begins and how long it is.

        Without a record, the length is 0, and the slot is the one that it would take;
        0 if the table is full there.
        """
        generation, slots, start = self._words[_GENERATION], self._slots, self._start
        first = int.from_bytes(key[8:16], "little")
        for probe in range(MAX_PROBES):
            at = PAGE + ((first + probe) & (slots - 1)) * SLOT.size
            slot_key, begin, length, era = SLOT.unpack_from(self._memory, at)
            if era != generation:
                return at, 0, 0
            if slot_key == key:
                # If the arena cannot hold such a record, it is stored again.
                is_within = start <= begin <= len(self._memory) - length
                return at, begin, length if is_within else 0
        return 0, 0, 0

    @property
    def _room(self) -> int:
        """Bytes of records that still fit."""
        return self._start + self.capacity - self._words[_END]

    def _may_empty(self, namespace: bytes) -> bool:
        """Whether it may be emptied for this namespace, as nobody asks for its owner.

        A namespace in use is asked for within an epoch, that is, before the number of
        lookups has grown by its number of records.
        """
        words = self._words
        is_others = words[_RECORDS] > 0 and words[_OWNER] != number(namespace)
        return is_others and words[_LOOKUPS] - words[_ASKED] > words[_RECORDS]

    def _reset(self) -> None:
        words = self._words
        words[_EVICTED] += words[_RECORDS]
        words[_GENERATION] += 1
        words[_RECORDS] = 0
        words[_END] = self._start


def join(name: str, capacity: int, samples: int) -> tuple[Arena, str]:
    """Return the arena of that name, another process's or a new one, and its title.

    Processes find each other if they have the same runtime folder.

    Args:
        name: name of the cache; letters and digits.
        capacity: bytes of records in a new arena.
        samples: expected number of records in a new arena.

    Raises:
        OSError: there is not enough memory, or the lock cannot be opened.
        TimeoutError: another process holds the lock.
    """
    place = runtime_folder()
    if place is None:  # nobody else can find it
        title = f"penstock-cache-{os.urandom(8).hex()}"
        return create(title, capacity, samples), title
    title = f"penstock-cache-{place.stat().st_ino}-{name}"
    with locked_folder(place, LOOKING_PATIENCE_S):
        return existing(title) or create(title, capacity, samples), title


def existing(title: str, pid: int | str = "[0-9]*") -> Arena | None:
    """Return the arena of that title, if that process of this user has it open."""
    for descriptor in titled(title, pid):
        with suppress(OSError, ValueError):
            return Arena(descriptor)
        os.close(descriptor)  # of another version
    return None


def create(title: str, capacity: int, samples: int) -> Arena:
    """Return a new arena.

    Raises:
        OSError: there is not enough memory.
    """
    descriptor = nameless(title)
    try:
        return Arena(descriptor, capacity, samples)
    except BaseException:
        os.close(descriptor)
        raise
