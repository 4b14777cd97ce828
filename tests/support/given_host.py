"""A host of batches made in advance, with a lane over a clocked bus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from penstock.engine.batch.buffer import Finished
from penstock.engine.batch.device import DeviceStage, ToDevice
from penstock.engine.feed import Delivery
from penstock.engine.plan import Cursor
from penstock.engine.to_device.lane import Lane

from .clocked_bus import ClockedBus
from .core_script import Script

__all__ = ["PLAN", "Given", "as_it_is", "images", "lane_over", "taken"]

PLAN = Script((4,)).batch(7)


def as_it_is() -> ToDevice:
    """Return device work that leaves batches as they are."""
    return ToDevice(DeviceStage.of("cpu"))


class Given:
    """A host of batches made in advance; the test decides when they are ready."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.place = self.ready = 0

    @property
    def cursor(self) -> Cursor:
        return Cursor(0, self.place, self.place, 0)

    def next(self) -> Delivery | None:
        if self.place == len(self.batches):
            return None
        self.place += 1
        data = self.batches[self.place - 1]
        if isinstance(data, Exception):
            raise data
        return Delivery(data, PLAN)

    @property
    def engine(self) -> Any:
        """Return what a lane asks for the next batch without waiting."""
        there = self.place < min(self.ready, len(self.batches))
        entry = SimpleNamespace(plan=PLAN), Finished(None)
        lock = SimpleNamespace(peek=lambda: entry if there else None)
        recipe = SimpleNamespace(repack=False, drawn=None)
        return SimpleNamespace(recipe=recipe, engine_lock=lock)


def lane_over(bus: ClockedBus, to_device: ToDevice | None = None) -> Lane:
    """Return a lane to the bus's device."""
    return Lane(bus, to_device or as_it_is())


def taken(lane: Lane, host: Any) -> Any:
    """Return the next batch as the bus has left it so far."""
    delivery = lane.next(host)
    assert delivery is not None
    return delivery.data


def images(value: int, rows: int = 4) -> torch.Tensor:
    """Return `uint8 [rows, 2, 5, 3]`, another for each value."""
    start = torch.arange(rows * 2 * 5 * 3, dtype=torch.int64) + value
    return (start % 251).to(torch.uint8).reshape(rows, 2, 5, 3)
