"""Slabs of worker processes, pinned where they are, so that a device reads them."""

from __future__ import annotations

import ctypes
import weakref

import torch

from ..far.slabs import block_at
from .cuda import Bus


class PinnedSlabs:
    """Pins each slab when a batch lies in it for the first time.

    A slab stays pinned until its memory is released, whoever made or maps it. If the
    system refuses one, no more are tried.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._able = True

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in pinned memory; pins its slab if needed."""
        if self._bus.is_pinned(tensor):
            return True
        block = block_at(tensor.data_ptr()) if self._able else None
        if block is None:
            return False
        address = ctypes.addressof(block)
        self._able = self._bus.register(address, ctypes.sizeof(block))
        if self._able:
            # Of several finalizers, the one made last is called first (weakref): this
            # one runs before the memory is unmapped.
            weakref.finalize(block, self._bus.unregister, address).atexit = False
        return self._able
