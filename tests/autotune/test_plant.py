"""What simulated pipelines ask of their machine."""

from __future__ import annotations

import pytest

from support.simulator.machine import Machine
from support.simulator.plant import Simulated
from support.simulator.workload import SimulatedStage, Trainer, Workload


@pytest.mark.parametrize(
    ("trainer", "parts"),
    [
        (Trainer(gap_s=1.0), (1.0, 0.0, 0.0, 0.0)),
        (Trainer(gap_s=2.0, cores=0.5), (1.0, 1.0, 0.0, 0.0)),
        (Trainer(gap_s=1.0, cores=0.5, gil=0.25), (0.5, 0.25, 0.25, 0.0)),
        (Trainer(gap_s=1.0, cores=0.25, gil=0.5), (0.5, 0.0, 0.5, 0.0)),
        (Trainer(gap_s=1.0, cores=4.0, gil=0.5), (0.0, 3.5, 0.5, 0.0)),
    ],
)
def test_a_trainers_step_is_idle_time_then_free_and_held_computing(
    trainer: Trainer, parts: tuple[float, ...]
) -> None:
    workload = Workload((SimulatedStage("read", wait_s=0.01),), trainer)
    plant = Simulated(Machine(4.0), workload, [1], [1])
    busy, seconds = plant.users()[-1]
    assert busy in (0, 1)
    assert seconds == pytest.approx(parts)
