"""Many nodes that train one model in step: how loading affects their speed.

One node was measured, and the others are assumed to be like it. Each loads a bounded
number of batches ahead of its trainer, from its own cache tiers and from a store whose
bandwidth all nodes share. A step ends for all nodes when the slowest one has done its
part. The model leaves out the time to exchange gradients.

`step_bounds` is the closed form; `simulate` runs the steps one by one. Without
stragglers the two agree. With them, the simulation shows how much of the variation
prefetching absorbs.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import NormalDist, fmean

QUANTILES = 4096
"""Number of quantiles that stand for a normal distribution: enough for its tail to
include the slowest of a thousand nodes."""
SETTLING = 20
"""Steps until the batches loaded before the first step are used up."""
MIN_STEPS = 60
MIN_NODE_STEPS = 4096
"""Fewest steps of all nodes together, so that means over few nodes are certain, too."""

SLOWEST, LOADING, DISK, LINK, STORE = (
    "the slowest trainer of a step",
    "a node's own loading",
    "a node's disk",
    "a node's link to the store",
    "the store's bandwidth",
)


@dataclass(frozen=True, slots=True)
class Tier:
    """A cache of each node, read before the tiers after it and before the store."""

    nbytes: float
    """Capacity in bytes."""
    bytes_per_s: float = inf
    """Speed at which a node reads it; the time for RAM is not worth counting."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One node as it was measured, and the resources that all nodes share."""

    steps_s: tuple[float, ...]
    """Times of the trainer's own part of a step. Each step of a node draws one."""
    batch_rows: int
    """Samples that a node trains on per step."""
    row_bytes: float
    """Size of a sample in the store, and in the caches."""
    node_rows_per_s: float = inf
    """Samples per second that a node can load if no store limits it. Its CPUs are the
    limit, by the bottleneck law."""
    store_bytes_per_s: float = inf
    """Bandwidth of the store, which all nodes share."""
    link_bytes_per_s: float = inf
    """Most bandwidth of the store that one node can use."""
    data_bytes: float = inf
    """Size of the whole dataset."""
    tiers: tuple[Tier, ...] = ()
    """RAM first, then disk. Empty: each epoch reads from the store."""
    own_parts: bool = True
    """Whether a node reads the same part of the data in each epoch, as with
    `shuffle(parts=...)`. Otherwise a node may get any sample."""
    prefetch_size: int = 2
    """Most batches that reading is ahead of processing, and processing of the
    trainer."""

    def shares(self, nodes: int, *, warm: bool) -> tuple[float, ...]:
        """Return the share of a batch read from each tier, and last, from the store.

        Args:
            nodes: number of nodes.
            warm: whether an earlier epoch has filled the caches.
        """
        data = self.data_bytes / nodes if self.own_parts else self.data_bytes
        left, found = 1.0, []
        for tier in self.tiers:
            kept = min(left, tier.nbytes / data) if warm else 0.0
            left -= kept
            found.append(kept)
        return (*found, left)

    def step_bounds(self, nodes: int, *, warm: bool = False) -> dict[str, float]:
        """Return the shortest possible step in seconds under each limit, by its name.

        The longest of these is the step if nothing varies, and a lower bound otherwise
        (operational analysis: P. Denning and J. Buzen, 1978).
        """
        batch = self.batch_rows * self.row_bytes
        *kept, missed = self.shares(nodes, warm=warm)
        return {
            SLOWEST: expected_slowest_s(self.steps_s, nodes),
            LOADING: self.batch_rows / self.node_rows_per_s,
            DISK: self.tiers_s(kept),
            LINK: missed * batch / self.link_bytes_per_s,
            STORE: nodes * missed * batch / self.store_bytes_per_s,
        }

    def tiers_s(self, kept: Sequence[float]) -> float:
        """Return the seconds in which a node reads these shares of a batch."""
        batch = self.batch_rows * self.row_bytes
        return sum(
            share * batch / tier.bytes_per_s
            for share, tier in zip(kept, self.tiers, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The predicted speed of a number of nodes."""

    nodes: int
    rows_per_s: float
    """Samples per second of all nodes together."""
    efficiency: float
    """Their speed as a share, 0 to 1, of the speed of as many trainers that never wait,
    neither for data nor for each other."""
    binds: str
    """The name of the longest of `Cluster.step_bounds`."""


def normal_steps(mean_s: float, spread: float) -> tuple[float, ...]:
    """Return times of steps that are normally distributed, in seconds.

    Args:
        mean_s: mean time of a step.
        spread: standard deviation, relative to the mean; 0: all steps are equal.
    """
    if spread * mean_s == 0:
        return (mean_s,)
    normal = NormalDist(mean_s, spread * mean_s)
    quantiles = (normal.inv_cdf((at + 0.5) / QUANTILES) for at in range(QUANTILES))
    return tuple(max(0.0, each) for each in quantiles)


def expected_slowest_s(steps_s: Sequence[float], nodes: int) -> float:
    """Return how long the slowest of `nodes` nodes takes on average, in seconds.

    With `m` equally likely values in ascending order, the largest of `n` draws is at
    most the i-th with the probability `(i / m) ** n` (H. A. David, Order Statistics).
    """
    count = len(steps_s)
    below = [(at / count) ** nodes for at in range(count + 1)]
    return sum(
        value * (below[at + 1] - below[at]) for at, value in enumerate(sorted(steps_s))
    )


def simulate(
    cluster: Cluster, nodes: int, *, warm: bool = False, seed: int = 0
) -> ScalePoint:
    """Simulate the steps of a number of nodes, one by one.

    Args:
        cluster: a node, and the shared resources.
        nodes: number of nodes.
        warm: whether an earlier epoch has filled the caches.
        seed: for all random draws.
    """
    steps = max(MIN_STEPS, MIN_NODE_STEPS // nodes)
    ends = _Epoch(cluster, nodes, warm=warm, seed=seed).run(SETTLING + steps)
    step_s = (ends[-1] - ends[SETTLING - 1]) / steps
    bounds = cluster.step_bounds(nodes, warm=warm)
    return ScalePoint(
        nodes,
        nodes * cluster.batch_rows / step_s,
        min(1.0, fmean(cluster.steps_s) / step_s),
        max(bounds, key=bounds.__getitem__),
    )


@dataclass(slots=True)
class _Node:
    """How many batches each part of a node has started and finished."""

    reading: int = 0
    read: int = 0
    processing: int = 0
    ready: int = 0
    taken: int = 0


class _Epoch:
    """Nodes in step, on a virtual clock.

    A node reads one batch after another, and processes one while it reads the next.
    Reading may be `prefetch_size` batches ahead of processing, and processing as many
    ahead of the trainer.

    The store divides its bandwidth equally among its readers. It counts the bytes that
    each of them has received (egalitarian processor sharing in virtual time: A. Parekh
    and R. Gallager, 1993).
    """

    def __init__(self, what: Cluster, nodes: int, *, warm: bool, seed: int) -> None:
        self._what = what
        self._dice = random.Random(seed)
        self._nodes = [_Node() for _ in range(nodes)]
        self._received = 0.0
        self._readers: list[tuple[float, int]] = []
        """The bytes received when each will be done, and its node."""
        *kept, self._missed = what.shares(nodes, warm=warm)
        self._own_s = max(what.batch_rows / what.node_rows_per_s, what.tiers_s(kept))
        self._events: list[tuple[float, int, int, Callable[[_Node], None]]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0
        self._done = 0
        self._ends: list[float] = []

    def run(self, steps: int) -> list[float]:
        """Run a number of steps, and return the time at which each one ended."""
        for at in range(len(self._nodes)):
            self._go_on(at)
        while len(self._ends) < steps:
            at, end = self._next()
            end(self._nodes[at])
            self._go_on(at)
        return self._ends

    def _next(self) -> tuple[int, Callable[[_Node], None]]:
        """Let time pass until a part of a node ends; return the node, and that part."""
        due_s, read_s = self._events[0][0] if self._events else inf, inf
        if self._readers:
            what = self._what
            share = what.store_bytes_per_s / len(self._readers)
            rate = min(what.link_bytes_per_s, share)
            left = max(0.0, self._readers[0][0] - self._received)
            read_s = self._now_s + left / rate
            if min(due_s, read_s) > self._now_s:  # the rate may be infinite
                self._received += (min(due_s, read_s) - self._now_s) * rate
        self._now_s = min(due_s, read_s)
        if read_s < due_s:
            return heapq.heappop(self._readers)[1], self._end_read
        return heapq.heappop(self._events)[2:]

    def _go_on(self, at: int) -> None:
        """Start each part of a node that can start now."""
        node, ahead = self._nodes[at], self._what.prefetch_size
        if node.taken == len(self._ends) and node.ready > node.taken:
            node.taken += 1
            self._at(self._dice.choice(self._what.steps_s), at, self._end_step)
        idle = node.processing == node.ready
        if idle and node.read > node.processing < node.taken + ahead:
            node.processing += 1
            self._at(self._own_s, at, self._end_processing)
        if node.reading == node.read < node.processing + ahead:
            node.reading += 1
            done_at = self._received + self._draw_bytes()
            heapq.heappush(self._readers, (done_at, at))

    def _at(self, delay_s: float, at: int, end: Callable[[_Node], None]) -> None:
        due_s = self._now_s + delay_s
        heapq.heappush(self._events, (due_s, next(self._numbers), at, end))

    def _draw_bytes(self) -> float:
        """Draw the bytes of a batch that no cache has, row by row independently."""
        rows, missed = self._what.batch_rows, self._missed
        deviation = (rows * missed * (1.0 - missed)) ** 0.5
        drawn = self._dice.gauss(rows * missed, deviation)
        return min(max(drawn, 0.0), rows) * self._what.row_bytes

    def _end_read(self, node: _Node) -> None:
        node.read += 1

    def _end_processing(self, node: _Node) -> None:
        node.ready += 1

    def _end_step(self, _: _Node) -> None:
        """Count one node; the last one ends the step for all."""
        self._done += 1
        if self._done < len(self._nodes):
            return
        self._done = 0
        self._ends.append(self._now_s)
        for at in range(len(self._nodes)):
            self._go_on(at)
