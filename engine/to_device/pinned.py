"""Host memory that a device reads by itself: a ring of buffers, and slabs as they are.

A copy from other memory keeps the trainer's thread until it is done.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence

import torch

from ..batch.layout import ALIGN
from ..workers.process.handover import copied
from ..workers.process.slabs import block_at
from .cuda import Bus


class PinnedBuffer:
    """Where one batch waits for its copy, its tensors one after the other."""

    __slots__ = ("mark", "memory")

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.mark: torch.cuda.Event | None = None
        """After the copy that reads from it."""

    @property
    def free(self) -> bool:
        """Whether it may be written. Does not wait."""
        return self.mark is None or bool(self.mark.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it may be written."""
        if self.mark is not None:
            self.mark.synchronize()

    def ensure(self, nbytes: int, bus: Bus) -> torch.Tensor:
        """Return its memory, `uint8`, for so many bytes at least and twice at most."""
        if self.memory is None or not nbytes <= self.memory.numel() <= 2 * nbytes:
            self.memory = None  # not both at once
            self.memory = bus.pinned(nbytes + nbytes // 8)
        return self.memory


class PinnedRing:
    """Pinned buffers, used in turn: each again once the copy from it is done.

    Args:
        bus: whose memory they are.
        count: of buffers; no more are ever made.
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
        """Copy dense tensors into the next buffer, laid out as they are.

        Waits until it may be written. Its `mark` is to be set after what reads it.

        Returns:
            The buffer, and its tensors by the `id` of those given; None and none where
            there is nothing to copy, or no pinned memory to be had.
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
        """Let go of all memory; all copies are done."""
        for buffer in self._buffers:
            buffer.memory = buffer.mark = None

    def __repr__(self) -> str:
        return f"<PinnedRing: {len(self._buffers)} buffers>"


class PinnedSlabs:
    """Pins slabs, each when a batch lies in it for the first time.

    A slab stays pinned until its memory is given back, whoever made or maps it. Where
    the system refuses one, no more are tried.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._able = True

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies in pinned memory, now if not before."""
        if self._bus.is_pinned(tensor):
            return True
        block = block_at(tensor.data_ptr()) if self._able else None
        if block is None:
            return False
        address = ctypes.addressof(block)
        self._able = self._bus.register(address, ctypes.sizeof(block))
        if self._able:
            # Of several finalizers the last one made is called first (weakref): this
            # one comes before the memory is unmapped.
            weakref.finalize(block, self._bus.unregister, address).atexit = False
        return self._able


def room(tensor: torch.Tensor) -> int:
    """Bytes of memory that a tensor takes, on cache lines of its own."""
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
