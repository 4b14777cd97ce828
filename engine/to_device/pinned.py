"""Host memory that a device reads by itself: a ring of buffers, and slabs in place.

A copy from any other memory occupies the trainer's thread until it is done.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence

import torch

from ..batch.layout import ALIGN
from ..far.handover import copied
from ..far.slabs import block_at
from .cuda import Bus


class PinnedBuffer:
    """Memory from which one batch is copied, its tensors one after another."""

    __slots__ = ("mark", "memory")

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.mark: torch.cuda.Event | None = None
        """Event after the copy that reads from it."""

    @property
    def free(self) -> bool:
        """Whether it may be written. Does not wait."""
        return self.mark is None or bool(self.mark.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it may be written."""
        if self.mark is not None:
            self.mark.synchronize()

    def ensure(self, nbytes: int, bus: Bus) -> torch.Tensor:
        """Return its memory, `uint8`, of at least `nbytes` and at most twice that."""
        if self.memory is None or not nbytes <= self.memory.numel() <= 2 * nbytes:
            self.memory = None  # release the old one before allocating
            self.memory = bus.pinned(nbytes + nbytes // 8)
        return self.memory


class PinnedRing:
    """Pinned buffers, used in turn, each again once the copy from it is done.

    Args:
        bus: where the memory comes from.
        count: number of buffers; no more are ever made.
    """

    def __init__(self, bus: Bus, count: int) -> None:
        self._bus = bus
        self._buffers = tuple(PinnedBuffer() for _ in range(count))
        self._next = 0

    @property
    def free(self) -> bool:
        """Whether the next buffer may be written. Does not wait."""
        return self._buffers[self._next].free

    def stage(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[PinnedBuffer | None, dict[int, torch.Tensor]]:
        """Copy dense tensors into the next buffer, keeping their memory layout.

        Waits until it may be written. Set its `mark` after the work that reads it.

        Returns:
            The buffer, and its tensors by the `id` of the given ones; None and an empty
            dict if there is nothing to copy, or no pinned memory.
        """
        if not tensors:
            return None, {}
        buffer = self._buffers[self._next]
        buffer.wait()
        try:
            memory = buffer.ensure(sum(map(room, tensors)), self._bus)
        except RuntimeError:  # they can be copied from where they are, only slower
            return None, {}
        self._next = (self._next + 1) % len(self._buffers)
        return buffer, laid_out(tensors, memory)

    def clear(self) -> None:
        """Release all memory; all copies must be done."""
        for buffer in self._buffers:
            buffer.memory = buffer.mark = None

    def __repr__(self) -> str:
        return f"<PinnedRing: {len(self._buffers)} buffers>"


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


def room(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes, on cache lines of its own."""
    return -(-tensor.nbytes // ALIGN) * ALIGN


def laid_out(
    tensors: Iterable[torch.Tensor], memory: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Return copies of tensors in `memory`, by the `id` of each."""
    copies, start = {}, 0
    for tensor in tensors:
        place = copied(tensor, memory[start : start + tensor.nbytes])
        assert isinstance(place, torch.Tensor)
        copies[id(tensor)] = place
        start += room(tensor)
    return copies
