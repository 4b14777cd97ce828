"""What a pipeline that was measured would do on another machine: `penstock plan`.

The last window of a run's log says what a sample takes each stage; a simulated machine
of as many cores as asked for is tuned by the very policy that tunes a live one.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ..engine.observe.observation import Observation, SegmentObservation
from ..errors import SpecError
from ..system.resources import Budget
from .explain import Explanation, explain
from .log import AutotuneLog
from .policies import BottleneckLaw
from .simulator import Machine, Simulated, SimulatedStage, Trainer, Workload
from .situation import Situation
from .tuner import Tuner

TUNED_S = 60.0
SEEN_S = 20.0
"""After that: the window that is reported."""
STEPS = 20
"""That this window holds at least."""
PREFETCH = 2


@dataclass(frozen=True, slots=True)
class Projection:
    """What a machine of so many cores would do with a workload."""

    cores: float
    rows_per_s: float
    best_rows_per_s: float
    """By the closed-form law."""
    explanation: Explanation

    def __str__(self) -> str:
        told = self.explanation
        width = max(len(stage.name) for stage in told.stages)
        head = (
            f"on {self.cores:g} cores: {self.rows_per_s:,.0f} samples/s (at most"
            f" {self.best_rows_per_s:,.0f} by the bottleneck law), the trainer"
            f" waits {100 * told.wait_share:.0f}% of each step ({told.verdict})"
        )
        rows = [
            f"  {stage.name:<{width}}  {stage.num_parallel_workers:>4} workers, "
            f"{stage.prefetch_size} batches ahead, "
            f"{stage.cpu * stage.num_parallel_workers:.2f} cores"
            for stage in told.stages
        ]
        lines = [head, *rows, f"  what binds: {told.cause}"]
        return "\n".join(lines)


def measured_workload(path: str | os.PathLike[str]) -> Workload:
    """Return what a tuned run did, from its `<prefix>_<rank>.jsonl`.

    Raises:
        SpecError: there is no such file, or no training was seen in it.
    """
    shown = os.fspath(path)
    try:
        with open(shown, encoding="utf-8") as file:
            seen = [found for line in file if (found := _observed(line)) is not None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"{shown!r} is not the log of a tuned run ({type(error).__name__}: {error})"
        ) from error
    if not seen:
        raise SpecError(
            f"{shown!r} shows no training: set_enable_autotune(True, filepath_prefix)"
            " and some seconds of it are needed"
        )
    return _workload(seen[-1])


def plan(workload: Workload, cores: float, seed: int = 0) -> Projection:
    """Tune a simulated machine, and tell what it comes to."""
    machine = Machine(cores, seed)
    ones = [1] * len(workload.stages)
    plant = Simulated(machine, workload, ones, [PREFETCH] * len(ones))
    budget = Budget(cores, 1 << 40, whole_machine=True)
    tuner = Tuner(plant, BottleneckLaw(), budget, AutotuneLog(quiet=True))
    best = workload.best_rows_per_s(cores)
    lasting_s = STEPS * workload.batch_rows / best
    while machine.now_s < TUNED_S + 4 * lasting_s:
        machine.advance(tuner.step())
    plant.observe()
    machine.advance(max(SEEN_S, lasting_s))
    seen = plant.observe()
    return Projection(cores, seen.rows_per_s, best, explain(seen, budget, tuned=True))


def _observed(line: str) -> Observation | None:
    row: dict[str, Any] = json.loads(line)
    if row["event"] != "observation":
        return None
    seen = Situation.from_row(row).observation
    worked = all(segment.rows > 0 for segment in seen.segments)
    return seen if worked and seen.trainer.steps > 0 else None


def _workload(seen: Observation) -> Workload:
    trainer = seen.trainer
    return Workload(
        tuple(map(_stage, seen.segments)),
        Trainer(gap_s=trainer.gap_s / trainer.steps),
        batch_rows=max(1, round(trainer.rows / trainer.steps)),
    )


def _stage(segment: SegmentObservation) -> SimulatedStage:
    """Return it as measured: what was on no CPU counts as waiting, whoever's fault."""
    cpu_s = segment.cpu_s_per_row
    return SimulatedStage(
        segment.name,
        cpu_s=cpu_s,
        wait_s=max(0.0, segment.run_s_per_row - cpu_s),
        most_workers=1024,
    )
