"""Lightning's Trainer: on one device, on two ranks, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.framework_data import STEPS, whole

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "lightning_run.py"
SAVED_AT = STEPS // 2 + 3


def fit(folder: Path, name: str, **settings: Any) -> list[dict[str, Any]]:
    """Train in a process of its own; return what each rank reports."""
    wanted = {
        "name": name,
        "devices": 1,
        "use_distributed_sampler": True,
        "load_s": 0.0,
        "step_s": 0.0,
        **settings,
    }
    tests = str(SCRIPT.parents[1])
    subprocess.run(
        [sys.executable, "-P", "-W", "ignore", SCRIPT, folder, json.dumps(wanted)],
        check=True,
        env={**os.environ, "PYTHONPATH": tests},
        timeout=100,
    )
    found = (folder / f"{name}{rank}.json" for rank in range(wanted["devices"]))
    return [json.loads(path.read_text()) for path in found]


@pytest.mark.parametrize(("load_s", "step_s"), [(0.005, 0.0), (0.0, 0.05)])
def test_the_framework_trains_and_the_verdict_is_true(
    tmp_path: Path, load_s: float, step_s: float
) -> None:
    (told,) = fit(tmp_path, "run", load_s=load_s, step_s=step_s)
    assert told["ours"]
    assert len(told["seen"]) == 3 * STEPS
    assert all(whole(told["seen"][n : n + STEPS]) for n in (0, STEPS, 2 * STEPS))
    assert told["verdict"] == ("input-bound" if load_s else "not input-bound")


@pytest.mark.parametrize("inject", [True, False])
def test_two_ranks_share_an_epoch(tmp_path: Path, *, inject: bool) -> None:
    one, two = fit(tmp_path, "run", devices=2, use_distributed_sampler=inject)
    assert one["ours"]
    assert one["sampler"] == two["sampler"] == "DistributedSampler"
    half = STEPS // 2
    for first in (0, half, 2 * half):
        mine, others = (each["seen"][first : first + half] for each in (one, two))
        assert whole(mine + others)
    assert one["seen"][:half] != one["seen"][half : 2 * half]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_within_an_epoch_resumes_there(
    tmp_path: Path, devices: int
) -> None:
    first = fit(tmp_path, "first", devices=devices)
    checkpoint = str(tmp_path / "checkpoint.ckpt")
    second = fit(tmp_path, "second", devices=devices, resume=checkpoint)
    for before, after in zip(first, second, strict=True):
        rest = before["seen"][SAVED_AT:]
        epoch = len(rest) % (STEPS // devices)  # the later ones are drawn once more
        assert after["seen"][:epoch] == rest[:epoch]
        assert len(after["seen"]) == len(rest)


LOGGED = """\
import sys, time, torch, lightning
from lightning.pytorch.loggers import CSVLogger
import penstock as ps
from penstock.integrations.lightning import verdict_logger

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, _):
        time.sleep(0.002)
        return self.layer(batch.float().unsqueeze(1)).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

ps.set_enable_autotune(True)
train_loader = ps.DataLoader(list(range(8000)), 4)
trainer = lightning.Trainer(
    max_epochs=1, logger=CSVLogger(sys.argv[1]), callbacks=[verdict_logger()],
    enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
)
trainer.fit(Model(), train_loader)
"""


@pytest.mark.timeout(120)
def test_verdicts_are_among_the_trainers_metrics(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOGGED)
    command = [sys.executable, "-P", "-W", "ignore", str(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=100)
    (metrics,) = tmp_path.rglob("metrics.csv")
    head, *rows = metrics.read_text().splitlines()
    assert "penstock/train/wait_share" in head
    assert rows
