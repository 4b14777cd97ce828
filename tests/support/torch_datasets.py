"""Datasets as people write them for torch, for the DataLoader face."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.utils.data as torchs

__all__ = ["Deadly", "Drawing", "Plain", "Streamed"]


class Plain(torchs.Dataset[int]):
    """Sample i is i; records which process read it, and how often."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0
        self.pids: set[int] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.pids.add(os.getpid())
        return index


class Drawing(torchs.Dataset[tuple[float, float, float, int]]):
    """Augments as most datasets do, with the three global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[float, float, float, int]:
        drawn = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002
        return *drawn, index


class Deadly(Plain):
    """Kills the process that reads sample 50, unless `mark` is there; then it is."""

    def __init__(self, length: int, mark: Path) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if index == 50 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Streamed(torchs.IterableDataset[int]):
    """Yields 0, 1, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Asks(torchs.Dataset[tuple[int, int, int]]):
    """Samples that name their worker, by its number and its `worker_init_fn`."""

    mark = -1

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = torchs.get_worker_info()
        if info is None:
            return -1, self.mark, index
        assert info.dataset is self
        assert info.id < info.num_workers
        return info.id, self.mark, index


def leave_mark(number: int, factor: int = 10) -> None:
    info = torchs.get_worker_info()
    assert info is not None
    assert info.id == number
    info.dataset.mark = factor * (number + 1)
