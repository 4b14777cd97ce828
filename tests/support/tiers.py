"""A cache with small tiers, and samples for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.cache.cache import Cache, Opening, finished
from penstock.cache.fingerprint import Fingerprint

__all__ = ["Computing", "a_cache", "ask", "is_right", "sample_of"]


def a_cache(
    disk: Path | None = None, *, ram: int = 0, limit: int | None = None
) -> Cache:
    """Return a cache that is not open; all of them have the same keys and name."""
    opening = Opening("Cache(ID:1)", "numbers", "raw", 12, disk=disk, disk_limit=limit)
    return Cache(opening, Fingerprint(bytes(range(16))), ram)


def ask(
    cache: Cache, index: int, image_size: int | None, compute: Callable[[int], Any]
) -> Any:
    """Return a sample of a cache; a plain function computes it."""
    numbers = itertools.count()  # of the calls for this sample

    async def awaited() -> Any:
        return compute(next(numbers))

    hit = cache.find(index, image_size)
    return finished(cache.sample(index, image_size, hit, awaited, in_loop=False))


def sample_of(index: int, image_size: int | None, version: int = 0) -> tuple[Any, ...]:
    """Return sample `index`: uint8 [3 size**2] and its number."""
    size = image_size or 8
    numbers = np.arange(3 * size**2) * (2 * index + 1) + version
    return numbers.astype(np.uint8), index


def is_right(sample: Any, index: int, image_size: int | None, version: int = 0) -> bool:
    """Whether that is the sample, byte for byte."""
    expected = sample_of(index, image_size, version)
    return bool(
        sample[1] == expected[1]
        and sample[0].dtype == expected[0].dtype
        and sample[0].tobytes() == expected[0].tobytes()
    )


class Computing:
    """Reads samples from a cache, and counts how often one is computed."""

    def __init__(self, cache: Cache, version: int = 0) -> None:
        self.cache = cache
        self.version = version
        self.computed = 0

    def __call__(self, index: int, image_size: int | None = None) -> Any:
        """Return the sample."""

        def compute(number: int) -> Any:
            self.computed += number == 0
            return sample_of(index, image_size, self.version)

        return ask(self.cache, index, image_size, compute)

    def right(self, index: int, image_size: int | None = None) -> bool:
        """Read a sample; return whether it is right."""
        return is_right(self(index, image_size), index, image_size, self.version)
