"""Batches in pinned memory, from which a CUDA device copies while the trainer works.

Whoever finishes a batch puts it there, so that the trainer need not. The memory comes
from torch's allocator. It rounds a block up to a power of two, keeps it for the next
batch, and reuses it only after the copies that torch has made from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..batch.buffer import Buffers, on_heap
from ..batch.device import map_tensors
from ..far.handover import copied, is_dense
from ..far.slabs import block_at


class Pinning:
    """Allocates pinned memory, and moves batches there. For any thread.

    Args:
        device: index of the device that copies. Without it, a thread would use CUDA on
            device 0, which costs memory there.
        slabs: whether to move batches out of shared memory, too. The trainer's own
            copies to the device may still read a batch that it has dropped, and worker
            processes write to shared memory again as soon as nobody uses it.
    """

    def __init__(self, device: int, *, slabs: bool) -> None:
        self._device = device
        self._slabs = slabs
        self._able = True

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned memory; ordinary memory from the first refusal on."""
        if self._able:
            try:
                with torch.cuda.device(self._device):
                    return torch.empty(
                        shape, dtype=dtype, device="cpu", pin_memory=True
                    )
            except RuntimeError:
                self._able = False
        return on_heap(shape, dtype)

    def pin(self, data: Any) -> Any:
        """Return a batch with its dense tensors in pinned memory; itself if they are.

        A batch that cannot be moved is returned as it is.
        """
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not self._moves(tensor):
                return tensor
            if id(tensor) not in moved:  # one that comes twice stays one
                moved[id(tensor)] = tensor, self._copied(tensor)
            return moved[id(tensor)][1]

        try:
            pinned = map_tensors(data, change) if self._able else data
        except Exception:  # noqa: BLE001 whatever the user's classes raise
            return data
        return pinned if moved else data

    def _moves(self, tensor: torch.Tensor) -> bool:
        if not is_dense(tensor):
            return False
        if block_at(tensor.data_ptr()) is not None:
            return self._slabs
        return not tensor.is_pinned()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return copied(tensor, self.allocate((tensor.numel(),), tensor.dtype))


def pinned(buffers: Buffers, device: int | None, *, slabs: bool) -> Buffers:
    """Return buffers whose batches are in pinned memory. For the trainer's thread.

    Args:
        buffers: how batches are made.
        device: index of the device that copies; None: the current one.
        slabs: as for `Pinning`.
    """
    if device is None:
        # Worker processes are not forked yet: leave CUDA alone if nobody has used it.
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if begun else 0
    pinning = Pinning(device, slabs=slabs)
    return replace(buffers, allocate=pinning.allocate, pin=pinning.pin)
