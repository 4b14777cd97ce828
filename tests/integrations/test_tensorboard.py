"""TensorBoard reads verdicts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.integrations.tensorboard import log_verdicts

pytest.importorskip("tensorboard")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_each_verdict_is_a_scalar_of_its_pipeline(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    ps.set_enable_autotune(True)
    steps = 0
    with SummaryWriter(str(tmp_path)) as writer:
        end = log_verdicts(writer, step=lambda: steps)
        train_loader = ps.DataLoader(list(range(8000)), 4)
        for _ in train_loader:
            steps += 1
            time.sleep(0.001)
        train_loader.close()
        end()
    ps.set_enable_autotune(False)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {
        "penstock/train/wait_share",
        "penstock/train/rows_per_s",
        "penstock/train/Dataset(ID:0) list/num_parallel_workers",
    } <= set(events.Tags()["scalars"])
    waits = events.Scalars("penstock/train/wait_share")
    assert all(0 <= wait.value <= 1 and wait.step > 0 for wait in waits)
