"""Does the tuner follow if store, images, trainer or machine change during training?

    python benchmarks/regimes.py [--rows store ...] [--repeats 3]

Real pipelines are tuned from one worker and get time to settle. Then something changes
without notice. The table shows medians: the rate of the last seconds as a share of the
best under the new conditions, the seconds until 95 % of that rate, and the workers
before and after, beside the fewest that suffice. The best follows from arithmetic if
everything sleeps; otherwise fixed settings are measured in the same run.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from autotune_suite import gliding
from burning import burn
from PIL import Image
from suite_rows import SAMPLES, photograph

import penstock as ps
from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.tuner import Tuner, TunerThread
from penstock.engine.core.in_flight import ByteBudget
from penstock.engine.run import Run
from penstock.system.resources import Budget

BEFORE_S = 20.0
AFTER_S = 24.0
LAST_S = 8.0
SEARCH_S = 4.0
BATCH = 16


class World:
    """The conditions that the rows below change."""

    def __init__(self) -> None:
        self.read_s = 0.0
        self.step_s = 0.0
        self.size = 128
        self._peer = 0

    def let_in_a_peer(self) -> None:
        """Start another process that keeps a core busy."""
        owner = os.getpid()
        self._peer = os.fork()
        if self._peer == 0:
            while os.getppid() == owner:
                burn(100_000)
            os._exit(0)

    def close(self) -> None:
        """End the other process, if there is one."""
        if self._peer:
            os.kill(self._peer, signal.SIGKILL)
            os.waitpid(self._peer, 0)


@dataclass(frozen=True)
class Reads:
    """Samples that wait for as long as the world says."""

    world: World

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(self.world.read_s)
        return index


@dataclass(frozen=True)
class Photos:
    """The mean of a photograph, decoded and resized to the present size."""

    world: World
    encoded: bytes = field(default_factory=photograph)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        size = self.world.size
        with Image.open(io.BytesIO(self.encoded)) as image:
            small = np.asarray(image.convert("RGB").resize((size, size)))
        return float(small.mean())


@dataclass(frozen=True)
class Row:
    """One pipeline, and a change of its world."""

    data: Callable[[World], Any]
    begin: dict[str, float]
    """The world at the start."""
    then: dict[str, float]
    """The change."""
    peer: bool = False
    best: float = 0.0
    """Steps per second of the best settings afterwards; 0: they are searched."""
    fewest: int = 0
    """Fewest workers that reach this; 0: unknown."""
    fixed: tuple[int, ...] = (1, 2, 3)


ROWS = {
    "slower store": Row(
        Reads,
        {"read_s": 0.010, "step_s": 0.020},
        {"read_s": 0.020},
        best=50.0,
        fewest=16,
    ),
    "faster store": Row(
        Reads,
        {"read_s": 0.020, "step_s": 0.020},
        {"read_s": 0.010},
        best=50.0,
        fewest=8,
    ),
    "faster trainer": Row(
        Reads,
        {"read_s": 0.010, "step_s": 0.020},
        {"step_s": 0.010},
        best=100.0,
        fewest=16,
    ),
    "larger images": Row(Photos, {"size": 128}, {"size": 224}),
    "shared": Row(Photos, {"size": 128}, {}, peer=True),
}


def running(row: Row, world: World, workers: int) -> Run:
    """Return a run of its pipeline with so many threads."""
    source = ps.Pipeline.from_dataset(
        row.data(world), executor="thread", num_parallel_workers=workers
    )
    recipe = source.batch(BATCH)._compiled()  # noqa: SLF001 with a policy of our choice
    return Run(recipe, ByteBudget(1 << 30), recipe.plan.start(0))


def train(run: Run, world: World, seconds: float) -> list[float]:
    """Train for some seconds; return the time of each batch."""
    times = [time.perf_counter()]
    while times[-1] < times[0] + seconds:
        run.next()
        times.append(time.perf_counter())
        if world.step_s:
            time.sleep(world.step_s)
    return times


def rate(times: list[float]) -> float:
    """Return the steps per second of the last seconds."""
    last = [at for at in times if at > times[-1] - LAST_S]
    return (len(last) - 1) / (last[-1] - last[0]) if len(last) > 1 else 0.0


def workers_of(run: Run) -> int:
    """Return how many there are."""
    return sum(segment.num_parallel_workers for segment in run.recent().segments)


def change(world: World, row: Row) -> None:
    """Apply the change."""
    vars(world).update(row.then)
    if row.peer:
        world.let_in_a_peer()


def optimum(row: Row) -> float:
    """Return the steps per second of the best fixed setting in the changed world."""
    rates = [row.best]
    for workers in () if row.best else row.fixed:
        with closing(World()) as world:
            vars(world).update(row.begin)
            change(world, row)
            with closing(running(row, world, workers)) as run:
                rates.append(rate(train(run, world, SEARCH_S)))
    return max(rates)


@dataclass(frozen=True)
class Course:
    """The result of one run after the change."""

    share: float
    settled_s: float
    workers: tuple[int, int]


def course(row: Row) -> Course:
    """Train, change the world, and train on."""
    best = optimum(row)
    with closing(World()) as world:
        vars(world).update(row.begin)
        with closing(running(row, world, 1)) as run:
            log = AutotuneLog()
            tuner = Tuner(run, BottleneckLaw(), Budget.of_machine(), log)
            with TunerThread(tuner):
                train(run, world, BEFORE_S)
                before = workers_of(run)
                change(world, row)
                times = train(run, world, AFTER_S)
            final = rate(times)
            there = (at for at, value in gliding(times) if value >= 0.95 * final)
            settled_s = next(there, times[-1]) - times[0]
            return Course(final / best, settled_s, (before, workers_of(run)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print("row             of best (range)     95 %  workers before, after")
    for name in options.rows:
        row = ROWS[name]
        runs = [course(row) for _ in range(options.repeats)]
        shares = [went.share for went in runs]
        counts = zip(*(went.workers for went in runs), strict=True)
        before, after = (statistics.median(column) for column in counts)
        print(
            f"{name:<15} {statistics.median(shares):6.2f}"
            f" ({min(shares):.2f}-{max(shares):.2f})"
            f" {statistics.median(went.settled_s for went in runs):6.1f} s"
            f" {before:5.0f} {after:5.0f}{f'/{row.fewest}' if row.fewest else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
