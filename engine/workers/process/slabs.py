"""Slabs: batches' memory, shared with worker processes, without a name.

A slab is a shared file, mapped by the trainer and by every worker that writes rows into
it. It is lent for a batch, handed over with it, and returns when the batch's last array
dies. If the trainer keeps it for long, it is given away and its descriptor closed, so
neither our memory nor our descriptors grow with what the user collects. A slab that the
trainer holds when it forks is not lent again: the child shares that memory, and must
not see a later batch appear there.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from ....system.descriptors import descriptors_left
from ....system.shared_memory import shared_file
from ...batch.layout import ALIGN, Allocate, Layout, block_bytes

__all__ = [
    "Slab",
    "SlabPool",
    "allocate_on",
    "block_at",
    "map_shared",
    "whole_pages",
]

KEPT_FREE = 16
"""Descriptors that batches leave to worker processes and to the user. Without a slab,
rows travel through the pipes."""
Block = ctypes.Array[ctypes.c_uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
"""Everything that this process has mapped, by address."""


def map_shared(descriptor: int, nbytes: int) -> Block:
    """Map a descriptor; unmapped when the block and all arrays over it are gone.

    Not by `mmap.mmap`, which keeps a duplicate of the descriptor open until then.

    Raises:
        OSError: there is no memory for it.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), f"mapping {nbytes} bytes")
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False
    _blocks[address] = block
    return block


def block_at(address: int) -> Block | None:
    """Return the block, mapped here by `map_shared`, that an address is in, or None."""
    for ref in _blocks.valuerefs():  # a copy: other threads may map meanwhile
        block = ref()
        if block is None:
            continue
        if 0 <= address - ctypes.addressof(block) < ctypes.sizeof(block):
            return block
    return None


def allocate_on(block: Block) -> tuple[Allocate, NDArray[np.uint8]]:
    """Return an allocator that cuts `block` into tensors from its start, and its array.

    The array lives as long as any tensor made on it: its own base is not an array, so
    numpy makes it, and not the block, the base of all its views. The same calls yield
    the same places in every process that maps the same slab.
    """
    place = 0
    memory = np.frombuffer(memoryview(block), np.uint8)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal place
        count, start = math.prod(shape), place
        place += -(-dtype.itemsize * count // ALIGN) * ALIGN
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        line = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        return line if len(shape) == 1 else line.view(shape)

    return allocate, memory


def whole_pages(nbytes: int) -> int:
    """Return the size of a slab that holds `nbytes`; at least one page."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class Slab:
    """One block of shared memory.

    Raises:
        OSError: there is no memory for it, or no file descriptor.
    """

    __slots__ = ("address", "block", "descriptor", "key", "nbytes")

    def __init__(self, key: int, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.descriptor = shared_file("penstock", nbytes)
        try:
            self.block = map_shared(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.address = ctypes.addressof(self.block)

    def give_away(self) -> None:
        """Close the descriptor; the memory lives on while arrays use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __repr__(self) -> str:
        return f"<Slab {self.key}: {self.nbytes} bytes, fd {self.descriptor}>"


class Lent(weakref.ref[NDArray[np.uint8]]):
    """Marks the array over a lent slab, and dies with the batch."""

    __slots__ = ("slab",)
    slab: Slab


class SlabPool:
    """The slabs of one engine.

    The lock guards all fields but two. The thread that drops a batch's last array
    appends to `_returned`, and a thread that forks adds to `_shared`. Both may happen
    anywhere, even while the lock is held, so each is a single atomic call.

    Args:
        keep: most slabs that may be out after their hand-over; the oldest ones beyond
            that are given away. A slab that is still being written never is.
    """

    def __init__(self, keep: int = 16) -> None:
        self._keep = keep
        self._free: list[Slab] = []
        self._returned: deque[Lent] = deque()
        self._lent: dict[int, Lent] = {}
        self._handed: dict[int, None] = {}
        """Keys of lent slabs whose batch was handed over, the oldest first."""
        self._shared: set[int] = set()
        """Keys of slabs that must not be lent again."""
        self._next = 0
        self.lock = threading.Lock()
        _pools.add(self)

    def lend(self, layout: Layout, rows: int) -> tuple[Slab, Allocate]:
        """Return a slab for a batch, and an allocator to build the batch there.

        When all tensors made on it have died, the slab is free again.

        Raises:
            OSError: there is no memory for it, or no file descriptor.
        """
        return self.lend_bytes(block_bytes(layout, rows))

    def lend_bytes(self, nbytes: int) -> tuple[Slab, Allocate]:
        """Return a slab of at least `nbytes`, as `lend` does.

        Raises:
            OSError: there is no memory for it, or no file descriptor.
        """
        size = whole_pages(nbytes)
        with self.lock:
            self._sweep()
            slab = self._find(size)
            allocate, lent = allocate_on(slab.block)
            # The callback is pure C: one in Python could swallow a Ctrl-C.
            mark = self._lent[slab.key] = Lent(lent, self._returned.append)
            mark.slab = slab
        return slab, allocate

    def close(self) -> None:
        """Release all slabs; those lent live on with their batches."""
        with self.lock:
            for key in list(self._lent):
                self._give_away(key)
            self._drop_free()
            self._returned.clear()

    def at(self, address: int) -> Slab | None:
        """Return the lent slab that holds this address, or None."""
        with self.lock:
            for mark in self._lent.values():
                if 0 <= address - mark.slab.address < mark.slab.nbytes:
                    return mark.slab
        return None

    def hand_over(self, key: int) -> None:
        """Note that the batch in this slab is complete, and now the trainer's."""
        with self.lock:
            if key in self._lent:
                self._handed[key] = None
            while len(self._handed) > self._keep:
                # The trainer keeps its batches, and this is the oldest.
                self._give_away(next(iter(self._handed)))

    def give_away(self, key: int) -> None:
        """Let go of a lent slab; it lives on with its batch."""
        with self.lock:
            self._give_away(key)

    def share(self) -> None:
        """Note that a fork shares the slabs handed over. It may hold the lock."""
        self._shared.update(tuple(self._handed))

    def keys(self) -> set[int]:
        """Return the keys of slabs that may be lent again, or are being filled."""
        with self.lock:
            return {*self._lent, *(slab.key for slab in self._free)}

    def _find(self, size: int) -> Slab:
        """Return a free slab of this size, or a new one."""
        for slab in self._free:
            if slab.nbytes == size:
                self._free.remove(slab)
                return slab
        self._drop_free()
        if descriptors_left() < KEPT_FREE:
            text = f"the last {KEPT_FREE} file descriptors are reserved for other uses"
            raise OSError(errno.EMFILE, text)
        self._next += 1
        return Slab(self._next, size)

    def _sweep(self) -> None:
        while self._returned:
            slab = self._returned.popleft().slab
            if slab.key in self._shared:
                self._give_away(slab.key)
            self._handed.pop(slab.key, None)
            if self._lent.pop(slab.key, None) is not None:
                self._free.append(slab)

    def _give_away(self, key: int) -> None:
        self._handed.pop(key, None)
        self._shared.discard(key)
        mark = self._lent.pop(key, None)
        if mark is not None:
            mark.slab.give_away()

    def _drop_free(self) -> None:
        """Drop free slabs of any other size: their image size is over."""
        for slab in self._free:
            slab.give_away()
        self._free.clear()

    def __repr__(self) -> str:
        return f"<SlabPool: {len(self._lent)} lent, {len(self._free)} free>"


_pools: weakref.WeakSet[SlabPool] = weakref.WeakSet()


def _share_all() -> None:
    for pool in list(_pools):
        pool.share()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_share_all, after_in_child=_pools.clear)
