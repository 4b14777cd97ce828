"""The bus to a CUDA device. All calls of CUDA that copying takes are in here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .bus import Mark

__all__ = ["CudaBus"]

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of this process."""
SUCCESS = 0


class CudaBus:
    """One stream for copies.

    Args:
        device: of type "cuda"; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._owner = os.getpid()

    def side(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        mark: Mark = event
        return mark

    def hand_over(self, tensors: Iterable[torch.Tensor], mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def register(self, address: int, nbytes: int) -> bool:
        status = self._cudart.cudaHostRegister(address, nbytes, PORTABLE)
        if int(status) == SUCCESS:
            return True
        self._forget_error()
        return False

    def unregister(self, address: int) -> None:
        if os.getpid() != self._owner:
            return  # a fork has the memory, but cannot use CUDA
        with contextlib.suppress(RuntimeError):  # of a kernel of the trainer's
            self._stream.synchronize()
        self._cudart.cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """CUDA reports a failed call once more, for the next kernel: let that be ours.

        torch has no cudaGetLastError to ask for.
        """
        with contextlib.suppress(RuntimeError), self.side():
            torch.ones(1, device=self.device)  # a kernel: others do not ask

    def __repr__(self) -> str:
        return f"<CudaBus to {self.device}>"
