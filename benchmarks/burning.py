"""Pure Python that takes a known time and holds the GIL, for all benchmarks.

It uses only small ints. Any other int is allocated, and the time for that depends on
how full the allocator's page happens to be: it may be twice as long, until something
else is allocated. Two processes that run the same loop would then differ by more than
the benchmarks measure.
"""

from __future__ import annotations

import itertools
import time

__all__ = ["burn", "rounds_for"]

PROBE = 20_000


def burn(rounds: int) -> int:
    """Hold the GIL for a number of rounds."""
    total = 0
    for _ in itertools.repeat(None, rounds):
        total = (total + 3) & 127
    return total


def rounds_for(seconds: float) -> int:
    """Return how many rounds take this long here, by the fastest of many tries."""
    times_s = []
    for _ in range(100):
        start = time.thread_time()
        burn(PROBE)
        times_s.append(time.thread_time() - start)
    return round(PROBE * seconds / min(times_s))
