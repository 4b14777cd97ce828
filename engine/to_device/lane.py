"""The lane: batches on their way to the device, a few ahead of the trainer.

It lies between a host and the trainer. It only takes batches ahead that are ready, so
it waits for nothing. Position, stamp and error of a batch take effect when it is due.
Its carrier copies them, and keeps the memory that copies read. The device reads pinned
memory by itself. A copy from any other memory occupies the trainer's thread until it is
done. So whoever finishes a batch may put it into pinned memory, and the trainer need
not.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..batch.buffer import Buffers, Finished, on_heap
from ..batch.device import DeviceStage, ToDevice, map_tensors
from ..far.handover import copied, is_dense
from ..far.slabs import block_at
from ..feed import Delivery, Host
from ..plan import BatchPlan, Cursor
from .cuda import Bus

# Batches on the device ahead of the trainer's: one that is copied while the trainer
# works, and one that is ready when a step is short.
DEPTH = 2


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
        self._bus, self._to_device, self._most = bus, to_device, most
        # Whether the system pins slabs: if it refuses one, no more are tried.
        self._pins = True
        # Sources of unfinished copies: while one lives, so does its slab.
        self._under_way: deque[Source] = deque()
        # Of these, the batches in pinned memory of our own.
        self._staged_sources: deque[Source] = deque()

    @property
    def free(self) -> bool:
        """Whether a batch can be sent without waiting for an earlier copy."""
        sweep(self._staged_sources)
        return len(self._staged_sources) < self._most

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
            batch = self._to_device(data)
            self._under_way.append((self._bus.mark(here=True), tensors))
            return Crossing(batch, plan, None)
        copies = self._stage(tensors)

        def carry(tensor: torch.Tensor) -> torch.Tensor:
            return self._bus.copy(copies.get(id(tensor), tensor))

        try:
            with self._bus.side():
                batch = self._to_device(data, carry)
        finally:  # even if it failed, some of it may have been issued
            mark = self._bus.mark()
            self._under_way.append((mark, [t for t in tensors if id(t) not in copies]))
            if copies:
                self._staged_sources.append((mark, list(copies.values())))
        return Crossing(batch, plan, mark)

    def _stage(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return copies in pinned memory of those that are not there, by their `id`.

        None of them if there is no pinned memory: they can be copied from where they
        are, only slower.
        """
        loose = [t for t in tensors if is_dense(t) and not self._is_pinned(t)]
        while loose and not self.free:
            self._staged_sources[0][0].synchronize()
        try:
            return {id(t): self._bus.pin(t) for t in loose}
        except RuntimeError:
            return {}

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in pinned memory; pins its slab if needed.

        A slab then stays pinned until its memory is released, whoever made or maps it.
        """
        if self._bus.is_pinned(tensor):
            return True
        block = block_at(tensor.data_ptr()) if self._pins else None
        if block is None:
            return False
        address = ctypes.addressof(block)
        self._pins = self._bus.register(address, ctypes.sizeof(block))
        if self._pins:
            # Of several finalizers, the one made last is called first (weakref): this
            # one runs before the memory is unmapped.
            weakref.finalize(block, self._bus.unregister, address).atexit = False
        return self._pins

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
        self._staged_sources.clear()


# What a copy reads, and the event after it.
Source = tuple[torch.cuda.Event, list[torch.Tensor]]


def sweep(sources: deque[Source]) -> None:
    """Let go of what has been read."""
    while sources and sources[0][0].query():  # type: ignore[no-untyped-call]
        sources.popleft()


def tensors_of(data: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(data, note)
    return tensors


class Ahead(NamedTuple):
    """What the host returned before the trainer asked for it."""

    cursor: Cursor
    """Where the batch starts."""
    due: Crossing | Delivery | Exception | None
    """A delivery is yet to be sent; None is the epoch's end."""


class Lane:
    """Delivers a host's batches on the device. For the trainer's thread.

    Args:
        bus: the bus to the device.
        to_device: what to do with a batch there.
    """

    def __init__(self, bus: Bus, to_device: ToDevice) -> None:
        self._carrier = Carrier(bus, to_device, DEPTH + 1)
        self._depth = DEPTH
        self._ahead: deque[Ahead] = deque()
        # Nanoseconds that the last `next` took after its batch was available.
        self.spent_ns = 0

    def cursor(self, host: Host) -> Cursor:
        """Return where the trainer's next batch starts."""
        ahead = self._ahead
        return ahead[0].cursor if ahead else host.cursor

    def next(self, host: Host) -> Delivery | None:
        """Return the next batch of the epoch; None at its end.

        The batches after it that are ready by then are on their way when this returns.

        Raises:
            Exception: as the host's `next`, and as `Carrier.send`.
        """
        ahead = self._ahead
        due = ahead.popleft().due if ahead else host.next()
        if isinstance(due, Exception):
            try:
                raise due
            finally:  # the exception holds this frame, so this must not hold it
                del due
        if due is None:
            return None
        self.spent_ns = -time.perf_counter_ns()
        crossing = due if isinstance(due, Crossing) else self._carrier.send(due)
        del due  # its host memory may be reused for the batches ahead
        self._look_ahead(host, crossing.plan.epoch)
        delivery = self._carrier.hand_over(crossing)
        self.spent_ns += time.perf_counter_ns()
        return delivery

    def drop(self) -> None:
        """Forget batches taken ahead: the trainer continues elsewhere."""
        self._ahead = deque()

    def close(self) -> None:
        """Release all memory. From any thread; idempotent."""
        self.drop()
        self._carrier.close()

    def _look_ahead(self, host: Host, epoch: int) -> None:
        ahead, carrier = self._ahead, self._carrier
        while len(ahead) < self._depth and carrier.free and is_ready(host, epoch):
            cursor = host.cursor
            try:
                due = host.next()
            except Exception as error:  # noqa: BLE001 raised when its batch is due
                ahead.append(Ahead(cursor, error))
                return
            sent: Crossing | Delivery | None = due
            try:
                sent = due and carrier.send(due)
            except Exception:  # noqa: BLE001 sent again when it is due, and raised then
                self._depth = 0  # the device may only have room for the trainer's batch
            ahead.append(Ahead(cursor, sent))


def is_ready(host: Host, epoch: int) -> bool:
    """Whether `host.next()` can return a whole batch of this epoch without waiting.

    This is known only if the batches are those that the engine makes. A batch with a
    failure stays where it is until it is due.
    """
    engine = host.engine
    assert engine is not None  # nobody but an engine makes batches for a device
    if engine.recipe.repack or engine.recipe.drawn:
        return False
    in_flight, batch = engine.engine_lock.peek() or (None, None)
    whole = isinstance(batch, Finished) and not batch.failures
    return whole and in_flight is not None and in_flight.plan.epoch == epoch


def lane_to(stage: DeviceStage) -> Lane:
    """Return the lane to a CUDA device."""
    bus = Bus(stage.device)
    return Lane(bus, ToDevice(replace(stage, device=bus.device)))


# Batches that are in pinned memory when they are made


class Pinning:
    """Allocates pinned memory, and moves batches there. For any thread.

    The memory comes from torch's allocator. It rounds a block up to a power of two,
    keeps it for the next batch, and reuses it only after the copies that torch has made
    from it.

    Args:
        device: index of the device that copies. Without it, a thread would use CUDA on
            device 0, which costs memory there.
        slabs: whether to move batches out of shared memory, too. The trainer's own
            copies to the device may still read a batch that it has dropped, and worker
            processes write to shared memory again as soon as nobody uses it.
    """

    def __init__(self, device: int, *, slabs: bool) -> None:
        self._device, self._slabs = device, slabs
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
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not self._moves(tensor):
                return tensor
            if id(tensor) not in copies:  # one that comes twice stays one
                memory = self.allocate((tensor.numel(),), tensor.dtype)
                copies[id(tensor)] = tensor, copied(tensor, memory)
            return copies[id(tensor)][1]

        try:
            batch = map_tensors(data, change) if self._able else data
        except Exception:  # noqa: BLE001 whatever the user's classes raise
            return data
        return batch if copies else data

    def _moves(self, tensor: torch.Tensor) -> bool:
        return is_dense(tensor) and (
            not tensor.is_pinned()
            if block_at(tensor.data_ptr()) is None
            else self._slabs
        )


def pinned(buffers: Buffers, device: int | None, *, slabs: bool) -> Buffers:
    """Return buffers whose batches are in pinned memory. For the trainer's thread.

    Args:
        buffers: how batches are made.
        device: index of the device that copies; None: the current one.
        slabs: as for `Pinning`.
    """
    if device is None:
        # Worker processes are not forked yet: leave CUDA alone if nobody has used it.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if in_use else 0
    pinning = Pinning(device, slabs=slabs)
    return replace(buffers, allocate=pinning.allocate, pin=pinning.pin)
