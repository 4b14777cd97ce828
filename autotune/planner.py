"""How a measured pipeline would run on another machine: `penstock plan`.

The last window of a run's log shows how long a sample takes in each stage. A simulated
machine with the requested cores is tuned by the same policy as a live one. Many such
machines can form nodes in step that share a store: see `simulator/scale.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from ..engine.observe.observation import Observation, SegmentObservation
from ..errors import check
from ..system.printing import figures
from ..system.resources import Budget
from .explain import Explanation, explain
from .log import AutotuneLog
from .policies import BottleneckLaw
from .report.recording import Row, read_recording
from .simulator import (
    Cluster,
    Machine,
    ScalePoint,
    Simulated,
    SimulatedStage,
    Tier,
    Trainer,
    Workload,
    normal_steps,
    simulate,
)
from .situation import Situation
from .tuner import Tuner

TUNED_S = 60.0
SEEN_S = 20.0
"""Length of the window that is reported, after `TUNED_S`."""
STEPS = 20
"""Fewest training steps in that window."""
PREFETCH = 2


@dataclass(frozen=True, slots=True)
class Projection:
    """How fast a machine with this many cores would train on a workload."""

    cores: float
    rows_per_s: float
    best_rows_per_s: float
    """The closed-form upper bound."""
    explanation: Explanation

    def __str__(self) -> str:
        told = self.explanation
        width = max(len(stage.name) for stage in told.stages)
        head = (
            f"on {figures(self.cores)} cores: {self.rows_per_s:,.0f} samples/s (at most"
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
    """Read the measured workload of a tuned run from its log.

    Args:
        path: one rank's `<prefix>_<rank>.jsonl`, or the prefix.
        name: the pipeline's name; None if only one trained.

    Raises:
        SpecError: the log does not exist, is of another version, shows no training, or
            shows several pipelines and `name` does not choose one.
    """
    shown, recording = os.fspath(path), read_recording(path)
    seen: dict[str, Observation] = {}
    for each in recording.named(name):
        if each.latest is not None:
            seen.setdefault(each.name, _observed(each.latest))
    check(
        bool(seen),
        f"{shown!r} shows no training; train for some seconds with"
        " set_enable_autotune(True, filepath_prefix)",
    )
    check(
        len(seen) == 1,
        f"{shown!r} has several pipelines ({', '.join(seen)}); choose one, for example"
        f" with `penstock plan {shown} --name {next(iter(seen), '')}`",
    )
    (observation,) = seen.values()
    return _workload(observation)


def plan(workload: Workload, cores: float, seed: int = 0) -> Projection:
    """Tune a simulated machine and return how fast it ends up."""
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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The facts about a cluster that a log lacks; by default, nothing is limited."""

    store_bytes_per_s: float = inf
    """Bandwidth of the store, which all nodes share."""
    data_bytes: float = inf
    """Size of the whole dataset as it is read."""
    ram_bytes: float = 0.0
    """Size of a node's cache in RAM."""
    disk_bytes: float = 0.0
    """Size of a node's cache on its own disk."""
    disk_bytes_per_s: float = 1e9
    """Speed at which that disk is read."""
    spread: float = 0.02
    """Standard deviation of a trainer's steps, relative to their mean."""

    @property
    def bounded(self) -> bool:
        """Whether the prediction depends on the bytes of a sample."""
        return self.store_bytes_per_s < inf or self.data_bytes < inf


@dataclass(frozen=True, slots=True)
class ScaleProjection:
    """The predicted speed of several numbers of nodes with a workload."""

    cores: float
    """Cores of each node."""
    epochs: tuple[tuple[ScalePoint, ScalePoint], ...]
    """The first epoch and a later one, for each number of nodes."""

    def __str__(self) -> str:
        head = (
            f"nodes in step, {figures(self.cores)} cores each: samples/s of all nodes,"
            " and their share of the rate of trainers that never wait"
        )
        lines = [
            head,
            f"  {'nodes':>6}  {'first epoch':>20}  {'later epochs':>20}  what binds",
        ]
        for first, later in self.epochs:
            binds = first.binds
            if later.binds != binds:
                binds = f"{binds}; later {later.binds}"
            columns = "  ".join(
                f"{each.rows_per_s:>13,.0f}  {each.efficiency:>5.2f}"
                for each in (first, later)
            )
            lines.append(f"  {first.nodes:>6,}  {columns}  {binds}")
        return "\n".join(lines)


def plan_nodes(
    workload: Workload, cores: float, counts: Sequence[int], around: Surroundings
) -> ScaleProjection:
    """Predict the speed of several nodes in step, each like the measured one.

    Raises:
        SpecError: a limit depends on the bytes of a sample, which the log does not
            have; or there are caches, and the size of the dataset is not given.
    """
    check(
        around.data_bytes < inf or not around.ram_bytes + around.disk_bytes,
        "a cache's hit rate depends on the size of the dataset, which is not given;"
        " pass it, for example --data-size 140GB",
    )
    check(
        workload.source_bytes > 0 or not around.bounded,
        "the log does not say how large a sample is when it is read, so a store's"
        " bandwidth or the size of the dataset cannot be used; leave these options out,"
        " or record the run again",
    )
    alone = replace(workload, trainer=Trainer(gap_s=0.0))
    one = Cluster(
        normal_steps(workload.trainer.gap_s, around.spread),
        batch_rows=workload.batch_rows,
        row_bytes=workload.source_bytes or 1.0,
        node_rows_per_s=alone.best_rows_per_s(cores),
        store_bytes_per_s=around.store_bytes_per_s,
        data_bytes=around.data_bytes,
        tiers=(
            Tier(around.ram_bytes),
            Tier(around.disk_bytes, around.disk_bytes_per_s),
        ),
    )
    epochs = tuple(
        (simulate(one, nodes), simulate(one, nodes, warm=True)) for nodes in counts
    )
    return ScaleProjection(cores, epochs)


def _observed(row: Row) -> Observation:
    return Situation.from_row(row).observation


def _workload(seen: Observation) -> Workload:
    trainer = seen.trainer
    return Workload(
        tuple(map(_stage, seen.segments)),
        Trainer(gap_s=trainer.gap_s / trainer.steps),
        batch_rows=max(1, round(trainer.rows / trainer.steps)),
        source_bytes=_source_bytes(seen.segments[0]),
    )


def _source_bytes(segment: SegmentObservation) -> float:
    return segment.parts[0].bytes_per_row if segment.parts else 0.0


def _stage(segment: SegmentObservation) -> SimulatedStage:
    """Return the stage as measured; all time off the CPU counts as waiting."""
    cpu_s = segment.cpu_s_per_row
    return SimulatedStage(
        segment.name,
        cpu_s=cpu_s,
        wait_s=max(0.0, segment.run_s_per_row - cpu_s),
        most_workers=1024,
    )
