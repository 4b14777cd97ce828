"""Lightning's Trainer: on one device, on two ranks, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.framework_data import STEPS, whole

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "lightning_run.py"
SAVED_AT = STEPS // 2 + 3


def fit(folder: Path, **runs: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Train by name in a process of its own; return what each rank reports."""
    plain = {
        "devices": 1,
        "use_distributed_sampler": True,
        "load_s": 0.0,
        "step_s": 0.0,
    }
    jobs = [{**plain, "name": name, **settings} for name, settings in runs.items()]
    tests = str(SCRIPT.parents[1])
    subprocess.run(
        [sys.executable, "-P", "-W", "ignore", SCRIPT, folder, json.dumps(jobs)],
        check=True,
        env={**os.environ, "PYTHONPATH": tests},
        timeout=600,  # it loads Lightning, maybe beside other tests
    )
    return {run["name"]: list(reports(folder, run)) for run in jobs}


def reports(folder: Path, run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what each rank of a run reports."""
    for rank in range(run["devices"]):
        yield json.loads((folder / f"{run['name']}{rank}.json").read_text())


def test_the_framework_trains_and_the_verdict_is_true(tmp_path: Path) -> None:
    runs = fit(tmp_path, loading={"load_s": 0.005}, computing={"step_s": 0.05})
    for (run,) in runs.values():
        assert run["ours"]
        assert len(run["seen"]) == 3 * STEPS
        assert all(whole(run["seen"][n : n + STEPS]) for n in (0, STEPS, 2 * STEPS))
    assert runs["loading"][0]["verdict"] == "input-bound"
    assert runs["computing"][0]["verdict"] == "not input-bound"


def ranks_share_epochs(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Assert that two ranks have seen each sample of each epoch once."""
    assert one["ours"]
    assert one["sampler"] == two["sampler"] == "DistributedSampler"
    half = STEPS // 2
    for first in (0, half, 2 * half):
        mine, others = (rank["seen"][first : first + half] for rank in (one, two))
        assert whole(mine + others)
    assert one["seen"][:half] != one["seen"][half : 2 * half]


def test_two_ranks_share_an_epoch_by_a_sampler_of_their_own(tmp_path: Path) -> None:
    runs = fit(tmp_path, run={"devices": 2, "use_distributed_sampler": False})
    ranks_share_epochs(*runs["run"])


def resumes(first: dict[str, Any], second: dict[str, Any], steps: int) -> None:
    """Assert that a second run has seen what was left of the first one's epoch."""
    rest = first["seen"][SAVED_AT:]
    epoch = len(rest) % steps  # the later ones are drawn once more
    assert second["seen"][:epoch] == rest[:epoch]
    assert len(second["seen"]) == len(rest)


def test_a_checkpoint_within_an_epoch_resumes_there(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint.ckpt")
    runs = fit(tmp_path, first={}, second={"resume": checkpoint})
    resumes(*runs["first"], *runs["second"], STEPS)


def test_two_ranks_share_an_epoch_and_resume_within_it(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint.ckpt")
    first = fit(tmp_path, first={"devices": 2})["first"]
    ranks_share_epochs(*first)
    second = fit(tmp_path, second={"devices": 2, "resume": checkpoint})["second"]
    for before, after in zip(first, second, strict=True):
        resumes(before, after, STEPS // 2)


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


FAILING = LOGGED.replace("time.sleep(0.002)", "raise ValueError").replace(
    "trainer.fit(Model(), train_loader)",
    """\
from penstock.autotune import log
try:
    trainer.fit(Model(), train_loader)
except ValueError:
    assert log._listeners == []
else:
    raise AssertionError
""",
)


def test_a_fit_that_fails_listens_no_longer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    command = [sys.executable, "-P", "-W", "ignore", str(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)


def test_verdicts_are_among_the_trainers_metrics(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOGGED)
    command = [sys.executable, "-P", "-W", "ignore", str(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=600)
    (metrics,) = tmp_path.rglob("metrics.csv")
    head, *rows = metrics.read_text().splitlines()
    assert "penstock/train/wait_share" in head
    assert rows
