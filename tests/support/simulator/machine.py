"""The simulated machine: a virtual clock, cores, and the pipelines that share them.

There are two kinds of events: a worker finishes a chunk of rows, and a trainer finishes
its own part of a step. The time that either takes is drawn when it begins, and depends
on the load of the machine at that moment. If the demand for CPU (or the GIL, or a
store's bandwidth) exceeds the supply, all work that needs it is slowed down until
demand and supply are equal.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from math import isclose
from typing import Protocol

ROUNDS = 30
"""Most iterations in the search for the slow-down factors."""
ENOUGH = 1e-4
"""The search ends once no factor changes by more than this, relatively."""

Parts = tuple[float, float, float, float]
"""Seconds per row: waiting, on a CPU without the GIL, on a CPU with it, and using the
store's bandwidth."""


class Tenant(Protocol):
    """A pipeline with its trainer, as the machine sees it."""

    @property
    def load(self) -> tuple[int, ...]:
        """A key that identifies its load: busy workers by stage, busy trainer."""

    @property
    def depth(self) -> int:
        """Number of stages."""

    def users(self) -> list[tuple[int, Parts]]:
        """Return the present users of resources: stage by stage, then the trainer.

        Each entry is the number of busy workers and the parts of their time.
        """


class Machine:
    """Owns the clock and the cores.

    Args:
        cores: number of cores.
        seed: for all random draws.
    """

    def __init__(self, cores: float, seed: int = 0) -> None:
        self.cores = cores
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.pipelines: list[Tenant] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stretches: dict[object, list[float]] = {}

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Schedule an event `delay_s` seconds from now."""
        due_s = self.now_s + delay_s
        heapq.heappush(self._events, (due_s, next(self._numbers), event))

    def advance(self, seconds: float) -> None:
        """Advance the clock, and run the events that become due."""
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = end_s

    def use(self, cores: float) -> None:
        """Change the number of cores, as if another program came or a quota changed."""
        self.cores = cores

    def cpu_stretch(self) -> float:
        """Return the factor by which CPU work is slowed down now."""
        return self._factors()[0]

    def _factors(self) -> list[float]:
        key = (self.cores, *(pipeline.load for pipeline in self.pipelines))
        factors = self._stretches.get(key)
        if factors is None:
            factors = self._stretches[key] = self._stretch()
        return factors

    def stretch(self, pipeline: Tenant, at: int) -> Parts:
        """Return the factor by which each part of a row is slowed down in one stage."""
        factors = self._factors()
        index = self.pipelines.index(pipeline)
        store = self._resource(index, at)
        return 1.0, factors[0], max(factors[0], factors[1 + index]), factors[store]

    def _resource(self, index: int, at: int) -> int:
        """Return the index of a stage's store in the resources: CPU, GILs, stores."""
        before = sum(pipeline.depth for pipeline in self.pipelines[:index])
        return 1 + len(self.pipelines) + before + at

    def _stretch(self) -> list[float]:
        """Find the factors at which no resource is used beyond its capacity."""
        uses = [
            (count, parts, 1 + index, self._resource(index, at))
            for index, pipeline in enumerate(self.pipelines)
            for at, (count, parts) in enumerate(pipeline.users())
        ]
        factors = [1.0] * (1 + max((store for *_, store in uses), default=0))
        for _ in range(ROUNDS):
            used = [0.0] * len(factors)
            for count, (wait, free, held, store_s), gil, store in uses:
                cpu, lock = factors[0], max(factors[0], factors[gil])
                whole = wait + free * cpu + held * lock + store_s * factors[store]
                if whole > 0:
                    used[0] += count * (free + held) / whole
                    used[gil] += count * held * factors[0] / whole
                    used[store] += count * store_s / whole
            used[0] /= self.cores  # there is one of every other resource
            settled = True
            for at, amount in enumerate(used):
                before = factors[at]
                if amount > 1.0 or before > 1.0:
                    factors[at] = max(1.0, before * amount**0.7)
                    settled &= isclose(before, factors[at], rel_tol=ENOUGH)
            if settled:
                break
        return factors


class Ranks:
    """Trainers of one model: none goes on before all have their batch of a step.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._waiting: list[Callable[[], None]] = []

    def arrive(self, go_on: Callable[[], None]) -> None:
        """Register a rank that has its batch; the last one lets all continue."""
        self._waiting.append(go_on)
        if len(self._waiting) == self._world:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()
