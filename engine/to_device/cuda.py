"""The bus to a CUDA device, which takes copies while the trainer computes.

What is issued on the bus is done in that order, later. Host memory that a copy reads
from must be left as it is until then, and only pinned memory is read later. All calls
of CUDA that copying takes are in here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of this process."""
SUCCESS = 0


class Bus:
    """A device's copies, on a stream beside the trainer's. For the trainer's thread.

    `unregister` may be called from any.

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
        """Within it, what torch does on the device is issued on the bus."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Issue a copy of a tensor of the host; return it as it will be. In `side`.

        From memory that is not pinned it is done, for the host, when this returns.
        """
        return tensor.to(self.device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """Return the place after all that was issued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def hand_over(
        self, tensors: Iterable[torch.Tensor], mark: torch.cuda.Event
    ) -> None:
        """Let the trainer's stream have tensors of the bus, from `mark` on.

        Their memory, when they have died, is not used again before that stream is
        through with them.
        """
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory, `uint8 [nbytes]`.

        Raises:
            RuntimeError: there is none to be had.
        """
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies in pinned memory."""
        return tensor.is_pinned()

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory that is there already; return whether it could be done."""
        status = self._cudart.cudaHostRegister(address, nbytes, PORTABLE)
        if int(status) == SUCCESS:
            return True
        self._forget_error()
        return False

    def unregister(self, address: int) -> None:
        """Undo it, once nothing issued before reads from there."""
        if os.getpid() != self._owner:
            return  # a fork has the memory, but cannot use CUDA
        with suppress(RuntimeError):  # of a kernel of the trainer's
            self._stream.synchronize()
        self._cudart.cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """CUDA reports a failed call once more, for the next kernel: let that be ours.

        torch has no cudaGetLastError to ask for.
        """
        with suppress(RuntimeError), self.side():
            torch.ones(1, device=self.device)  # a kernel: others do not ask

    def __repr__(self) -> str:
        return f"<Bus to {self.device}>"
