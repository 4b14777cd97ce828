"""How fast are reads that wait 20 ms for storage and then take 1 ms of Python?

    python benchmarks/remote_latency.py

Batches have 32 samples. The GIL limits the threads of one process, and the wait limits
a few processes, so the work needs many threads in several processes. torch's DataLoader
with 64 workers is compared with penstock in two stages set by hand, in one
`__getitem__` set by hand, and left to itself with autotune on. After each of their
windows, two processes of bare Python show what the machine can do at that moment. Each
candidate runs in a process of its own, which is new every round. Memory is the
proportional set size (PSS) of all its processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from burning import burn, rounds_for
from subject import Subject
from versus import Result, cpu_s, show

WAIT_S = 0.020
BURN_S = 0.001
BATCH = 32
SAMPLES = 10_000_000
"""Samples of an epoch, enough not to end during a measurement."""
WORKERS = 64
THREADS = 48
"""Threads of the stage that waits, if it is separate: 20 % more than needed."""
PREFETCH = 16
"""Batches ahead if set by hand: enough for leases of several rows for all workers."""
ROUNDS = 3
WINDOWS = 4
"""Windows in a round."""
WINDOW_S = 1.0
WARM_S = 2.0
"""Seconds before each window, in which prefetched batches are used up."""
TUNE_S = 15.0
"""The same for the candidate that is tuned while it runs."""

Window = tuple[float, float]
"""Samples per second, and cores kept busy."""

TORCH = f"DataLoader num_workers={WORKERS}"
BARE = "two processes of bare Python"
TUNED = f"one stage, autotune, after {TUNE_S:.0f} s"
AIMS = {
    f"two stages, {THREADS} threads and 2 processes": (1_700, 450),
    f"one stage, {WORKERS} workers in processes": (1_600, 600),
}
"""Samples per second if bare Python makes 2,000, and memory in MB."""
STAGES, WHOLE = AIMS


@dataclass(frozen=True)
class Remote:
    """Slow samples; sample i is i.

    Args:
        iterations: iterations of Python after the wait.
    """

    iterations: int = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(WAIT_S)
        burn(self.iterations)
        return index


@dataclass(frozen=True)
class Burn:
    """Only the Python, as a separate stage."""

    iterations: int

    def __call__(self, sample: int) -> int:
        burn(self.iterations)
        return sample


# In the process of one subject


def two_stages(iterations: int) -> Iterable[object]:
    """Wait on many threads, and compute on two processes."""
    import penstock as ps

    ps.set_prefetch_size(PREFETCH)
    return (
        ps.Pipeline.from_dataset(
            Remote(), executor="thread", num_parallel_workers=THREADS
        )
        .map(Burn(iterations), executor="process", num_parallel_workers=2)
        .batch(BATCH)
    )


def one_stage(iterations: int) -> Iterable[object]:
    """Wait and compute in `__getitem__`, in worker processes."""
    import penstock as ps

    ps.set_prefetch_size(PREFETCH)
    return ps.Pipeline.from_dataset(
        Remote(iterations),
        executor="process",
        num_parallel_workers=WORKERS,
        thread_safe=True,
    ).batch(BATCH)


def tuned(iterations: int) -> Iterable[object]:
    """Set nothing, and turn autotune on."""
    import penstock as ps

    ps.set_enable_autotune(True)
    return ps.Pipeline.from_dataset(Remote(iterations)).batch(BATCH)


def torch_loader(iterations: int) -> Iterable[object]:
    """Use as many workers as the best setting by hand."""
    from torch.utils.data import DataLoader

    dataset = Remote(iterations)
    return DataLoader(dataset, BATCH, num_workers=WORKERS, persistent_workers=True)  # type: ignore[arg-type]


def burns(iterations: int) -> int:
    """Return for how many samples one process does the Python in a window."""
    end_s, count = time.perf_counter() + WINDOW_S, 0
    while time.perf_counter() < end_s:
        burn(iterations)
        count += 1
    return count


def run_bare(iterations: int) -> Iterator[Window]:
    """Yield one window after another."""
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        while True:
            start_s, cpu = time.perf_counter(), cpu_s()
            count = sum(pool.map(burns, [iterations] * 2))
            spent_s = time.perf_counter() - start_s
            yield count / spent_s, (cpu_s() - cpu) / spent_s


def run_batches(batches: Iterator[object], first_s: float) -> Iterator[Window]:
    """Yield windows, each measured after prefetched batches are used up."""
    next(batches)
    count_for(batches, first_s)
    while True:
        count_for(batches, WARM_S)
        start_s, cpu = time.perf_counter(), cpu_s()
        count = count_for(batches, WINDOW_S)
        spent_s = time.perf_counter() - start_s
        yield count * BATCH / spent_s, (cpu_s() - cpu) / spent_s


def count_for(batches: Iterator[object], seconds: float) -> int:
    """Return how many batches arrive in this time."""
    end_s, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end_s:
        next(batches)
        count += 1
    return count


SUBJECTS: dict[str, Callable[[int], Iterable[object]] | None] = {
    STAGES: two_stages,
    WHOLE: one_stage,
    TUNED: tuned,
    TORCH: torch_loader,
    BARE: None,
}


def be(subject: str, iterations: int) -> None:
    """Run one subject: a line read asks for a window, which is written as a line."""
    make = SUBJECTS[subject]
    source = make and make(iterations)
    if source is None:
        windows = run_bare(iterations)
    else:
        windows = run_batches(iter(source), TUNE_S if subject == TUNED else 0)
    for _ in sys.stdin:
        print(json.dumps(next(windows)), flush=True)
    if hasattr(source, "explain"):
        for stage in source.explain().to_dict()["stages"]:
            fields = (
                stage[key] for key in ("name", "num_parallel_workers", "executor")
            )
            print(*fields, file=sys.stderr)


# In the process that asks


def started(name: str, iterations: int) -> Subject:
    """Return one subject in a fresh process, which answers with windows."""
    return Subject(__file__, "--subject", name, "--iterations", str(iterations))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--subject", choices=SUBJECTS, help="be one of those measured")
    parser.add_argument("--iterations", type=int, help="of Python in a sample")
    options = parser.parse_args()
    iterations = options.iterations or rounds_for(BURN_S)
    if options.subject:
        be(options.subject, iterations)
        return
    print(f"1 ms of this machine's Python: {iterations:,} iterations of a bare loop")
    windows: dict[str, list[Window]] = {name: [] for name in SUBJECTS}
    shares: dict[str, list[float]] = {name: [] for name in SUBJECTS if name != BARE}
    memory: dict[str, list[float]] = {name: [] for name in shares}
    for number in range(options.rounds):
        for name, share in shares.items():
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            with (
                started(name, iterations) as subject,
                started(BARE, iterations) as bare,
            ):
                for _ in range(1 if name == TUNED else WINDOWS):
                    windows[name].append(subject.ask())
                    windows[BARE].append(bare.ask())
                    share.append(windows[name][-1][0] / windows[BARE][-1][0])
                memory[name].append(subject.pss_mb())
    results = {
        name: Result(
            name,
            tuple(rate for rate, _ in pairs),
            statistics.median(cores for _, cores in pairs),
        )
        for name, pairs in windows.items()
    }
    show("20 ms of waiting, 1 ms of Python", list(results.values()), [TORCH])
    print("Of what bare Python did right after (medians of the windows):")
    for name, ratios in shares.items():
        conclude(name, ratios, statistics.median(memory[name]))


def conclude(name: str, shares: list[float], memory_mb: float) -> None:
    """Print the share of the ceiling and the memory, beside their aims."""
    rate, most_mb = AIMS.get(name, (0, 0))
    aim = f"  (aim: {rate / 2_000:.2f}, {most_mb} MB)" if rate else ""
    share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
    print(f"  {name}: {share}, {memory_mb:,.0f} MB{aim}")


if __name__ == "__main__":
    main()
