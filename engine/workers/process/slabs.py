"""Slabs: batches' memory shared with worker processes, anonymous from birth.

A slab is a shared file, mapped by the trainer and by every worker that writes rows
into it. It is lent for a batch, handed over with it, and comes back when the last array
dies. What the trainer keeps for long is given away, its descriptor closed, so neither
memory nor descriptors of ours grow with what the user collects. What the trainer has
when it forks is not lent again: the child shares that memory, and no later batch may
appear there.
"""

from __future__ import annotations

import ctypes
import errno
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
]

KEPT_FREE = 16
"""Descriptors that batches leave to worker processes and to the user: without one, rows
come through the pipes."""
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
"""By address: all that this process has mapped."""


def map_shared(descriptor: int, nbytes: int) -> Block:
    """Map a descriptor; unmapped when the block and all arrays over it are gone.

    Not `mmap.mmap`, which keeps a duplicate of the descriptor open for as long.
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
    """Return the block, mapped by `map_shared` in this process, that it lies in."""
    for ref in _blocks.valuerefs():  # a list of its own: others may map meanwhile
        block = ref()
        if block is None:
            continue
        if 0 <= address - ctypes.addressof(block) < ctypes.sizeof(block):
            return block
    return None


def allocate_on(block: Block) -> tuple[Allocate, NDArray[np.uint8]]:
    """Return an allocator that deals out `block` from its start, and the array it cuts.

    The array lives for as long as any tensor made on it: its own base is no array, so
    numpy makes it, and not the block, the base of all its views. The same calls give
    the same places in every process that maps the same slab.
    """
    place = 0
    memory = np.frombuffer(memoryview(block), np.uint8)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal place
        nbytes = dtype.itemsize * int(np.prod(shape))
        part = memory[place : place + nbytes]
        place += -(-nbytes // ALIGN) * ALIGN
        return torch.from_numpy(part).view(dtype).view(shape)

    return allocate, memory


def whole_pages(nbytes: int) -> int:
    """Bytes of a slab that holds so many; one page at least."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class Slab:
    """One shared block."""

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
        """Close the descriptor; the memory lives on for as long as arrays use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __repr__(self) -> str:
        return f"<Slab {self.key}: {self.nbytes} bytes, fd {self.descriptor}>"


class Lent(weakref.ref[NDArray[np.uint8]]):
    """Marks the array over a slab that is lent, and dies with the batch."""

    __slots__ = ("slab",)
    slab: Slab


class SlabPool:
    """The slabs of one engine.

    The lock guards all but two, which change by one atomic call, as that may happen
    anywhere, also while the lock is held: `_returned`, to which whatever thread drops a
    batch's last array appends, and `_shared`, to which whatever thread forks adds.

    Args:
        keep: slabs handed over that may be out; the oldest beyond are given away. None
            that is still to be written ever is.
    """

    def __init__(self, keep: int = 16) -> None:
        self._keep = keep
        self._free: list[Slab] = []
        self._returned: deque[Lent] = deque()
        self._lent: dict[int, Lent] = {}
        self._handed: dict[int, None] = {}
        """Keys of those lent whose batch has been handed over, the oldest first."""
        self._shared: set[int] = set()
        """Keys of those that must not be lent again."""
        self._next = 0
        self.lock = threading.Lock()
        _pools.add(self)

    def lend(self, layout: Layout, rows: int) -> tuple[Slab, Allocate]:
        """Return a slab for a batch, and an allocator to build it there.

        When all tensors made on it have died, the slab is free again.
        """
        return self.lend_bytes(block_bytes(layout, rows))

    def lend_bytes(self, nbytes: int) -> tuple[Slab, Allocate]:
        """Return a slab of so many bytes at least, as `lend` does."""
        size = whole_pages(nbytes)
        with self.lock:
            self._sweep()
            slab = self._find(size)
            allocate, lent = allocate_on(slab.block)
            # The callback is C alone: one in Python could swallow a Ctrl-C.
            mark = self._lent[slab.key] = Lent(lent, self._returned.append)
            mark.slab = slab
        return slab, allocate

    def close(self) -> None:
        """Let go of all slabs; those lent live on with their batches."""
        with self.lock:
            for key in list(self._lent):
                self._give_away(key)
            self._drop_free()
            self._returned.clear()

    def at(self, address: int) -> Slab | None:
        """Return the slab lent that holds this address."""
        with self.lock:
            for mark in self._lent.values():
                if 0 <= address - mark.slab.address < mark.slab.nbytes:
                    return mark.slab
        return None

    def hand_over(self, key: int) -> None:
        """The batch in this slab is whole, and the trainer's."""
        with self.lock:
            if key in self._lent:
                self._handed[key] = None
            while len(self._handed) > self._keep:
                # The oldest is with a trainer that keeps its batches.
                self._give_away(next(iter(self._handed)))

    def give_away(self, key: int) -> None:
        """Let go of a slab that is lent; it lives on with its batch."""
        with self.lock:
            self._give_away(key)

    def share(self) -> None:
        """A fork is about to share the slabs handed over. It may hold the lock."""
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
            text = f"{KEPT_FREE} file descriptors are kept for other things"
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
        """Slabs of another size than wanted are of an image size that is over."""
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
