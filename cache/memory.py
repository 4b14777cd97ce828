"""The tier in RAM: one arena of shared memory for all processes of the host.

    header | slots, a hash table | records, one behind the other

It grows at its end only. No record is moved or overwritten, so reading takes no lock:
a record says itself whether it is whole and whose it is, and what was being written
when its writer died is none. When there is no more room and nobody asks any more for
what it holds (another image size is in force), it is emptied as a whole.

It is as fast as LMDB on tmpfs would be (records of 100 KB: a get takes 14 us in both;
`benchmarks/cache.py gets` prints them), and it has no name: nothing is left of it when
the last process that has it open is killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .admission import all_idle
from .locks import ByteLock

__all__ = ["Arena", "Full", "copied"]

MAGIC = b"penstock"
VERSION = 1
PAGE = 4096
HEADER = struct.Struct("<8sIIQQQQQQ")
"""Magic, version, generation, slots, capacity, end, records, evicted, lookups."""
GROUPS = 32
GROUP = struct.Struct("<8sQQ")
"""A namespace, its records, and the lookups at which it was last asked for."""
GROUPS_AT = 256
SLOT = struct.Struct("<16sQII")
"""Key, where its record begins, its length, the generation it belongs to."""
LEAST_SLOTS = 1 << 10
RECORD_BYTES = 512
"""There is a slot for so many bytes of capacity at most: smaller ones run out of
slots first."""
MOST_PARTS = 1000
"""That are written in one call: Linux takes 1024 (IOV_MAX)."""
Part = bytes | bytearray | memoryview
LARGE = 1 << 21
"""Bytes that take 0.2 ms to copy. For less the GIL is kept: where other threads want
it, too, it takes some 50 us to get it back."""
MOST_PROBES = 64
"""Slots looked at before a key is given up: at half full runs are far shorter."""
WRITING = 0
"""Byte of the file that whoever writes has locked."""


class Full(Exception):
    """There is no room for a record."""


def copied(view: memoryview) -> memoryview:
    """Return a copy, writable, made without the GIL: a disk may be waited for."""
    return np.frombuffer(view, np.uint8).copy().data


def write_all(descriptor: int, parts: Sequence[Part], offset: int) -> None:
    """Write to the file, not to its mapping: no page of it need be mapped first."""
    if len(parts) > MOST_PARTS:
        parts = [b"".join(parts)]
    done = os.pwritev(descriptor, parts, offset)
    if done < sum(map(len, parts)):  # cut short, by a signal perhaps
        rest = memoryview(b"".join(parts))
        while done < len(rest):
            done += os.pwrite(descriptor, rest[done:], offset + done)


class Arena:
    """Records by key, in memory that processes share.

    Args:
        descriptor: of the file; closed by `close`.
        capacity: bytes of records; None: the file is an arena already.
        samples: how many keys to expect; sizes the table of a new one.

    Raises:
        ValueError: it is no arena of this version.
    """

    def __init__(
        self, descriptor: int, capacity: int | None = None, samples: int = 0
    ) -> None:
        self._descriptor = descriptor
        if capacity is not None:
            self._make(capacity, samples)
        size = os.fstat(descriptor).st_size
        if size < PAGE:
            raise ValueError("no arena: the file is too short")
        self._memory = mmap.mmap(descriptor, size)
        self._lock = threading.Lock()
        self._writer = ByteLock(descriptor, WRITING)
        magic, version, _, self._slots, self.capacity, *_ = self._header()
        self._start = PAGE + self._slots * SLOT.size
        if (magic, version) != (MAGIC, VERSION) or self._start + self.capacity > size:
            self._memory.close()
            raise ValueError(f"no arena of version {VERSION}: {magic!r}, {version}")

    def get(self, key: bytes) -> memoryview | None:
        """Return a copy of what is stored under `key`, unchecked; None: nothing is."""
        found = self._find(key)
        if found is None or found[1] is None:
            return None
        begin, length = found[1]
        with memoryview(self._memory) as whole, whole[begin : begin + length] as view:
            if length >= LARGE:
                return copied(view)
            return memoryview(bytearray(view))

    def put(self, key: bytes, *record: Part) -> None:
        """Store a record, given in parts, unless there is one under that key.

        Raises:
            Full: there is no room, and what is held is in use.
        """
        nbytes = sum(map(len, record))
        with self._writing():
            found = self._find(key)
            if found is not None and found[1] is not None:
                return
            room = self._start + self.capacity - self._end
            if found is None or nbytes > room:
                self._make_room(key, nbytes)
                found = self._find(key)
            assert found is not None
            at, begin = found[0], self._end
            self._end = begin + nbytes  # first: a writer that dies leaves a gap
            write_all(self._descriptor, record, begin)
            self._set_slot(at, key, begin, nbytes)
            self._count(key[:8])

    def admits(self, key: bytes, nbytes: int) -> bool:
        """Whether a record of that size would be stored."""
        room = self._start + self.capacity - self._end
        return nbytes <= room or (nbytes <= self.capacity and self._may_empty(key[:8]))

    def forget(self, key: bytes) -> None:
        """Store under this key anew: what is there is damaged."""
        with self._writing():
            found = self._find(key)
            if found is not None and found[1] is not None:
                self._set_slot(found[0], key, 0, 0)

    def clear(self) -> None:
        """Drop everything."""
        with self._writing():
            self._reset()

    def note_use(self, namespace: bytes, lookups: int = 1) -> None:
        """Say that so many keys of a namespace were asked for."""
        total = self._lookups + lookups
        self._lookups = total
        at = self._group(namespace)
        if at is not None:
            _, records, _ = GROUP.unpack_from(self._memory, at)
            self._write(at, GROUP.pack(namespace, records, total))

    @property
    def used(self) -> int:
        """Bytes of records."""
        used: int = self._end - self._start
        return used

    @property
    def records(self) -> int:
        """How many it holds."""
        return self._field(40)

    @property
    def evicted(self) -> int:
        """How many were dropped to make room, so far."""
        return self._field(48)

    def reopened(self) -> int:
        """Return a descriptor of the file whose locks are apart from this one's."""
        path = f"/proc/self/fd/{self._descriptor}"
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the memory; it is freed when the last process has. Idempotent."""
        if self._descriptor >= 0:
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1

    # Within the file

    def _make(self, capacity: int, samples: int) -> None:
        most = max(LEAST_SLOTS, capacity // RECORD_BYTES)
        slots = 1 << (max(LEAST_SLOTS, min(2 * samples, most)) - 1).bit_length()
        start = PAGE + slots * SLOT.size
        os.ftruncate(self._descriptor, start + capacity)  # sparse: takes what is used
        header = HEADER.pack(MAGIC, VERSION, 1, slots, capacity, start, 0, 0, 0)
        os.pwrite(self._descriptor, header, 0)

    def _header(self) -> tuple[Any, ...]:
        fields: tuple[Any, ...] = HEADER.unpack_from(self._memory, 0)
        return fields

    def _field(self, at: int) -> int:
        return int.from_bytes(self._memory[at : at + 8], "little")

    def _set_field(self, at: int, value: int) -> None:
        self._write(at, value.to_bytes(8, "little"))

    def _set_slot(self, at: int, key: bytes, begin: int, length: int) -> None:
        self._write(at, SLOT.pack(key, begin, length, self._generation))

    def _write(self, at: int, value: bytes) -> None:
        """Write what others read without a lock: `pack_into` has it all zero first."""
        self._memory[at : at + len(value)] = value

    @property
    def _generation(self) -> int:
        return int(struct.unpack_from("<I", self._memory, 12)[0])

    @property
    def _end(self) -> int:
        return self._field(32)

    @_end.setter
    def _end(self, value: int) -> None:
        self._set_field(32, value)

    @property
    def _lookups(self) -> int:
        return self._field(56)

    @_lookups.setter
    def _lookups(self, value: int) -> None:
        self._set_field(56, value)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the only writer, among threads and processes."""
        with self._lock, self._writer:
            yield

    def _find(self, key: bytes) -> tuple[int, tuple[int, int] | None] | None:
        """Return the slot of a key, or the one it would take, and where its record is.

        None: the table is full there.
        """
        generation, slots = self._generation, self._slots
        number = int.from_bytes(key[8:16], "little") & (slots - 1)
        for probe in range(MOST_PROBES):
            at = PAGE + ((number + probe) & (slots - 1)) * SLOT.size
            there, begin, length, era = SLOT.unpack_from(self._memory, at)
            if era != generation:
                return at, None
            if there == key:
                return at, (begin, length) if self._holds(begin, length) else None
        return None

    def _holds(self, begin: int, length: int) -> bool:
        """Whether a record can be there: what is nowhere is stored anew."""
        return length > 0 and self._start <= begin <= len(self._memory) - length

    def _count(self, namespace: bytes) -> None:
        self._set_field(40, self._field(40) + 1)
        at = self._group(namespace)
        if at is not None:
            _, records, last = GROUP.unpack_from(self._memory, at)
            self._write(at, GROUP.pack(namespace, records + 1, last))

    def _group(self, namespace: bytes) -> int | None:
        """Return where a namespace is counted; None: there are too many."""
        for number in range(GROUPS):
            at = GROUPS_AT + number * GROUP.size
            name, records, last = GROUP.unpack_from(self._memory, at)
            if name == namespace:
                return at
            if not records and not last:
                return at
        return None

    def _groups(self) -> list[tuple[bytes, int, int]]:
        found = (
            GROUP.unpack_from(self._memory, GROUPS_AT + number * GROUP.size)
            for number in range(GROUPS)
        )
        return [group for group in found if group[1]]

    def _make_room(self, key: bytes, nbytes: int) -> None:
        """Empty it, if no other namespace is in use any more."""
        if not self._may_empty(key[:8]) or nbytes > self.capacity:
            raise Full
        self._reset()

    def _may_empty(self, namespace: bytes) -> bool:
        others = (group[1:] for group in self._groups() if group[0] != namespace)
        return all_idle(others, self._lookups)

    def _reset(self) -> None:
        self._set_field(48, self.evicted + self.records)
        self._write(12, (self._generation + 1).to_bytes(4, "little"))
        self._set_field(40, 0)
        self._end = self._start
        self._write(GROUPS_AT, bytes(GROUPS * GROUP.size))

    def __repr__(self) -> str:
        return f"<Arena {self.records} records, {self.used} of {self.capacity} bytes>"
