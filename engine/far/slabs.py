"""Slabs: memory of batches, shared between processes, without a name.

A slab is a shared file, mapped by the worker process that writes to it and by the
trainer, to which its descriptor was sent.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...system.shared_memory import shared_file
from ..batch.layout import ALIGN, Allocate, Layout

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

    Args:
        key: its number among those of one sender.
        nbytes: its size.
        layout: the layout of the batches in it; None: it is for copies.
        rows: how many rows they have; of a slab for copies, its size.

    Raises:
        OSError: there is no memory for it, or no file descriptor.
    """

    def __init__(
        self, key: int, nbytes: int, layout: Layout | None = None, rows: int = 0
    ) -> None:
        self.key, self.nbytes = key, nbytes
        self.layout, self.rows = layout, rows
        self.sent = False
        """Whether the receiver has its descriptor."""
        self.memory: Any = None
        """The open memory of a batch in it."""
        self.descriptor = shared_file("penstock", nbytes)
        try:
            self.block = map_shared(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise

    def give_away(self) -> None:
        """Close the descriptor; the memory lives on while arrays use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __repr__(self) -> str:
        return f"<Slab {self.key}: {self.nbytes} bytes, fd {self.descriptor}>"
