"""How much does penstock itself cost, apart from the work it does?

    python benchmarks/engine_overhead.py

It prints the following figures with their bounds: the CPU time of `import penstock`
after torch's import (50 ms), the monitor's cost per chunk event (1 us) and per second
of training (0.5 % CPU), the tuner's CPU time per second (5 ms; with a log 10 ms), and
`next()` when a batch is ready (50 us). It also prints the time for a batch of two
numbers, inline and on one thread, compared with torch's DataLoader without workers.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from os import environ
from pathlib import Path

from torch.utils.data import DataLoader
from versus import show, versus

import penstock as ps
from penstock.engine.core.connector import WorkerMeter
from penstock.engine.core.core import Gauge
from penstock.engine.core.in_flight import Wait

ROUNDS = 5


def ns_per_call(call: Callable[[], object], calls: int) -> float:
    """Return the time of one call in nanoseconds, the median over rounds."""
    times_ns = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times_ns.append((time.perf_counter_ns() - start) / calls)
    return statistics.median(times_ns)


def import_cpu_s() -> float:
    """Return the CPU seconds that `import penstock` adds to torch's, once compiled."""
    code = (
        "import gc, time, torch.utils.data; gc.freeze(); start_s = time.process_time();"
        "import penstock; print(time.process_time() - start_s)"
    )
    with tempfile.TemporaryDirectory() as compiled:
        variables = environ | {"PYTHONPYCACHEPREFIX": compiled}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", code]
        times_s = [
            float(subprocess.check_output(command, env=variables))
            for _ in range(1 + ROUNDS)
        ]
    return statistics.median(times_s[1:])


def chunk_event_ns() -> float:
    """Return the cost of one event in nanoseconds; a chunk has two."""
    meter, before, behind = WorkerMeter(0), Gauge(64, 0), Gauge(64, 0)

    def lease() -> None:
        now_ns = time.perf_counter_ns()
        meter.wait(Wait.INPUT, now_ns)
        meter.start(now_ns)
        before.move(3, now_ns)
        meter.stop(8, 1000, 1000, now_ns)
        behind.move(3, now_ns)

    return ns_per_call(lease, 20_000) / 2


def reading_ns() -> float:
    """Return the cost of one reading in nanoseconds: two segments, 16 workers."""
    pipe = (
        ps.Pipeline.from_dataset(list(range(10_000)), num_parallel_workers=8)
        .map(abs, num_parallel_workers=8)
        .batch(64)
    )
    batches = iter(pipe)
    next(batches)
    cost = ns_per_call(pipe.stats, 200)
    pipe.close()
    return cost


def wait_a_little(number: int) -> int:
    """Stand in for a slow read."""
    time.sleep(0.002)
    return number


def tuner_cpu_s(prefix: str | None = None, seconds: float = 15.0) -> float:
    """Return the CPU seconds per second of the tuner's thread on a live pipeline.

    Args:
        prefix: prefix of its log's files; None: it writes none.
        seconds: how long to measure.
    """
    ps.set_enable_autotune(True, prefix)
    pipe = (
        ps.Pipeline.from_dataset(list(range(1_000_000)), num_parallel_workers=(1, 64))
        .map(wait_a_little, num_parallel_workers=(1, 64))
        .map(abs, num_parallel_workers=(1, 64))
        .batch(16)
    )
    end, spent_s = time.monotonic() + seconds, 0.0
    for _ in pipe:
        tuner = [t for t in threading.enumerate() if t.name == "penstock-autotune"]
        if tuner and tuner[0].ident is not None:
            spent_s = time.clock_gettime(time.pthread_getcpuclockid(tuner[0].ident))
        if time.monotonic() > end:
            break
    ps.set_enable_autotune(False)
    return spent_s / seconds


def ready_next_us() -> float:
    """Return the median time of `next()`, in us, when the batch has long been ready."""
    ps.set_prefetch_size(64)
    data = [float(n) for n in range(64 * 64)]
    one = {"executor": "thread", "num_parallel_workers": 1}
    pipe = ps.Pipeline.from_dataset(data, **one).batch(64)  # type: ignore[arg-type]
    batches = iter(pipe)
    next(batches)
    times_ns = []
    for _ in range(50):
        while pipe.stats().held_bytes < 60 * 64 * 8:
            threading.Event().wait(0.001)
        start = time.perf_counter_ns()
        next(batches)
        times_ns.append(time.perf_counter_ns() - start)
    pipe.close()
    ps.set_prefetch_size(2)
    return statistics.median(times_ns) / 1e3


def batch_cost() -> None:
    """Print the cost of a batch of two numbers."""
    data = list(range(20_000))
    inline = ps.Pipeline.from_dataset(data, executor="inline").batch(2)
    thread = ps.Pipeline.from_dataset(data, num_parallel_workers=1).batch(2)
    torch_loader = DataLoader(data, 2)  # type: ignore[arg-type]
    candidates = {
        "penstock inline": lambda: list(inline),
        "penstock, one thread": lambda: list(thread),
        "DataLoader num_workers=0": lambda: list(torch_loader),
    }
    results = versus(candidates, len(data) // 2, ROUNDS)
    show("batches of two numbers a second", results, ["DataLoader num_workers=0"])


def main() -> None:
    """Print the figures."""
    print(f"import: {import_cpu_s() * 1e3:.0f} ms of CPU after torch's (bound 50 ms)")
    event = chunk_event_ns()
    print(f"monitor: {event / 1e3:.2f} us a chunk event (bound 1 us)")
    reading = reading_ns()
    # One reading a second for explain(), two for the tuner; a thousand chunk events.
    share = (3 * reading + 1000 * event) / 1e9
    print(f"monitor: {share:.2%} of a core (bound 0.5 %)")
    print(f"monitor: {reading / 1e3:.0f} us a reading")
    print(f"tuner: {tuner_cpu_s() * 1e3:.1f} ms of CPU a second (bound 5 ms)")
    with tempfile.TemporaryDirectory() as folder:
        logging = tuner_cpu_s(f"{folder}/run")
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    print(f"tuner with a log: {logging * 1e3:.1f} ms of CPU a second (bound 10 ms)")
    print(f"log: {size / 1e3:.0f} kB in 15 s of tuning (a day: some 13 MB)")
    print(f"next(): {ready_next_us():.0f} us, median, batch ready (bound 50 us)")
    batch_cost()


if __name__ == "__main__":
    main()
