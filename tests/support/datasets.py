"""Datasets for whole pipelines, and the kinds of workers that read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

__all__ = ["KINDS", "WORKERS", "Counting", "Numbers", "Sample"]

Sample = tuple[NDArray[np.float32], int]

WORKERS: Mapping[str, Mapping[str, Any]] = {
    "inline": {"executor": "inline"},
    "1 thread": {"executor": "thread", "num_parallel_workers": 1},
    "2 threads": {"executor": "thread", "num_parallel_workers": 2},
    "16 threads": {"executor": "thread", "num_parallel_workers": 16},
    "3 processes": {"executor": "process", "num_parallel_workers": 3},
    "9 processes": {"executor": "process", "num_parallel_workers": 9},
}
"""Settings of a stage, by name, all of which must yield the same batches."""

KINDS = {name: WORKERS[name] for name in ("inline", "2 threads", "3 processes")}
"""One of each kind, for tests in which the number of workers does not matter."""


@dataclass(frozen=True)
class Numbers:
    """Sample i is `(float32 [width] of i, i)`.

    Args:
        length: samples.
        width: numbers in a sample.
        wait_s: how long a read waits, as for a storage.
    """

    length: int
    width: int = 4
    wait_s: float = 0.0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if self.wait_s:
            time.sleep(self.wait_s)
        return np.full(self.width, index, np.float32), index


class Counting(IterableDataset[Sample]):
    """Yields the samples of `Numbers`, without an index or a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Sample]:
        return iter(map(Numbers(self.length).__getitem__, range(self.length)))
