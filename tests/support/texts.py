"""Random texts, and functions on them that worker processes can import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["Listed", "drawn_texts", "plain"]


def drawn_texts(count: int, seed: int) -> list[str]:
    """Return texts of 0 to 40 words of a few letters, some of them not ASCII."""
    rng = np.random.default_rng(seed)
    letters = list("aaabcdeeefghiiklmnooprstuäé")
    words = ["".join(rng.choice(letters, rng.integers(1, 9))) for _ in range(400)]
    counts = rng.integers(0, 41, count)
    return [" ".join(rng.choice(words, n)).capitalize() + "." for n in counts]


def plain(batch: Any) -> Any:
    """Return a batch with lists for its tensors, which must be `int64`."""
    if isinstance(batch, torch.Tensor):
        assert batch.dtype == torch.int64
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch


class Listed:
    """A function that returns its tensors as lists, to send to another process."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, batch: Any) -> Any:
        return plain(self.function(batch))
