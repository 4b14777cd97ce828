"""How close does the tuner come to the best settings, how soon, and at what cost?

    python benchmarks/autotune_suite.py --quick
    python benchmarks/autotune_suite.py [--rows W3 ...] [--repeats 5] [--out FILE]

These are real pipelines. If they sleep, their best step follows from arithmetic; if
they compute, it is found by measuring fixed settings in the same run. Each is tuned
from two bad starts: one worker everywhere, and as many as possible everywhere. The
policies are ours, the baseline `connector_rules`, a hill climb, and no tuning from the
same start; with --quick, only ours, three times.

The table shows medians: the rate of the last seconds as a share of the best rate, the
seconds until 90 and 95 % of that rate, the workers at the end (beside the fewest that
suffice) and their mean over the run, the trainer's wait at the end, the changes in the
second half, the deepest dip, the most bytes held, and how often verdict and cause were
right. regimes.py has the rows with a change of regime.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from connector_rules import ConnectorRules
from hill_climb import HillClimb
from suite_rows import ROWS, Row

from penstock.autotune.explain import explain
from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.policies.policy import Policy
from penstock.autotune.trial import Decision, DecisionOutcome
from penstock.autotune.tuner import Tuner, TunerThread
from penstock.engine.core.in_flight import ByteBudget
from penstock.engine.run import Run
from penstock.system.resources import Budget

RUN_S = 24.0
LAST_S = 8.0
"""Seconds at the end of a run over which its final rate is measured."""
GLIDE_S = 2.0
"""The rate at a moment is measured over this many seconds after it."""
SEARCH_S = 4.0
"""Seconds for which each fixed setting is measured, if the optimum is searched."""

POLICIES: dict[str, Callable[[], Policy[Any]] | None] = {
    "ours": BottleneckLaw,
    "rules": ConnectorRules,
    "hill": HillClimb,
    "untuned": None,
}


class Diary(AutotuneLog):
    """Records the changes that were made, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.changed_s: list[float] = []

    def decision(self, decision: Decision, time_s: float) -> None:
        self.changed_s.append(time.perf_counter())
        super().decision(decision, time_s)

    def outcome(self, outcome: DecisionOutcome, time_s: float) -> None:
        if not outcome.kept and self.changed_s:  # no net change
            self.changed_s.pop()
        super().outcome(outcome, time_s)


@dataclass(frozen=True)
class Course:
    """The result of one run."""

    rate: float
    """Steps per second at the end."""
    near_s: float
    """Seconds until 90 % of the final rate."""
    settled_s: float
    """Seconds until 95 % of the final rate."""
    workers: int
    mean_workers: float
    """Over the whole run: worker-seconds per second."""
    wait_share: float
    """Exposed wait as a share of the last seconds' steps."""
    peak_bytes: int
    late_changes: int
    """Changes in the second half that were kept."""
    dip: float
    """Lowest rate after the first seconds, as a share of the rate at the start."""
    verdict: str
    cause: str
    first_s: float
    """Seconds until the first batch."""


def course(
    row: Row, workers: int, policy: Policy[Any] | None, seconds: float
) -> Course:
    """Train for some seconds, with or without the tuner."""
    recipe = row.make(workers)._compiled()  # noqa: SLF001 with a policy of our choice
    run, log = Run(recipe, ByteBudget(1 << 30), recipe.plan.start(0)), Diary()
    try:
        if policy is None:
            return trained(run, row, seconds, log)
        with TunerThread(Tuner(run, policy, Budget.of_machine(), log)):
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
    observation, reading = run.recent(), run.read()
    explanation = explain(observation, Budget.of_machine())

    def reached(share: float) -> float:
        moments = (at - start for at, value in rates if value >= share * rate)
        return next(moments, seconds)

    return Course(
        rate=rate,
        near_s=reached(0.90),
        settled_s=reached(0.95),
        workers=sum(segment.num_parallel_workers for segment in observation.segments),
        mean_workers=sum(s.worker_s for s in reading.segments) / (now - start),
        wait_share=explanation.wait_share,
        peak_bytes=observation.peak_bytes,
        late_changes=sum(at > start + seconds / 2 for at in log.changed_s),
        dip=min((value for _, value in rates[1:]), default=0.0) / rates[0][1],
        verdict=explanation.verdict,
        cause=explanation.cause,
        first_s=times[0] - start,
    )


def gliding(times: list[float]) -> Iterator[tuple[float, float]]:
    """Yield (moment, rate over the seconds after it), every half second."""
    moment = times[0]
    while moment + GLIDE_S <= times[-1]:
        count = sum(moment < at <= moment + GLIDE_S for at in times)
        yield moment, count / GLIDE_S
        moment += 0.5


def searched(row: Row) -> list[float]:
    """Return the steps per second of each fixed setting; none if the best is known."""
    return [course(row, fixed, None, SEARCH_S).rate for fixed in row.fixed]


def optimum(row: Row, before: list[float], after: list[float]) -> float:
    """Return the steps per second of the best setting, measured before and after."""
    means = [statistics.mean(pair) for pair in zip(before, after, strict=True)]
    return row.best or max(means)


def measure(
    name: str, row: Row, policies: list[str], repeats: int, out: Path | None
) -> None:
    """Print the lines of one row: one per policy and start."""
    starts = {"ones": 1, "most": row.most}
    courses: dict[tuple[str, str], list[tuple[Course, float]]] = {}
    for _ in range(repeats):
        for policy in policies:
            for start, workers in starts.items():
                before = searched(row)
                make = POLICIES[policy]
                went = course(row, workers, make() if make else None, RUN_S)
                best = optimum(row, before, searched(row))
                courses.setdefault((policy, start), []).append((went, best))
                if out is not None:
                    about = {"row": name, "policy": policy, "start": start}
                    with out.open("a") as file:
                        line = {**about, "best": best, **asdict(went)}
                        file.write(json.dumps(line) + "\n")
    for (policy, start), runs in courses.items():
        shares = [went.rate / best for went, best in runs]
        middle = statistics.median
        fewest = f"/{row.fewest}" if row.fewest else ""
        right = sum(went.verdict == row.verdict for went, _ in runs)
        right_causes = sum(went.cause.startswith(row.cause) for went, _ in runs)
        print(
            f"{name:<11} {policy:<8} {start:<5} {middle(shares):6.2f}"
            f" ({min(shares):.2f}-{max(shares):.2f})"
            f" {middle(w.near_s for w, _ in runs):5.1f}"
            f" {middle(w.settled_s for w, _ in runs):5.1f} s"
            f" {middle(w.workers for w, _ in runs):5.0f}{fewest:<4}"
            f" {middle(w.mean_workers for w, _ in runs):5.1f}"
            f" {middle(w.wait_share for w, _ in runs):5.0%}"
            f" {middle(w.late_changes for w, _ in runs):4.0f}"
            f" {middle(w.dip for w, _ in runs):5.2f}"
            f" {middle(w.peak_bytes for w, _ in runs) / 2**20:6.1f}"
            f"  {right}/{len(runs)} {right_causes}/{len(runs)}",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ours alone")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, help="add each run to it, as JSON lines")
    options = parser.parse_args()
    policies = ["ours"] if options.quick else list(POLICIES)
    repeats = options.repeats or (3 if options.quick else 5)
    print(
        "row         policy   start  of best (range)     90 %  95 %  workers mean  wait"
        " late   dip    MiB  verdict cause"
    )
    for name in options.rows:
        measure(name, ROWS[name], policies, repeats, options.out)


if __name__ == "__main__":
    main()
