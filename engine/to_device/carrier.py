"""The carrier: copies batches to the device, and keeps the memory that copies read.

The device reads pinned memory by itself. A copy from any other memory occupies the
trainer's thread until it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.device import ToDevice
from ..batch.tensors import map_tensors
from ..far.handover import is_dense
from ..far.slabs import block_at
from ..feed import Delivery
from ..plan import BatchPlan
from .cuda import Bus


@dataclass(frozen=True, slots=True)
class Crossing:
    """A batch on its way to the device, or there."""

    data: Any
    """Its tensors on the device; once handed over, they are the trainer's alone."""
    plan: BatchPlan
    mark: torch.cuda.Event | None
    """Recorded after all work on it; None: it was made in the trainer's stream."""


class Carrier:
    """Copies batches, and runs their device functions, all on the bus.

    Args:
        bus: the bus to the device.
        to_device: what to do with a batch there.
        most: batches that may lie in pinned memory of the carrier's own.
    """

    def __init__(self, bus: Bus, to_device: ToDevice, most: int) -> None:
        self._bus = bus
        self._to_device = to_device
        self._most = most
        self._slabs = PinnedSlabs(bus)
        # Sources of unfinished copies: while one lives, so does its slab.
        self._under_way: deque[Source] = deque()
        # Of these, the batches in pinned memory of our own.
        self._staged: deque[Source] = deque()

    @property
    def free(self) -> bool:
        """Whether a batch can be sent without waiting for an earlier copy."""
        sweep(self._staged)
        return len(self._staged) < self._most

    def send(self, delivery: Delivery) -> Crossing:
        """Issue everything that brings a batch to the device.

        Waits for an earlier copy if it needs pinned memory, and there is too much.

        Raises:
            SpecError: as `ToDevice`.
            RuntimeError: the device has no memory for it.
        """
        sweep(self._under_way)
        data, plan = delivery.data, delivery.plan
        tensors = tensors_of(data)
        if any(tensor.device.type != "cpu" for tensor in tensors):
            # Made in some stream of the user's: the trainer's stream must continue.
            moved = self._to_device(data)
            self._under_way.append((self._bus.mark_here(), tensors))
            return Crossing(moved, plan, None)
        staged = self._stage(tensors)

        def carry(tensor: torch.Tensor) -> torch.Tensor:
            return self._bus.copy(staged.get(id(tensor), tensor))

        try:
            with self._bus.side():
                moved = self._to_device(data, carry)
        finally:  # even if it failed, some of it may have been issued
            mark = self._bus.mark()
            self._under_way.append((mark, [t for t in tensors if id(t) not in staged]))
            if staged:
                self._staged.append((mark, list(staged.values())))
        return Crossing(moved, plan, mark)

    def _stage(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return copies in pinned memory of those that are not there, by their `id`.

        None of them if there is no pinned memory: they can be copied from where they
        are, only slower.
        """
        loose = [t for t in tensors if is_dense(t) and not self._slabs.contains(t)]
        while loose and not self.free:
            self._staged[0][0].synchronize()
        try:
            return {id(t): self._bus.pin(t) for t in loose}
        except RuntimeError:
            return {}

    def hand_over(self, crossing: Crossing) -> Delivery:
        """Return a batch that the trainer's current stream may use."""
        if crossing.mark is not None:
            self._bus.hand_over(tensors_of(crossing.data), crossing.mark)
        return Delivery(crossing.data, crossing.plan)

    def close(self) -> None:
        """Wait for copies in progress, and release all memory. From any thread."""
        under_way, self._under_way = self._under_way, deque()
        if under_way:
            with contextlib.suppress(RuntimeError):  # the device failed: nothing reads
                under_way[-1][0].synchronize()
        self._staged.clear()


Source = tuple[torch.cuda.Event, list[torch.Tensor]]
"""What a copy reads, and the event after it."""


def sweep(sources: deque[Source]) -> None:
    """Let go of what has been read."""
    while sources and sources[0][0].query():  # type: ignore[no-untyped-call]
        sources.popleft()


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


def tensors_of(data: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(data, note)
    return found
