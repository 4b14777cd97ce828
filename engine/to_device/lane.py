"""The lane: batches on their way to the device, a few ahead of the trainer.

It lies between a host and the trainer. It only takes batches ahead that are ready, so
it waits for nothing. Position, stamp and error of a batch take effect when it is due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..batch.buffer import Finished
from ..batch.device import DeviceStage, ToDevice
from ..feed import Delivery
from ..host.local import Host
from ..plan import Cursor
from .carrier import Carrier, Crossing
from .cuda import Bus

DEPTH = 2
"""Batches on the device ahead of the trainer's: one that is copied while the trainer
works, and one that is ready when a step is short."""


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
        ready: whether a host has a batch of an epoch; None means `is_ready`.
    """

    def __init__(
        self,
        bus: Bus,
        to_device: ToDevice,
        ready: Callable[[Host, int], bool] | None = None,
    ) -> None:
        self._carrier = Carrier(bus, to_device, DEPTH + 1)
        self._depth = DEPTH
        self._ready = ready or is_ready
        self._ahead: deque[Ahead] = deque()
        self.spent_ns = 0
        """Nanoseconds that the last `next` took after its batch was available."""

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
        while len(ahead) < self._depth and carrier.free and self._ready(host, epoch):
            cursor = host.cursor
            try:
                due = host.next()
            except Exception as error:  # noqa: BLE001 raised when its batch is due
                ahead.append(Ahead(cursor, error))
                return
            ahead.append(Ahead(cursor, self._sent(due)))

    def _sent(self, delivery: Delivery | None) -> Crossing | Delivery | None:
        """Send a batch ahead; if that fails, it is sent again when it is due."""
        try:
            return delivery and self._carrier.send(delivery)
        except Exception:  # noqa: BLE001 raised then, if it still fails
            self._depth = 0  # the device may only have room for the trainer's batch
            return delivery


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
