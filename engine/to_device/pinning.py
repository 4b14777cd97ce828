"""Batches in pinned memory, from which a CUDA device copies while the trainer works.

Whoever finishes a batch puts it there, so that the trainer need not copy it. The memory
is torch's: its allocator reuses a block only after the copies from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..batch.buffer import Buffers, on_heap
from ..batch.stamp import map_tensors
from ..workers.process.handover import BITS, is_dense
from ..workers.process.slabs import block_at


def pinned(buffers: Buffers, *, slabs: bool) -> Buffers:
    """Return buffers whose batches are in pinned memory.

    Args:
        buffers: how batches are made.
        slabs: whether to move batches out of shared memory, too. The trainer's own
            copies to the device may still read a batch that it has dropped, and worker
            processes write to shared memory again as soon as nobody uses it.
    """
    return replace(buffers, allocate=allocate, pin=pin if slabs else pin_loose)


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned memory; ordinary memory if there is none."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return on_heap(shape, dtype)


def pin(data: Any) -> Any:
    """Return a batch with its dense tensors in pinned memory; itself if they are."""
    return _moved(data, _everywhere)


def pin_loose(data: Any) -> Any:
    """Return a batch as `pin` does, but leave in shared memory what is there."""
    return _moved(data, _outside_slabs)


def _everywhere(_: torch.Tensor) -> bool:
    return True


def _outside_slabs(tensor: torch.Tensor) -> bool:
    return block_at(tensor.data_ptr()) is None


def _moved(data: Any, moves: Callable[[torch.Tensor], bool]) -> Any:
    copies: dict[int, torch.Tensor] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if is_dense(tensor) and not tensor.is_pinned() and moves(tensor):
            key = id(tensor)
            copies[key] = copies[key] if key in copies else _copied(tensor)
            return copies[key]
        return tensor

    moved = map_tensors(data, change)
    return moved if copies else data


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to pinned memory, on one core, whatever torch's threads are."""
    stride = torch.empty_like(tensor, device="meta").stride()
    memory = allocate((tensor.numel(),), tensor.dtype)
    place = memory.as_strided(tensor.shape, stride)
    as_bits = BITS[tensor.itemsize]
    np.copyto(place.view(as_bits).numpy(), tensor.view(as_bits).numpy())
    return place
