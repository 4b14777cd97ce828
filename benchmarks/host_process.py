"""How much does loading slow the trainer's step, in its process and in another one?

    python benchmarks/host_process.py

The trainer runs 5 ms of pure Python per step. A batch of 8 takes 2.4 ms of pure Python
to load, so loading keeps up from either place. The candidates train in turn, for
seventy steps at a time. Each turn is compared with a trainer that loads nothing,
measured just before and after, because a machine's speed drifts by more than the
difference to be measured. Printed are medians over turns of the mean step, including
`next()`, and of the increase.

"A stranger" is a process that has nothing to do with the trainer and computes as much
as loading does. It shows the cost of merely sharing the machine.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from burning import burn, rounds_for
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import penstock as ps

STEP_S = 0.005
SAMPLE_S = 0.0003
BATCH = 8
STEPS = 70
UNCOUNTED = 30
"""Steps at the start of each turn that do not count: their batches were prefetched."""
ROUNDS = 30


SAMPLE = rounds_for(SAMPLE_S)
STEP = rounds_for(STEP_S)


class Work:
    """Samples that take some pure Python: `float32 [3, 64, 64]` and an int."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        burn(SAMPLE)
        return np.full((3, 64, 64), index, np.float32), index


def nothing() -> Iterator[Any]:
    """Yield the same batch again and again."""
    batch = torch.zeros(BATCH, 3, 64, 64), torch.zeros(BATCH, dtype=torch.int64)
    return itertools.repeat(batch)


class Stranger:
    """A process that computes as much as loading would, while it is allowed to."""

    def __init__(self) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            while True:
                burn(SAMPLE * BATCH)
                time.sleep(STEP_S - SAMPLE_S * BATCH)
        os.kill(self._pid, signal.SIGSTOP)

    def __iter__(self) -> Iterator[Any]:
        os.kill(self._pid, signal.SIGCONT)
        try:
            yield from itertools.islice(nothing(), STEPS)
        finally:
            os.kill(self._pid, signal.SIGSTOP)

    def close(self) -> None:
        """End the process."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def step_s(batches: Iterator[Any]) -> float:
    """Train for one turn; return the mean step, from `next()` to `next()`."""
    start = 0.0
    for step, _ in enumerate(itertools.islice(batches, STEPS)):
        if step == UNCOUNTED:
            start = time.perf_counter()
        burn(STEP)
    return (time.perf_counter() - start) / (STEPS - UNCOUNTED)


def show(measurements: dict[str, list[tuple[float, float]]]) -> None:
    """Print medians over turns: each candidate's step, compared with the bare one."""
    print(f"a step, means of {STEPS - UNCOUNTED} and medians of {ROUNDS} turns")
    for name, pairs in measurements.items():
        costs = sorted(step / bare - 1 for bare, step in pairs)
        low, high = costs[ROUNDS // 4], costs[-ROUNDS // 4]
        print(
            f"  {name:<48} {statistics.median(step for _, step in pairs) * 1e3:6.2f} ms"
            f"  {statistics.median(costs):+7.1%}  (quartiles {low:+.1%} to {high:+.1%})"
        )


def main() -> None:
    """Print the figures."""
    stranger = Stranger()
    pipe = ps.Pipeline.from_dataset(Work(), executor="thread", num_parallel_workers=2)
    beside = pipe.batch(BATCH).options(host="trainer")
    apart = pipe.batch(BATCH).options(host="process")
    one: Any = {"executor": "process", "num_parallel_workers": 1}
    worker = ps.Pipeline.from_dataset(Work(), **one).batch(BATCH)
    peer = DataLoader(Work(), BATCH, num_workers=1)  # type: ignore[arg-type]
    loops = {
        "trainer": iter(beside),
        "process": iter(apart),
        "worker": iter(worker),
        "peer": iter(peer),
    }
    candidates: dict[str, Callable[[], Iterator[Any]]] = {
        "no loading": nothing,
        "no loading, a stranger beside it": lambda: iter(stranger),
        'threads in the trainer\'s process, host="trainer"': lambda: loops["trainer"],
        'host="process"': lambda: loops["process"],
        "one worker process": lambda: loops["worker"],
        "DataLoader num_workers=1": lambda: loops["peer"],
    }
    measurements: dict[str, list[tuple[float, float]]] = {
        name: [] for name in candidates
    }
    try:
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
            before = step_s(nothing())
            for name, batches in candidates.items():
                step, after = step_s(batches()), step_s(nothing())
                measurements[name].append(((before + after) / 2, step))
                before = after
    finally:
        stranger.close()
        beside.close()
        apart.close()
        worker.close()
    show(measurements)


if __name__ == "__main__":
    main()
