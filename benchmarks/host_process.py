"""What does loading cost the trainer's step, beside it and in a process of its own?

    python benchmarks/host_process.py

The trainer runs 5 ms of pure Python a step. The pipeline has 4 ms of pure Python for
each batch of 8, on two threads, so it keeps up in either place. Prints the median step,
`next()` included, of a trainer that loads nothing, of one with the engine's threads in
its process, and of one with `host="process"`; and of a torch DataLoader with one worker
process. They run interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import penstock as ps

STEP_S = 0.005
SAMPLE_S = 0.0005
BATCH = 8
STEPS = 150
ROUNDS = 5
BOUND = 0.03


def python(seconds: float) -> int:
    """Run so much pure Python, by a count of rounds taken once: it holds the GIL."""
    total = 0
    for number in range(int(seconds * ROUNDS_A_SECOND)):
        total += number & 3
    return total


def calibrated() -> float:
    """Return how many rounds of `python` a second has, at its best."""
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        total = 0
        for number in range(100_000):
            total += number & 3
        best = max(best, 100_000 / (time.perf_counter() - start))
    return best


ROUNDS_A_SECOND = calibrated()


class Work:
    """Samples that take pure Python: `float32 [3, 64, 64]` and an int."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        python(SAMPLE_S)
        return np.full((3, 64, 64), index, np.float32), index


def nothing() -> Iterator[Any]:
    """Hand over the same batch again and again."""
    batch = torch.zeros(BATCH, 3, 64, 64), torch.zeros(BATCH, dtype=torch.int64)
    return (batch for _ in range(STEPS))


def steps_s(batches: Iterator[Any]) -> list[float]:
    """Train on them; return the seconds of each step, from `next()` to `next()`."""
    seen, start = [], time.perf_counter()
    for _ in batches:
        python(STEP_S)
        now = time.perf_counter()
        seen.append(now - start)
        start = now
    return seen[20:]  # what comes before is starting


def main() -> None:
    """Print the figures."""
    ps.set_prefetch_size(4)
    pipe = ps.Pipeline.from_dataset(Work(), executor="thread", num_parallel_workers=2)
    beside = pipe.batch(BATCH).options(host="trainer")
    apart = pipe.batch(BATCH).options(host="process")
    peer = DataLoader(Work(), BATCH, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    candidates: dict[str, Callable[[], Iterator[Any]]] = {
        "no loading": nothing,
        'threads in the trainer\'s process (host="trainer")': lambda: iter(beside),
        'host="process"': lambda: iter(apart),
        "DataLoader num_workers=1": lambda: iter(peer),
    }
    medians: dict[str, list[float]] = {name: [] for name in candidates}
    means: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(ROUNDS + 1):
        for name, epoch in candidates.items():
            seen = steps_s(epoch())
            beside.close()  # it would load the next epoch meanwhile
            apart.close()
            if number:
                medians[name].append(statistics.median(seen))
                means[name].append(statistics.fmean(seen))
    bare = statistics.median(medians["no loading"])
    bare_mean = statistics.median(means["no loading"])
    print(f"a trainer's step, medians of {ROUNDS} rounds of {STEPS} steps, interleaved")
    for name, seen in medians.items():
        step, mean = statistics.median(seen), statistics.median(means[name])
        print(
            f"  {name:<50} {step * 1e3:6.3f} ms ({step / bare - 1:+7.2%});"
            f" mean {mean * 1e3:6.3f} ms ({mean / bare_mean - 1:+7.2%})"
        )
    print(f'  bound for host="process": +{BOUND:.0%}')


if __name__ == "__main__":
    main()
