"""Runs candidates in turn and prints their medians beside a peer's."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

__all__ = ["Result", "show", "versus"]


@dataclass(frozen=True)
class Result:
    """One candidate over all rounds."""

    name: str
    rates: tuple[float, ...]
    """Samples per second, by round."""
    cores: float
    """Cores kept busy, children included: the median."""
    memory_mb: float = 0.0
    """Memory of all its processes in MB; 0: not measured."""
    note: str = ""

    @property
    def rate(self) -> float:
        """The median rate."""
        return statistics.median(self.rates)


def cpu_s() -> float:
    """Return the CPU seconds of this process and all its children, also ended ones."""
    process = psutil.Process()
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        try:
            child_times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += child_times.user + child_times.system
    return total


def versus(
    candidates: Mapping[str, Callable[[], object]], samples: int, rounds: int = 5
) -> list[Result]:
    """Run every candidate once a round, after one round that does not count.

    Args:
        candidates: functions that each run one whole epoch.
        samples: samples in an epoch.
        rounds: rounds that count.
    """
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    cores: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, epoch in candidates.items():
            print(f"round {number} of {rounds}: {name}", file=sys.stderr, flush=True)
            start, cpu = time.perf_counter(), cpu_s()
            epoch()
            spent_s = time.perf_counter() - start
            if number:
                rates[name].append(samples / spent_s)
                cores[name].append((cpu_s() - cpu) / spent_s)
    return [
        Result(name, tuple(rates[name]), statistics.median(cores[name]))
        for name in candidates
    ]


def show(title: str, results: list[Result], peers: list[str]) -> Result:
    """Print a table of ratios to the best of `peers`; return that peer."""
    best = max((r for r in results if r.name in peers), key=lambda result: result.rate)
    print(f"\n{title} (medians of {len(best.rates)}, interleaved; cores kept busy)")
    width = max(len(result.name) for result in results)
    for result in results:
        low, high = min(result.rates), max(result.rates)
        memory = f" {result.memory_mb:6,.0f} MB" if result.memory_mb else ""
        print(
            f"  {result.name:<{width}}  {result.rate:>12,.0f}/s"
            f"  ({low:,.0f} to {high:,.0f})"
            f"  {result.rate / best.rate:6.2f}x  {result.cores:.2f} cores{memory}"
            f"{result.note and f'  {result.note}'}"
        )
    print(f"  1.00x is the best of: {', '.join(peers)}")
    return best
