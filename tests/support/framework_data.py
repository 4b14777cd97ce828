"""Data for the frameworks: slow to load or to train on, and a check of the verdict."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import torch
import torch.utils.data as torchs

import penstock as ps
from penstock import DataLoader

LENGTH = 160
BATCH = 8
STEPS = LENGTH // BATCH


class Slow(torchs.Dataset[tuple[torch.Tensor, int]]):
    """Samples that each take a given time to load."""

    def __init__(self, load_s: float = 0.0) -> None:
        self.load_s = load_s

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.load_s:
            time.sleep(self.load_s)
        return torch.full((4,), index / LENGTH), index


def loader(load_s: float = 0.0, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Slow(load_s), BATCH, shuffle=True, **settings)


def whole(steps: list[list[int]]) -> bool:
    """Whether these batches are one epoch: each sample once."""
    return sorted(chain.from_iterable(steps)) == list(range(LENGTH))


def verdict(loader: ps.DataLoader[Any], *, loading: bool) -> None:
    """Check the verdict on a training that waits for loading, or does not."""
    answer = loader.explain()
    assert (answer.verdict == "input-bound") == loading, answer
    if loading:
        assert "Slow" in answer.bottleneck  # beside other tests, for several causes
