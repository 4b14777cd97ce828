"""A run: an engine, wherever it lives, from the first batch to its close."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .batch.stamp import in_parts, stamped
from .core.byte_budget import ByteBudget
from .feed import Delivery
from .host.local import Host, TrainerHost
from .host.process import ProcessHost
from .host.relocation import Relocation, may_move
from .observe.knob import Knob
from .observe.monitor import Reading, TrainerMeter, Window, difference
from .observe.observation import Observation
from .plan import Cursor
from .recipe import Recipe
from .to_device.device import DeviceStage, ToDevice

if TYPE_CHECKING:
    from .to_device.lane import Lane

__all__ = [
    "Run",
]

# What CUDA takes is loaded where there is such a device to copy to.


HISTORY = 10
"""Readings kept for `recent`, one a second."""


class Run:
    """What iterating a pipeline starts, and keeps between epochs.

    `next` and `begin` belong to the trainer's thread; `observe`, `knobs` and `steps` to
    the tuner's; `close` may be called from any.
    """

    def __init__(self, recipe: Recipe, byte_budget: ByteBudget, cursor: Cursor) -> None:
        self._lane, self._to_device = ways_to(recipe.device)
        self._parts = recipe.batch.microbatches
        self._trainer = TrainerMeter()
        self._caches = recipe.caches
        for cache in self._caches:
            cache.open()  # before any process forks: they are to find it
        host = ProcessHost if recipe.options.host == "process" else TrainerHost
        self.host: Host = host(recipe, byte_budget, cursor, self._trainer)
        self._relocation: Relocation | None = None
        if may_move(recipe):
            self._relocation = Relocation(recipe, byte_budget, self._trainer)
        self._moves = 0
        self._closed = False
        self._era = self.era
        self._window = Window(self.host)
        self._history: deque[tuple[tuple[int, int], Reading]] = deque(maxlen=HISTORY)
        self._note(self.host.read())

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        return self.host.cursor if self._lane is None else self._lane.cursor(self.host)

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`; free where that is what has been prefetched."""
        if self._relocation is not None:
            self._relocation.reset()
        if self._lane is not None:
            self._lane.drop()
        self.host.begin(cursor)
        self._history.clear()
        self._note(self.host.read())

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, stamped; None at its end. Measured."""
        trainer, host = self._trainer, self.host
        trainer.ask(time.perf_counter_ns())
        if self._relocation is not None:
            self._relocation.asked()
        delivery = host.next() if self._lane is None else self._lane.next(host)
        if delivery is None:
            if self._relocation is not None:
                self._relocation.reset()
            self._note(host.glance() or host.read())
            trainer.stop()
            return None
        data, plan = delivery.data, delivery.plan
        if self._relocation is not None:
            self._relocate(self._relocation, data)
        if self._to_device is not None:
            data = self._to_device(data)
        if self._parts is not None:
            data = in_parts(data, self._parts)
        delivery = Delivery(stamped(data, plan), plan)
        if (reading := self.host.glance()) is not None:
            self._note(reading)
        trainer.get(time.perf_counter_ns(), plan)
        return delivery

    def _relocate(self, relocation: Relocation, data: Any) -> None:
        """Let the engine be moved, if it is to be."""
        host = relocation.given(self.host, data)
        if host is not self.host:
            self.host = host
            self._moves += 1
            if self._closed:  # by another thread, which may have closed the one before
                host.close()

    @property
    def era(self) -> tuple[int, int]:
        """Changes when all counters begin anew, as the engine is another one."""
        return self._moves, self.host.era

    # The tuner's side: this is the plant it tunes

    @property
    def steps(self) -> int:
        """Batches handed over since the start."""
        return self._trainer.steps

    def observe(self) -> Observation | None:
        """Return the window since the last call; None if the trainer is elsewhere.

        None also where the engine is another one than it was: its counters began anew.
        """
        observation = self._window.observe()
        if self._era != self.era:
            self._era, self._window = self.era, Window(self.host)
            return None
        return observation if self._trainer.training else None

    def knobs(self) -> tuple[Knob, ...]:
        """Return everything that may be turned."""
        return self.host.knobs()

    def recent(self) -> Observation:
        """Return the last ten seconds or so of training, however long ago they were."""
        era = self.era
        readings = [reading for at, reading in list(self._history) if at == era]
        if self._trainer.training or not readings:
            readings.append(self.read())
        return difference(readings[0], readings[-1])

    def read(self) -> Reading:
        """Return all totals as of now."""
        found = (cache.statistics() for cache in self._caches)
        caches = tuple(each for each in found if each is not None)
        return replace(self.host.read(), caches=caches)

    def is_free(self) -> bool:
        """Whether no thread is stuck in a lock of ours; if so, it may be this one."""
        return self.host.is_free()

    def close(self) -> None:
        """Stop everything. Idempotent."""
        self._closed = True
        self.host.close()
        if self._lane is not None:
            self._lane.close()

    def _note(self, reading: Reading) -> None:
        self._history.append((self.era, reading))

    def __repr__(self) -> str:
        return f"<Run: {self.host!r}>"


def ways_to(stage: DeviceStage | None) -> tuple[Lane | None, ToDevice | None]:
    """Return how batches get to a device: over a lane, at once, or not at all."""
    if stage is None:
        return None, None
    if stage.device.type != "cuda":
        return None, ToDevice(stage)
    from .to_device.lane import lane_to

    return lane_to(stage), None
