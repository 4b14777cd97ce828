"""Training scripts with a known cause of slowness, for `penstock run`.

`python known_causes.py CAUSE SECONDS`: most train with one loader and validate with
another one, as people do. `train` has the slow part.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import penstock as ps

ROWS, BATCH = 400, 8
SMALL = np.zeros((16, 16), np.float32)
LARGE = np.zeros((1024, 1024), np.float32)
NUMBERS = np.random.default_rng(0).random(20_000)


class Reads(Dataset[Any]):
    """Samples that each take a given time to read."""

    def __init__(self, wait_s: float, rows: int = ROWS, sample: Any = SMALL) -> None:
        self.wait_s = wait_s
        self.rows = rows
        self.sample = sample

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        return self.sample


class Decodes(Reads):
    """Samples that take three milliseconds of a core, without the GIL."""

    def __getitem__(self, index: int) -> Any:
        end_s = time.thread_time() + 0.003
        while time.thread_time() < end_s:
            np.sort(NUMBERS)
        return self.sample


class Counts(Reads):
    """Samples that hold the GIL all the time."""

    def __getitem__(self, index: int) -> Any:
        sum(range(200_000))
        return self.sample


class Straggles(Reads):
    """Samples of which one in fifty is slow."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.3 if index % 50 == 25 else 0.001)
        return self.sample


class Streams(IterableDataset[Any]):
    """An iterable of slow rows."""

    def __iter__(self) -> Iterator[Any]:
        return map(Reads(0.004).__getitem__, range(ROWS))


def collates(rows: list[Any]) -> Any:
    time.sleep(0.03)
    return torch.from_numpy(np.stack(rows))


def waits(batch: Any) -> Any:
    time.sleep(0.03)
    return batch


def loaded(dataset: Any, workers: int = 0, **settings: Any) -> Any:
    settings |= {"num_workers": workers} if workers else {}  # an explicit 0 stays 0
    return DataLoader(dataset, BATCH, **settings)


def threads(dataset: Any, count: int, batch: int = BATCH) -> ps.Pipeline:
    settings: Any = {"executor": "thread", "num_parallel_workers": (count, count)}
    return ps.Pipeline.from_dataset(dataset, **settings).batch(batch)


def bound() -> ps.Pipeline:
    ps.set_memory_budget("20MB")
    return threads(Reads(0.05, ROWS, LARGE), 8, 2)


def uneven() -> ps.Pipeline:
    ps.set_prefetch_size(2)
    return threads(Straggles(0.0, 10 * ROWS), 4)


def mapped() -> ps.Pipeline:
    pipe = ps.Pipeline.from_dataset(Reads(0.0)).batch(BATCH)
    return pipe.map(waits, num_parallel_workers=(1, 1), executor="thread")


LOADERS: dict[str, Callable[[], Any]] = {
    "slow reads": lambda: loaded(Reads(0.01)),
    "slow decoding": lambda: loaded(Decodes(0.0), 2),
    "slow collating": lambda: loaded(Reads(0.0), collate_fn=collates),
    "the GIL": lambda: threads(Counts(0.0), 4),
    "a slow trainer": lambda: loaded(Reads(0.0), 2),
    "an iterable": lambda: loaded(Streams(), 2),
    "a slow map of batches": mapped,
    "uneven samples": uneven,
    "the memory budget": bound,
    "a crash": lambda: loaded(Reads(0.01)),
    "a kill": lambda: loaded(Reads(0.01)),
}
STEP_S = {"a slow trainer": 0.05, "uneven samples": 0.04}
ALONE = {"a slow map of batches", "uneven samples", "the memory budget"}
"""These have no second loader."""


def main(cause: str, seconds: float) -> None:
    """Train and validate for some seconds."""
    train = LOADERS[cause]()
    val = () if cause in ALONE else loaded(Reads(0.0, 80))
    begun_s = time.monotonic()
    while True:
        for _ in train:
            time.sleep(STEP_S.get(cause, 0.004))
            if time.monotonic() - begun_s > seconds:
                match cause:
                    case "a crash":
                        raise RuntimeError("the loss is not finite")
                    case "a kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                return
        for _ in val:
            time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
