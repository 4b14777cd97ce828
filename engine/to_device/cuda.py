"""The bus to a CUDA device, which makes copies while the trainer computes.

Work issued on the bus runs later, in order. Host memory that a copy reads must stay
unchanged until then, and only pinned memory is read later. All CUDA calls of the
trainer's thread for copying are in this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

# cudaHostRegisterPortable: pinned for all devices of this process.
PORTABLE = 1
# By layout, what returns the tensors of which a sparse one consists.
PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Bus:
    """A device's copies, on a stream beside the trainer's. For the trainer's thread.

    Any thread may call `unregister`.

    Args:
        device: a device of type "cuda"; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._owner = os.getpid()

    def side(self) -> AbstractContextManager[Any]:
        """Return a context in which torch issues its work on the bus."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Issue a copy of a host tensor and return the copy. Call it in `side`.

        If the memory is not pinned, the host is done with it when this returns.
        """
        return tensor.to(self.device, non_blocking=True)

    def mark(self, *, here: bool = False) -> torch.cuda.Event:
        """Return an event after everything issued so far.

        Args:
            here: whether that is in the trainer's own stream, in place of the bus.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device) if here else self._stream)
        return event

    def hand_over(
        self, tensors: Iterable[torch.Tensor], mark: torch.cuda.Event
    ) -> None:
        """Let the trainer's stream use tensors of the bus, after `mark`.

        When they die, their memory is not reused before that stream has finished with
        them.
        """
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        for tensor in tensors:
            parts = [getattr(tensor, name)() for name in PARTS.get(tensor.layout, ())]
            for part in parts or [tensor]:
                part.record_stream(current)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor in pinned memory.

        Raises:
            RuntimeError: there is none.
        """
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in pinned memory."""
        return tensor.is_pinned()

    def register(self, address: int, nbytes: int) -> bool:
        """Pin existing memory; return whether that was possible."""
        if not int(self._cudart.cudaHostRegister(address, nbytes, PORTABLE)):
            return True  # zero is cudaSuccess
        # CUDA reports the error again at the next kernel. torch does not offer
        # cudaGetLastError, so a kernel of our own takes the report.
        with suppress(RuntimeError), self.side():
            torch.ones(1, device=self.device)
        return False

    def unregister(self, address: int) -> None:
        """Unpin memory once nothing issued before reads from it."""
        if os.getpid() != self._owner:
            return  # a fork has the memory, but cannot use CUDA
        with suppress(RuntimeError):  # from a kernel of the trainer's
            self._stream.synchronize()
        self._cudart.cudaHostUnregister(address)
