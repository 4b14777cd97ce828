"""What a pipeline that was measured would do on another machine: `penstock plan`.

The last window of a run's log says what a sample takes each stage; a simulated machine
of as many cores as asked for is tuned by the very policy that tunes a live one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..engine.observe.observation import Observation, SegmentObservation
from ..errors import check
from ..system.resources import Budget
from .explain import Explanation, explain
from .log import AutotuneLog
from .policies import BottleneckLaw
from .report.recording import Row, read_recording
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
            f"on {self.cores:.3g} cores: {self.rows_per_s:,.0f} samples/s (at most"
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


def measured_workload(
    path: str | os.PathLike[str], name: str | None = None
) -> Workload:
    """Return what a tuned run did, from its log.

    Args:
        path: of one rank's `<prefix>_<rank>.jsonl`, or the prefix.
        name: of the pipeline; None: there is but one that trained.

    Raises:
        SpecError: there is no such log, no training was seen in it, or that of several
            pipelines.
    """
    shown, recording = os.fspath(path), read_recording(path)
    seen: dict[str, Observation] = {}
    for each in recording.named(name):
        if each.latest is not None:
            seen.setdefault(each.name, _observed(each.latest))
    check(
        bool(seen),
        f"{shown!r} shows no training: set_enable_autotune(True, filepath_prefix)"
        " and some seconds of it are needed",
    )
    check(
        len(seen) == 1,
        f"{shown!r} has several pipelines ({', '.join(seen)}); say which one is meant"
        " by its name",
    )
    (observation,) = seen.values()
    return _workload(observation)


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


def _observed(row: Row) -> Observation:
    return Situation.from_row(row).observation


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
