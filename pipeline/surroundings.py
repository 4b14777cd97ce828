"""What worker processes will suffer from, said before they do: once each."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from .anatomy import walk

__all__ = ["find_on_device", "tell_of_cuda", "tell_of_shared_memory"]

LOGGER = logging.getLogger("penstock")
SHARED_MEMORY = "/dev/shm"  # noqa: S108 looked at, not written to
SMALL = 256 * 2**20
"""Bytes; what a container is given unasked is a quarter of it."""
TOLD: set[str] = set()
ON_CUDA = (
    "`%s` is a tensor on %s: forked worker processes cannot use it, others have a copy"
    " each. Keep it on the CPU, and move batches to the device"
)
TOO_SMALL = (
    "%s holds %d MiB, and torch's own workers hand their batches over there; give the"
    " container more (docker run --shm-size=1g), or turn autotune on: penstock's own"
    " workers do not use it"
)


def tell_of_cuda(dataset: Any) -> None:
    """Warn of a data set that holds tensors on a CUDA device."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    found = find_on_device(dataset, "cuda")
    if found is not None:
        _tell(ON_CUDA, *found)


def find_on_device(dataset: Any, kind: str) -> tuple[str, torch.device] | None:
    """Return which part of a data set is a tensor on a device of this kind, and which.

    None if there is none a few levels deep.
    """
    for part in walk(dataset, "dataset"):
        if isinstance(part.thing, torch.Tensor) and part.thing.device.type == kind:
            return part.path, part.thing.device
    return None


def tell_of_shared_memory(folder: str = SHARED_MEMORY) -> None:
    """Warn of too little shared memory for torch's own workers."""
    if not os.path.isdir(folder):
        return
    status = os.statvfs(folder)
    total = status.f_blocks * status.f_frsize
    if total < SMALL:
        _tell(TOO_SMALL, folder, total // 2**20)


def _tell(text: str, *values: object) -> None:
    line = text % values
    if line not in TOLD:
        TOLD.add(line)
        LOGGER.warning("%s.", line)
