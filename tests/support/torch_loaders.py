"""Loaders of the DataLoader face, and comparisons of their batches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from penstock import DataLoader
from support.torch_datasets import Drawing

LENGTH = 103
BATCH = 10


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists of batches are equal, bytes included."""
    pairs = [
        (x, y)
        for left, right in zip(a, b, strict=True)
        for x, y in zip(left, right, strict=True)
    ]
    return all(torch.equal(x, y) for x, y in pairs)


def epochs(loader: Any, count: int = 2, seed: int = 7) -> list[Any]:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 the global one
    torch.manual_seed(seed)
    return [batch for _ in range(count) for batch in loader]


def seeded(workers: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(
        Drawing(LENGTH),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        sample_seeding=True,
        **settings,
    )


def sum_of(samples: list[Any]) -> Any:
    return sum(samples)
