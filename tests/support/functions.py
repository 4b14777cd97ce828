"""Functions for the stages of whole pipelines, and checks of their batches.

Functions for worker processes, and their exceptions, live here, where both sides can
import them.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .datasets import Sample

__all__ = [
    "BadSample",
    "Tongue",
    "UnpicklableError",
    "augment",
    "digest",
    "fails_on",
    "indices",
    "kills_once",
    "pids",
    "waits",
]


class BadSample(ValueError):
    """An exception of the user's, with an argument of its own."""


class UnpicklableError(Exception):
    """An exception that pickle cannot restore from its `args`."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"{reason} {index}")


class Tongue(Exception):
    """Holds an object that cannot be pickled."""

    def __init__(self, index: int) -> None:
        super().__init__(index, lambda: index)


def augment(sample: Sample, rng: np.random.Generator) -> Sample:
    """Add noise of the sample's own."""
    values, index = sample
    return values + rng.random(values.shape, np.float32), index


def kills_once(sample: Any, mark: Path) -> Any:
    """Kill the process that works on sample 17, unless `mark` is there; then it is."""
    if sample[1] == 17 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def waits(sample: Any, wait_s: float) -> Any:
    """Wait, as for a network, and return the sample."""
    time.sleep(wait_s)
    return sample


def fails_on(
    *bad: int, error: Callable[[int], BaseException] = BadSample
) -> Callable[[Sample], Sample]:
    """Return a function that raises on these indices."""
    return partial(_fail, bad=frozenset(bad), error=error)


def _fail(
    sample: Sample, bad: frozenset[int], error: Callable[[int], BaseException]
) -> Sample:
    if sample[1] in bad:
        raise error(sample[1])
    return sample


def pids(sample: Sample) -> tuple[int, int]:
    """Return the sample's index and the process that works on it."""
    return sample[1], os.getpid()


def indices(batches: Iterable[Any]) -> Iterator[list[int]]:
    """Return the indices in each batch of `Numbers`."""
    return (batch[1].tolist() for batch in batches)


def digest(batches: Iterable[Any]) -> str:
    """Return a hash of all bytes and types, in order."""
    hasher = hashlib.sha256()
    for batch in batches:
        _add(hasher, batch)
    return hasher.hexdigest()


def _add(hasher: Any, data: Any) -> None:
    hasher.update(type(data).__name__.encode())
    if isinstance(data, torch.Tensor):
        hasher.update(f"{data.dtype} {tuple(data.shape)}".encode())
        hasher.update(data.numpy().tobytes())
    elif isinstance(data, dict):
        for key, value in data.items():
            hasher.update(repr(key).encode())
            _add(hasher, value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            _add(hasher, value)
    else:
        hasher.update(repr(data).encode())


def sized(sample: int, ctx: Any) -> torch.Tensor:
    """Return the sample as many times as the image has pixels per side."""
    return torch.full((ctx.image_size or 1,), int(sample))
