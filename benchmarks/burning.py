"""Pure Python that takes a known time and holds the GIL: the same in every benchmark.

It deals in small ints alone. Any other int is allocated, and how long that takes
depends on how full the allocator's page happens to be: up to twice as long, for as long
as nothing else is allocated. Two processes that run the same loop would then differ by
more than what is measured here.
"""

from __future__ import annotations

import itertools
import time

__all__ = ["burn", "rounds_for"]

PROBE = 20_000


def burn(rounds: int) -> int:
    """Hold the GIL for so many rounds."""
    total = 0
    for _ in itertools.repeat(None, rounds):
        total = (total + 3) & 127
    return total


def rounds_for(seconds: float) -> int:
    """Return how many rounds take so long here: by the fastest of many tries."""
    spent = []
    for _ in range(100):
        start = time.thread_time()
        burn(PROBE)
        spent.append(time.thread_time() - start)
    return round(PROBE * seconds / min(spent))
