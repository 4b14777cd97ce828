"""The bus: what is asked of a device that takes copies while the trainer computes.

What is issued on the bus is done in that order, later. Host memory that a copy reads
from must be left as it is until then, and only pinned memory is read later.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["Bus", "Mark"]


class Mark(Protocol):
    """A place in the order of what was issued. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all before it is done. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Bus(Protocol):
    """A device's copies, on a stream beside the trainer's. For the trainer's thread.

    `unregister` may be called from any.
    """

    def side(self) -> AbstractContextManager[Any]:
        """Within it, what torch does on the device is issued on the bus."""
        ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Issue a copy of a tensor of the host; return it as it will be. In `side`.

        From memory that is not pinned it is done, for the host, when this returns.
        """
        ...

    def mark(self) -> Mark:
        """Return the place after all that was issued so far."""
        ...

    def hand_over(self, tensors: Iterable[torch.Tensor], mark: Mark) -> None:
        """Let the trainer's stream have tensors of the bus, from `mark` on.

        Their memory, when they have died, is not used again before that stream is
        through with them.
        """
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory, `uint8 [nbytes]`.

        Raises:
            RuntimeError: there is none to be had.
        """
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies in pinned memory."""
        ...

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory that is there already; return whether it could be done."""
        ...

    def unregister(self, address: int) -> None:
        """Undo it, once nothing issued before reads from there."""
        ...
