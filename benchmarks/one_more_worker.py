"""How soon is an added worker process at work, and does it delay the others?

    python benchmarks/one_more_worker.py [--starts 40]

A dataset whose samples take 10 ms runs on worker processes that cannot share a child.
Every half second, a worker is added and removed again. Each sample records which
process made it, and when it began. This shows when the new worker began its first
sample, and how long the others took from one sample to the next in that time, compared
with their usual pace.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from os import getpid

import penstock as ps
from penstock.engine.observe.observation import Knob

WORKERS = 4
SAMPLE_S = 0.010
ROUND_S = 0.25
"""Seconds from one change to the next."""
WARM_S = 1.0
AIM_MS = 50

Event = tuple[int, int]
"""The process, and the time by the monotonic clock in ns."""


class Slow:
    """Samples that record the process that made them, and when it began."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Event:
        begun_ns = time.monotonic_ns()
        time.sleep(SAMPLE_S)
        return getpid(), begun_ns


@dataclass(frozen=True)
class MakePool:
    """What happened when a worker was requested."""

    asked_ns: int
    back_ns: int
    """When it was retired again."""


def collect(batches: Iterator[list[list[int]]], until_s: float) -> Iterator[Event]:
    """Yield which process made which sample, until a given time."""
    while time.perf_counter() < until_s:
        makers, times = next(batches)
        yield from zip(map(int, makers), map(int, times), strict=True)


def run(starts: int) -> tuple[list[Event], list[MakePool]]:
    """Start and stop workers; return all samples, and the events of each worker."""
    source = ps.Pipeline.from_dataset(
        Slow(),
        executor="process",
        num_parallel_workers=(WORKERS, WORKERS + 1),
        thread_safe=False,  # a child for each worker
    )
    with source.batch(4) as pipe:
        batches = iter(pipe)
        events = list(collect(batches, time.perf_counter() + WARM_S))
        knob = workers_of(pipe)
        requests = []
        for _ in range(starts):
            asked_ns = time.monotonic_ns()
            knob.set(WORKERS + 1)
            events += collect(batches, time.perf_counter() + ROUND_S)
            requests.append(MakePool(asked_ns, time.monotonic_ns()))
            knob.set(WORKERS)
            events += collect(batches, time.perf_counter() + ROUND_S)
    return events, requests


def workers_of(pipe: ps.Pipeline) -> Knob:
    """Return the knob of the number of workers."""
    live = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
    assert live is not None
    return next(k for k in live.knobs() if k.name == "num_parallel_workers")


def at_work_ms(events: list[Event], start: MakePool) -> float | None:
    """Return how long it took until a new process began a sample."""
    before = {pid for pid, begun_ns in events if begun_ns < start.asked_ns}
    new = [
        begun_ns
        for pid, begun_ns in events
        if start.asked_ns <= begun_ns < start.back_ns and pid not in before
    ]
    return (min(new) - start.asked_ns) / 1e6 if new else None


def pauses_ms(events: list[Event], requests: list[MakePool]) -> tuple[list[float], ...]:
    """Return the times from sample to sample: while a worker starts, and otherwise."""
    by_worker: dict[int, list[int]] = defaultdict(list)
    for pid, begun_ns in events:
        by_worker[pid].append(begun_ns)
    starting, otherwise = [], []
    span_ns = AIM_MS * 1_000_000
    for begins_ns in by_worker.values():
        begins_ns.sort()
        for one, next_one in itertools.pairwise(begins_ns):
            beside = any(
                one < start.asked_ns + span_ns and next_one > start.asked_ns
                for start in requests
            )
            (starting if beside else otherwise).append((next_one - one) / 1e6)
    return starting, otherwise


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=40)
    events, requests = run(parser.parse_args().starts)
    times = [at_work_ms(events, start) for start in requests]
    times_ms = sorted(time_ms for time_ms in times if time_ms is not None)
    print(
        f"one more worker at work: {statistics.median(times_ms):.1f} ms (median of "
        f"{len(times_ms)}; {times_ms[0]:.1f} to {times_ms[-1]:.1f}; aim: {AIM_MS}); "
        f"{times.count(None)} came to nothing in {ROUND_S * 1e3:.0f} ms"
    )
    names = f"in the {AIM_MS} ms after somebody was asked for", "else"
    for name, pauses in zip(names, pauses_ms(events, requests), strict=True):
        pauses.sort()
        print(
            f"the others, from sample to sample, {name}: median "
            f"{statistics.median(pauses):.1f} ms, 99 of 100 under "
            f"{pauses[int(len(pauses) * 0.99)]:.1f}, at most {pauses[-1]:.1f}"
        )


if __name__ == "__main__":
    main()
