"""How near does the tuner come to the best settings, how soon, and with how little?

    python benchmarks/autotune_suite.py --quick
    python benchmarks/autotune_suite.py [--rows W3 ...] [--repeats 5]

Real pipelines whose best step is known (they sleep: the optimum is arithmetic) or is
searched (they compute: fixed settings are measured in the same run). Each is tuned from
two bad starts: one worker everywhere, and the most everywhere. Policies: ours, the
baseline `connector_rules`, and no tuning from the same start; --quick: ours alone,
three repeats. Printed are medians: the rate of the last seconds as a share of the best,
the seconds until 95 % of that rate, workers at the end beside the fewest that suffice,
changes in the last half, the deepest dip, and the verdict.
"""

from __future__ import annotations

import argparse
import io
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from burning import burn, rounds_for
from PIL import Image

import penstock as ps
from penstock.autotune.budget import Budget
from penstock.autotune.decision import Decision, Outcome
from penstock.autotune.explain import explain
from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies import BottleneckLaw, ConnectorRules, Policy
from penstock.autotune.tuner import Tuner, TunerThread
from penstock.pipeline.credits import Purse
from penstock.pipeline.run import Run

RUN_S = 24.0
LAST_S = 8.0
"""At the end of a run: what counts as its rate."""
GLIDE_S = 2.0
"""The rate at a moment is that of so long after it."""
SEARCH_S = 4.0
"""How long each fixed setting is measured where the optimum is searched."""
MOST = 32
"""Workers of each stage in the start from too many."""
SAMPLES = 10**8

POLICIES: dict[str, Callable[[], Policy[Any]] | None] = {
    "ours": BottleneckLaw,
    "rules": ConnectorRules,
    "untuned": None,
}


@dataclass(frozen=True)
class Sleep:
    """A sample, or a stage's work on one, that waits.

    Args:
        seconds: that it takes.
        heavy_s: what one sample in a hundred takes instead.
    """

    seconds: float
    heavy_s: float = 0.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return self(index)

    def __call__(self, sample: int) -> int:
        heavy = self.heavy_s and hash((sample, 1)) % 100 == 0
        time.sleep(self.heavy_s if heavy else self.seconds)
        return sample


class Crowded:
    """Slower the more are in it at once: a lock in a native library.

    Seconds a sample with 1, 2, 3, ... at work: those of SPDL's video demuxer
    (0.010 s alone, best with three).
    """

    CURVE_S = (0.010, 0.010, 0.013, 0.023, 0.045, 0.067, 0.108, 0.150)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        with self._lock:
            self._inside += 1
            inside = self._inside
        least = self.CURVE_S[min(inside, len(self.CURVE_S)) - 1]
        time.sleep(least * max(1.0, inside / len(self.CURVE_S)))
        with self._lock:
            self._inside -= 1
        return index


@dataclass(frozen=True)
class Python:
    """A sample that computes in pure Python, maybe after a wait.

    Args:
        loops: of Python.
        wait_s: before them.
    """

    loops: int
    wait_s: float = 0.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if self.wait_s:
            time.sleep(self.wait_s)
        burn(self.loops)
        return index


def photograph() -> bytes:
    """Return a JPEG file of 500 x 375 pixels."""
    down, across = np.mgrid[0:375, 0:500]
    waves = [np.sin(down / k) + np.cos(across / (k + 3)) for k in (7, 23, 61)]
    pixels = np.stack([(wave + 2) * 63 for wave in waves], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


@dataclass(frozen=True)
class Photos:
    """The same photograph again and again, to decode and to resize."""

    encoded: bytes = field(default_factory=photograph)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        with Image.open(io.BytesIO(self.encoded)) as image:
            return np.asarray(image.convert("RGB").resize((224, 224)))


MS = rounds_for(0.001)


@dataclass(frozen=True)
class Row:
    """One pipeline with its trainer, and what is known of it."""

    make: Callable[[int], ps.Pipeline]
    """Return it with so many workers a stage."""
    step_s: float
    """The trainer's own part of a step."""
    verdict: str
    best: float = 0.0
    """Steps a second of the best settings; 0: it is searched among `fixed`."""
    fewest: int = 0
    """Workers, over all stages, that suffice for these; 0: not known."""
    fixed: tuple[int, ...] = ()
    most: int = MOST


def read(data: Any, batch: int, **settings: Any) -> Callable[[int], ps.Pipeline]:
    """Return a maker of pipelines that read, and do nothing else."""
    return lambda workers: ps.Pipeline.from_dataset(
        data, num_parallel_workers=workers, thread_safe=True, **settings
    ).batch(batch)


def three(*seconds: float) -> Callable[[int], ps.Pipeline]:
    """Return a maker of pipelines of three stages that wait."""

    def make(workers: int) -> ps.Pipeline:
        asked: Any = {"executor": "thread", "num_parallel_workers": workers}
        pipe = ps.Pipeline.from_dataset(Sleep(seconds[0]), **asked)
        for each in seconds[1:]:
            pipe = pipe.map(Sleep(each), **asked)
        return pipe.batch(1)

    return make


def sequential(workers: int) -> ps.Pipeline:
    """A stage of which there can only be one, behind one of which there can be more."""
    asked: Any = {"executor": "thread", "num_parallel_workers": workers}
    one: Any = {"executor": "thread", "num_parallel_workers": (1, 1)}
    source = ps.Pipeline.from_dataset(Sleep(0.005), **asked)
    return source.map(Sleep(0.010), **one).batch(4)


ROWS = {
    "latency": Row(
        read(Sleep(0.020), 16, executor="thread"), 0.020, "not input-bound", 50.0, 16
    ),
    "10/25/40": Row(three(0.010, 0.025, 0.040), 0.030, "not input-bound", 1 / 0.030, 4),
    "40/25/10": Row(three(0.040, 0.025, 0.010), 0.030, "not input-bound", 1 / 0.030, 4),
    "crowded": Row(
        read(Crowded(), 8, executor="thread"), 0.0, "input-bound", 3 / 0.013 / 8, 3
    ),
    "GIL": Row(
        read(Python(2 * MS), 8, executor="thread"), 0.0, "input-bound", fixed=(1, 2)
    ),
    "JPEG": Row(
        read(Photos(), 16, executor="thread"), 0.0, "input-bound", fixed=(2, 3)
    ),
    "W3": Row(
        read(Python(MS, 0.020), 32, executor="process"),
        0.0,
        "input-bound",
        fixed=(48, 64),
        most=64,
    ),
    "heavy tail": Row(
        read(Sleep(0.002, 0.100), 16, executor="thread"),
        0.020,
        "not input-bound",
        50.0,
        3,
    ),
    "sequential": Row(sequential, 0.010, "input-bound", 25.0, 2),
    "trainer": Row(
        read(Sleep(0.001), 8, executor="thread"), 0.050, "not input-bound", 20.0, 1
    ),
}


class Diary(AutotuneLog):
    """Remembers the changes that were made, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.changed_s: list[float] = []

    def decision(self, decision: Decision, time_s: float) -> None:
        self.changed_s.append(time.perf_counter())
        super().decision(decision, time_s)

    def outcome(self, outcome: Outcome, time_s: float) -> None:
        if not outcome.kept and self.changed_s:  # no net change
            self.changed_s.pop()
        super().outcome(outcome, time_s)


@dataclass(frozen=True)
class Course:
    """How one run went."""

    rate: float
    """Steps a second in the end."""
    settled_s: float
    """Until 95 % of that."""
    workers: int
    late_changes: int
    """That stood, in the last half."""
    dip: float
    """Least rate, after the first seconds, as a share of the rate to begin with."""
    verdict: str
    first_s: float
    """Until the first batch."""


def course(
    row: Row, workers: int, policy: Policy[Any] | None, seconds: float
) -> Course:
    """Train for so long, tuned or not."""
    recipe = row.make(workers)._compiled()  # noqa: SLF001 with a policy of our choice
    run, log = Run(recipe, Purse(1 << 30), recipe.plan.start(0)), Diary()
    try:
        if policy is None:
            return trained(run, row, seconds, log)
        with TunerThread(Tuner(run, policy, Budget.of_machine(), log), log):
            return trained(run, row, seconds, log)
    finally:
        run.close()


def trained(run: Run, row: Row, seconds: float, log: Diary) -> Course:
    start = time.perf_counter()
    times = []
    while (now := time.perf_counter()) < start + seconds:
        run.next()
        times.append(time.perf_counter())
        if row.step_s:
            time.sleep(row.step_s)
    last = [at for at in times if at > now - min(LAST_S, seconds / 2)]
    rate = (len(last) - 1) / (last[-1] - last[0]) if len(last) > 1 else 0.0
    rates = list(gliding(times))
    reached = [at - start for at, each in rates if each >= 0.95 * rate]
    seen = run.recent()
    return Course(
        rate=rate,
        settled_s=reached[0] if reached else seconds,
        workers=sum(segment.num_parallel_workers for segment in seen.segments),
        late_changes=sum(at > start + seconds / 2 for at in log.changed_s),
        dip=min((each for _, each in rates[1:]), default=0.0) / rates[0][1],
        verdict=explain(seen).verdict,
        first_s=times[0] - start,
    )


def gliding(times: list[float]) -> Iterator[tuple[float, float]]:
    """Yield (moment, rate of the seconds after it), for every half second."""
    moment = times[0]
    while moment + GLIDE_S <= times[-1]:
        count = sum(moment < at <= moment + GLIDE_S for at in times)
        yield moment, count / GLIDE_S
        moment += 0.5


def optimum(row: Row) -> float:
    """Return steps a second of the best fixed setting, if that is not known."""
    if row.best:
        return row.best
    return max(course(row, fixed, None, SEARCH_S).rate for fixed in row.fixed)


def measure(name: str, row: Row, policies: list[str], repeats: int) -> None:
    """Print one row's lines: a policy and a start each."""
    starts = {"ones": 1, "most": row.most}
    found: dict[tuple[str, str], list[tuple[Course, float]]] = {}
    for _ in range(repeats):
        for policy in policies:
            for start, workers in starts.items():
                best = optimum(row)
                made = POLICIES[policy]
                went = course(row, workers, made() if made else None, RUN_S)
                found.setdefault((policy, start), []).append((went, best))
    for (policy, start), runs in found.items():
        shares = [went.rate / best for went, best in runs]
        middle = statistics.median
        fewest = f"/{row.fewest}" if row.fewest else ""
        right = sum(went.verdict == row.verdict for went, _ in runs)
        print(
            f"{name:<11} {policy:<8} {start:<5} {middle(shares):6.2f}"
            f" ({min(shares):.2f}-{max(shares):.2f})"
            f" {middle(w.settled_s for w, _ in runs):6.1f} s"
            f" {middle(w.workers for w, _ in runs):5.0f}{fewest:<4}"
            f" {middle(w.late_changes for w, _ in runs):4.0f}"
            f" {middle(w.dip for w, _ in runs):7.2f}"
            f"   {right}/{len(runs)} {row.verdict}",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ours alone")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int)
    options = parser.parse_args()
    policies = ["ours"] if options.quick else list(POLICIES)
    repeats = options.repeats or (3 if options.quick else 5)
    print("row         policy   start  of best (range)     95 %  workers late     dip")
    for name in options.rows:
        measure(name, ROWS[name], policies, repeats)


if __name__ == "__main__":
    main()
