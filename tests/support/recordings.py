"""Logs of tuned runs, written by simulated pipelines."""

from __future__ import annotations

from pathlib import Path

from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.tuner import Tuner
from penstock.system.resources import Budget
from support.simulator.machine import Machine
from support.simulator.plant import Simulated
from support.simulator.workload import SimulatedStage, Trainer, Workload

READS = Workload(
    (
        SimulatedStage("<script>alert(1)</script>", wait_s=0.08),
        SimulatedStage("Map(ID:1) decode", cpu_s=0.008),
    ),
    Trainer(gap_s=0.032),
    batch_rows=8,
)


LONG = Workload(
    (
        SimulatedStage("Files(ID:0) pages", wait_s=16.0),
        SimulatedStage("Map(ID:1) decode", cpu_s=0.8),
    ),
    Trainer(gap_s=8.8),
    batch_rows=4,
)
"""A slow trainer, so that a day of training is simulated quickly."""


def record(
    prefix: Path,
    name: str = "train",
    rank: int = 0,
    seconds: float = 20.0,
    workload: Workload = READS,
) -> Path:
    """Tune a simulated pipeline, and return its log."""
    machine = Machine(2.0, seed=rank)
    plant = Simulated(machine, workload, [1, 1], [2, 2])
    with AutotuneLog(str(prefix), rank, name) as log:
        tuner = Tuner(plant, BottleneckLaw(), Budget(2.0, 1 << 30), log)
        while machine.now_s < seconds:
            machine.advance(tuner.step())
        tuner.finish(plant.observe)  # as it is now
    return Path(f"{prefix}_{rank}.jsonl")
