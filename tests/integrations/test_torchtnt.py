"""Torchtnt's train loop and snapshots."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support.framework_data import STEPS, loader, verdict, whole

pytest.importorskip("pkg_resources")  # torchtnt asks for a setuptools below 81
pytest.importorskip("torchtnt")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def unit(step_s: float = 0.0, stop_at: int = -1, batches: Any = None) -> Any:
    from torchtnt.framework.unit import TrainUnit

    class Unit(TrainUnit[Any]):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            self.seen: list[list[int]] = []
            self.state: Any = None

        def train_step(self, state: Any, data: Any) -> None:
            time.sleep(step_s)
            self.seen.append(data[1].tolist())
            if len(self.seen) == stop_at:
                self.state = batches.state_dict()

    return Unit()


def test_the_framework_trains_and_the_verdict_is_true() -> None:
    from torchtnt.framework.train import train

    for load_s, step_s in ((0.005, 0.0), (0.0, 0.05)):
        learns, batches = unit(step_s), loader(load_s)
        train(learns, batches, max_epochs=3)
        assert all(whole(learns.seen[n : n + STEPS]) for n in (0, STEPS, 2 * STEPS))
        verdict(batches, loading=load_s > 0)


def test_a_snapshot_resumes_within_the_epoch(tmp_path: Path) -> None:
    from torchtnt.framework.train import train

    first = loader()
    learns = unit(stop_at=STEPS + 7, batches=first)
    train(learns, first, max_epochs=2)
    second = loader()
    second.load_state_dict(learns.state)
    again = unit()
    train(again, second, max_epochs=1)
    assert again.seen == learns.seen[STEPS + 7 :]
