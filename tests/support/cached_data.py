"""Data that records each time a sample is computed, and pipelines that cache it."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.cache.statistics import CacheStatistics

from .datasets import Sample
from .functions import augment, digest

__all__ = [
    "EXECUTORS",
    "SHARED",
    "TIERS",
    "AwaitedNoted",
    "Drawing",
    "Held",
    "Noted",
    "Ran",
    "TurnedClock",
    "cached",
    "doubled",
    "doubled_in_loop",
    "each_with_another",
    "of_size",
    "ran",
    "ran_by_several",
    "spawned",
    "statistics",
    "tiers",
    "two_epochs",
]

EXECUTORS: Mapping[str, Mapping[str, Any]] = {
    "inline": {"executor": "inline"},
    **{
        f"{count} {executor}": {"executor": executor, "num_parallel_workers": count}
        for executor in ("thread", "process", "async")
        for count in (1, 4)
    },
}
"""Settings of the stages before a cache, all of which must yield the same batches."""

TIERS = ("RAM", "disk", "both")

TOGETHER = {
    ("both", "inline"),
    ("disk", "1 thread"),
    ("RAM", "4 thread"),
    ("both", "4 process"),
    ("disk", "4 async"),
}


def each_with_another() -> list[Any]:
    """Return cases (tiers, executor); those that are slow are all but a few."""
    return [
        pytest.param(*pair, marks=() if pair in TOGETHER else pytest.mark.slow)
        for pair in product(TIERS, EXECUTORS)
    ]


class TurnedClock:
    """Stands for the module `time` where only a sleep takes time."""

    def __init__(self) -> None:
        self.now_ns = 0

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9


class Noted:
    """Sample i is `(float32 [width] of i, i)`; each read appends a line to `log`.

    Its fingerprint does not include the log, so runs with different logs share a cache.
    """

    def __init__(
        self, length: int, log: Path, width: int = 64, wait_s: float = 0.0
    ) -> None:
        self.length = length
        self.log = log
        self.width = width
        self.wait_s = wait_s
        """Seconds that a read waits, as for remote storage."""

    def __penstock_fingerprint__(self) -> str:
        return f"noted {self.length} {self.width}"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        line = f"{index} {os.getpid()}\n".encode()
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line)
        os.close(descriptor)
        time.sleep(self.wait_s)
        return np.full(self.width, index, np.float32), index

    def reads(self) -> Counter[int]:
        """How often each sample was read so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Counter(int(line.split()[0]) for line in lines)


class AwaitedNoted(Noted):
    """The same as a coroutine."""

    async def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return super().__getitem__(index)


class Drawing:
    """Adds noise from a generator that all samples share, as torchvision does."""

    def __init__(self, source: str, length: int) -> None:
        self.source = source
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        draws = {
            "random": random.random,
            "numpy": np.random.random,
            "torch": lambda: float(torch.rand(())),
        }
        return np.full(4, index + draws[self.source](), np.float64), index


class Held:
    """Holds an open file, and has no fingerprint of its own."""

    def __init__(self, inner: Noted) -> None:
        self.inner = inner
        self.handle = open(os.devnull, "rb")  # noqa: SIM115 closed by the test

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Sample:
        return self.inner[index]


def doubled(sample: Sample) -> Sample:
    values, index = sample
    return values * 2, index


async def doubled_in_loop(sample: Sample) -> Sample:
    return doubled(sample)


def of_size(sample: Sample, ctx: Any) -> Sample:
    """Return an array with as many numbers as the image has pixels per side."""
    _, index = sample
    return np.full(ctx.image_size, index, np.float32), index


def tiers(which: str, folder: Path, ram: int | str = "4MB") -> dict[str, Any]:
    """Return the arguments of a cache with RAM, disk, or both."""
    return {
        "RAM": {"ram": ram},
        "disk": {"disk": folder},
        "both": {"ram": ram, "disk": folder},
    }[which]


def cached(
    log: Path, kind: Mapping[str, Any], cache: Mapping[str, Any] | None, **data: Any
) -> ps.Pipeline:
    """Return 40 samples read, doubled, cached, shuffled, augmented, in batches of 8.

    Args:
        log: the file that records reads.
        kind: settings of the stages before the cache.
        cache: the cache's arguments; None: no cache.
        data: further arguments of `Noted`.
    """
    awaited = kind.get("executor") == "async"
    behind = kind if kind.get("executor") == "inline" else {}  # nothing is prefetched
    source = (AwaitedNoted if awaited else Noted)(log=log, **{"length": 40, **data})
    function: Any = doubled_in_loop if awaited else doubled
    pipe = ps.Pipeline.from_dataset(source, **kind).map(function, **kind)
    if cache is not None:
        pipe = pipe.cache(**cache)
    return pipe.shuffle(seed=3).map(augment, **behind).batch(8)


def two_epochs(pipe: ps.Pipeline) -> str:
    """Return a digest of two epochs, and close the pipeline."""
    with pipe:
        return digest([*pipe, *pipe])


def statistics(pipe: ps.Pipeline) -> CacheStatistics:
    """Return the statistics of a pipeline's only cache."""
    reading = pipe.stats()
    assert reading is not None
    (cache,) = reading.caches
    return cache


@dataclass(frozen=True)
class Ran:
    """The result of an epoch in a process."""

    digest: str
    hits: int
    misses: int


def ran(
    log: Path,
    kind: Mapping[str, Any],
    cache: Mapping[str, Any],
    meet: Callable[[], object] = int,
    **data: Any,
) -> Ran:
    """Run an epoch; `meet` is called before it, and before it is closed."""
    with cached(log, kind, cache, **data) as pipe:
        meet()
        content = digest(pipe)
        meet()
        counts = statistics(pipe)
    return Ran(content, counts.hits, counts.misses)


SHARED = 48
"""Samples that several processes read."""


def ran_by_several(
    count: int, log: Path, kind: Mapping[str, Any], cache: Mapping[str, Any]
) -> list[Ran]:
    """Run an epoch in several processes at the same time, forked from a fresh one.

    The reads wait, so that no process finishes before another one begins.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count, timeout=60)
    queue = context.SimpleQueue()

    def one() -> None:
        try:
            queue.put(ran(log, kind, cache, barrier.wait, length=SHARED, wait_s=0.002))
        except BaseException as error:
            barrier.abort()
            queue.put(error)
            raise

    processes = [context.Process(target=one) for _ in range(count)]
    for process in processes:
        process.start()
    results = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return results


def spawned(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fresh interpreter, and return its result."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with here, there:
        process = context.Process(target=_send, args=(there, function, args))
        process.start()
        there.close()
        result = here.recv()
        process.join()
    return result


def _send(into: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with into:
        into.send(function(*args))
