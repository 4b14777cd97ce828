"""Random pipelines for the simulator, drawn from a seed, that tuners may meet.

Written before any policy was tried on it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from support.simulator.workload import SimulatedStage, Trainer, Workload

__all__ = ["Case", "case"]

CORES = (2, 4, 8, 16, 64)
BATCH_ROWS = (8, 32, 64, 256)
QUIRKS = ("none", "none", "none", "gil", "lock", "one", "heavy", "store")


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on a machine, and the settings from which the tuner starts."""

    workload: Workload
    cores: int
    start: str
    """`ones` or `most`: workers of every stage."""

    @property
    def workers(self) -> list[int]:
        """Workers of each stage to begin with."""
        most = [stage.most_workers for stage in self.workload.stages]
        return most if self.start == "most" else [1] * len(most)


def case(seed: int) -> Case:
    """Return the case of this seed."""
    dice = random.Random(seed)
    stages = tuple(stage(dice, at) for at in range(dice.randint(1, 4)))
    rows = dice.choice(BATCH_ROWS)
    best = Workload(stages, Trainer(0.0), rows).best_rows_per_s(dice.choice(CORES))
    # From a trainer that takes anything to one three times slower than loading.
    gap_s = 0.0 if dice.random() < 0.2 else rows / best * dice.uniform(0.3, 3.0)
    trainer = Trainer(gap_s, spread=dice.uniform(0.0, 0.1))
    start = dice.choice(["ones", "most"])
    return Case(Workload(stages, trainer, rows), dice.choice(CORES), start)


def stage(dice: random.Random, at: int) -> SimulatedStage:
    """Return one stage: computing, waiting or both; now and then with a quirk."""
    whole_s = 10 ** dice.uniform(-3.5, -1.5)
    waiting = dice.choice([0.0, 0.5, 0.95])
    quirk = dice.choice(QUIRKS)
    return SimulatedStage(
        name=f"stage{at}",
        cpu_s=(1.0 - waiting) * whole_s,
        wait_s=waiting * whole_s,
        transfer_s=whole_s * dice.uniform(0.02, 0.3) if quirk == "store" else 0.0,
        gil=dice.uniform(0.2, 1.0) if quirk == "gil" else 0.0,
        contention=dice.uniform(0.02, 0.2) if quirk == "lock" else 0.0,
        crosstalk=dice.uniform(0.01, 0.1) if quirk == "lock" else 0.0,
        most_workers=1 if quirk == "one" else 64,
        spread=dice.uniform(0.0, 0.3),
        heavy_share=0.01 if quirk == "heavy" else 0.0,
        heavy_factor=50.0 if quirk == "heavy" else 1.0,
    )
