"""Does `executor="auto"` find the better of threads and processes, from either start?

    python benchmarks/executors.py [--rounds 5] [--sleep]

There are three datasets whose samples take a millisecond: pure Python (holds the GIL),
zlib (releases it), and half of each. --sleep adds one that waits 20 ms before a
millisecond of Python. Each is loaded by two threads, by two processes, and by `auto`,
once started on threads and once on processes. `auto` first gets some seconds to decide;
then all four are measured in turn. The aim is 0.9 of the better of the two.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import zlib
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from burning import burn, rounds_for

import penstock as ps
from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.tuner import Tuner
from penstock.engine.core.in_flight import ByteBudget
from penstock.engine.run import Run

BATCH = 32
SLICE_S = 2.0
"""Seconds for which each candidate is measured in a round."""
DECIDE_S = 15.0
"""Seconds that the tuner has for `auto`, before it is turned off."""
NOISE = os.urandom(1 << 20)


def compress(nbytes: int) -> None:
    """Compress bytes, which releases the GIL."""
    zlib.compress(NOISE[:nbytes], 1)


def bytes_for(seconds: float) -> int:
    """Return how many bytes `compress` can handle in this time, by its best try."""
    trial, times_s = 20_000, []
    for _ in range(30):
        start = time.perf_counter()
        compress(trial)
        times_s.append(time.perf_counter() - start)
    return int(trial * seconds / min(times_s))


@dataclass(frozen=True)
class Samples:
    """Samples that cost a known amount of work; sample i is i."""

    loops: int = 0
    nbytes: int = 0
    wait_s: float = 0.0

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> int:
        if self.wait_s:
            time.sleep(self.wait_s)
        burn(self.loops)
        if self.nbytes:
            compress(self.nbytes)
        return index


class Candidate:
    """One run, divided into slices."""

    def __init__(self, data: Samples, executor: str, *, auto: bool) -> None:
        workers = 32 if data.wait_s else 2
        pipe = ps.Pipeline.from_dataset(
            data, executor="thread", num_parallel_workers=workers, thread_safe=True
        ).batch(BATCH)
        recipe = pipe._compiled()  # noqa: SLF001 no user can begin `auto` on processes
        segment = replace(
            recipe.segments[0],
            executor=executor,
            stays="" if auto else "the benchmark says so",
        )
        recipe = replace(recipe, segments=(segment,))
        self.run = Run(recipe, ByteBudget(1 << 30), recipe.plan.start(0))
        self.auto = auto

    def rate(self, seconds: float) -> float:
        """Train for some seconds; return the samples per second."""
        self.run.next()  # batches prefetched in between do not count
        start, rows = time.perf_counter(), 0
        while (spent_s := time.perf_counter() - start) < seconds:
            self.run.next()
            rows += BATCH
        return rows / spent_s

    def settle(self) -> None:
        """Train until the tuner has had its time."""
        budget, log = ps.config.budget(), AutotuneLog()
        tuner = Tuner(self.run, BottleneckLaw(), budget, log)
        end = time.perf_counter() + DECIDE_S * self.auto
        due_s = 0.0
        while (now := time.perf_counter()) < end:
            if now >= due_s:
                due_s = now + tuner.step()
            self.run.next()

    @property
    def kind(self) -> str:
        """The executor and the number of workers it has chosen."""
        segment = self.run.recent().segments[0]
        return f"{segment.num_parallel_workers} {segment.executor}"


def measure(name: str, data: Samples, rounds: int) -> list[float]:
    """Print one dataset's table; return the share that `auto` reaches of the better."""
    with ExitStack() as stack:

        def candidate(executor: str, *, auto: bool = False) -> Candidate:
            subject = Candidate(data, executor, auto=auto)
            subject.rate(0.5)  # warm
            return stack.enter_context(closing(subject))

        candidates = {
            "threads": candidate("thread"),
            "processes": candidate("process"),
            "auto from threads": candidate("thread", auto=True),
            "auto from processes": candidate("process", auto=True),
        }
        rates: dict[str, list[float]] = {way: [] for way in candidates}
        for runner in list(candidates.values())[2:]:
            runner.settle()
        for _ in range(rounds):
            for way, one in candidates.items():
                rates[way].append(one.rate(SLICE_S))
        print(f"\n{name} (medians of {rounds}, interleaved)")
        medians = {way: statistics.median(values) for way, values in rates.items()}
        best = max(medians["threads"], medians["processes"])
        for way, one in candidates.items():
            share = medians[way] / best
            print(f"  {way:<20} {medians[way]:>8,.0f}/s  {share:5.2f}x  {one.kind}")
    return [medians[way] / best for way in medians if way.startswith("auto")]


def main() -> None:
    """Print one table per dataset, and the worst ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sleep", action="store_true", help="and one that waits")
    options = parser.parse_args()
    loops = rounds_for(0.001)
    nbytes = bytes_for(0.001)
    sets = {
        "GIL-bound": Samples(loops),
        "GIL-free": Samples(nbytes=nbytes),
        "mixed": Samples(loops // 2, nbytes // 2),
    }
    if options.sleep:
        sets["waits 20 ms, then GIL-bound"] = Samples(loops, wait_s=0.02)
    gc.freeze()
    worst = min(
        ratio
        for name, data in sets.items()
        for ratio in measure(name, data, options.rounds)
    )
    print(f"\nauto reaches at least {worst:.2f} of the better one (aim: 0.9)")


if __name__ == "__main__":
    main()
