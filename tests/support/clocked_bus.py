"""A bus to a device with a virtual clock, which the test advances."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ClockedBus"]


class ClockedBus:
    """A device in the host's memory, on which operations only run at `tick`.

    Until then, results hold zeros. A copy reads its source when it runs, not when it is
    issued, so it is wrong if the source was overwritten in between. Like a device, it
    knows addresses and keeps nothing alive. Memory that is not pinned any more is an
    error.
    """

    def __init__(self) -> None:
        self.issued = self.done = self.waited = 0
        self.from_pageable = 0
        """Copies that kept the trainer until they were done."""
        self.awaited = 0
        """The operation up to which the trainer's stream waits."""
        self.refusing: set[str] = set()
        """"pinned", "register": what cannot be had."""
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []
        self.at_once = False
        self._queue: deque[Callable[[], object]] = deque()
        self._pinned: list[weakref.ref[torch.Tensor]] = []

    # For tests

    def tick(self, count: int = 1) -> None:
        """Run the next issued operations."""
        for _ in range(min(count, len(self._queue))):
            self._queue.popleft()()
            self.done += 1

    def read(self) -> None:
        """Let the trainer's stream reach the point where it reads its last batch."""
        self.tick(self.awaited - self.done)

    @property
    def pinned_bytes(self) -> int:
        """All that is pinned and alive, but for what was registered."""
        return sum(memory.nbytes for memory in self._alive())

    # The bus

    def side(self) -> AbstractContextManager[Any]:
        return Deferring(self)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.at_once = not self.is_pinned(tensor)
        self.from_pageable += self.at_once
        if not self.at_once:
            return seen_from_there(tensor).clone()
        try:
            return tensor.clone()
        finally:
            self.at_once = False

    def mark(self, *, here: bool = False) -> Place:
        return Place(self, self.issued)

    def hand_over(self, tensors: Iterable[torch.Tensor], mark: Place) -> None:
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        self.awaited = mark.at

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if "pinned" in self.refusing:
            raise RuntimeError("no pinned memory")
        memory = tensor.clone()
        self._pinned.append(weakref.ref(memory))
        return memory

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        address = tensor.data_ptr()
        ranges = [(m.data_ptr(), m.nbytes) for m in self._alive()]
        ranges += self.registered.items()
        return any(0 <= address - start < nbytes for start, nbytes in ranges)

    def register(self, address: int, nbytes: int) -> bool:
        if "register" in self.refusing:
            return False
        assert address not in self.registered
        self.registered[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]
        self.unregistered.append(address)

    def issue(self, work: Callable[[], object]) -> None:
        """Issue an operation."""
        self._queue.append(work)
        self.issued += 1

    def _alive(self) -> list[torch.Tensor]:
        return [memory for ref in self._pinned if (memory := ref()) is not None]


class Place:
    """A mark."""

    def __init__(self, bus: ClockedBus, at: int) -> None:
        self._bus = bus
        self.at = at

    def query(self) -> bool:
        return self._bus.done >= self.at

    def synchronize(self) -> None:
        self._bus.waited += not self.query()
        self._bus.tick(self.at - self._bus.done)


class Deferring(TorchDispatchMode):
    """Runs each operation of torch now for its shapes, and later for its values."""

    def __init__(self, bus: ClockedBus) -> None:
        super().__init__()
        self._bus = bus

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # nothing is compiled, and skipping would import all of the compiler
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._bus.at_once:
            self._bus.tick(self._bus.issued)
        out = func(*args, **kwargs)
        if out is args[0]:  # in place
            self._bus.issue(lambda: func(*args, **kwargs))
        elif not self._bus.at_once and not is_view(out, args[0]):
            out.zero_()
            self._bus.issue(lambda: self._do(out, func, args, kwargs))
        return out

    def _do(self, out: Any, func: Any, args: Any, kwargs: Any) -> None:
        __tracebackhide__ = True  # printing it would read memory that may be gone
        if "from_host" in vars(args[0]):
            assert self._bus.is_pinned(args[0]), "its source is pinned no more"
        out.copy_(func(*args, **kwargs))


def seen_from_there(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, without keeping it alive."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in pairs)
    block = (ctypes.c_uint8 * (span * tensor.itemsize)).from_address(tensor.data_ptr())
    line = torch.frombuffer(block, dtype=tensor.dtype)
    placed = line.as_strided(tensor.shape, tensor.stride())
    vars(placed)["from_host"] = True
    return placed


def is_view(out: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether two tensors share memory."""
    ours, theirs = out.untyped_storage(), of.untyped_storage()
    return out.numel() > 0 and ours.data_ptr() == theirs.data_ptr()
