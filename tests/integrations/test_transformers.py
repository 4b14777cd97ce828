"""The Trainer of transformers with penstock's loader inside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from support.framework_data import STEPS, Slow, verdict, whole

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class SlowNamed(Slow):
    """Samples of the kind that a Trainer takes."""

    def __getitem__(self, index: int) -> Any:
        values, number = super().__getitem__(index)
        return {"values": values, "number": number}


class Model(torch.nn.Module):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.step_s = step_s
        self.seen: list[list[int]] = []

    def forward(self, values: torch.Tensor, number: torch.Tensor) -> Any:
        time.sleep(self.step_s)
        self.seen.append(number.tolist())
        return {"loss": self.linear(values).square().mean()}


def trainer(
    folder: Path, load_s: float = 0.0, step_s: float = 0.0, **settings: Any
) -> Any:
    from penstock.integrations.transformers import TrainerMixin

    class Mine(TrainerMixin, transformers.Trainer):  # type: ignore[misc,name-defined]
        pass

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **{"num_train_epochs": 3, "save_strategy": "no", "logging_strategy": "no"}
        | settings,
    )
    return Mine(Model(step_s), arguments, train_dataset=SlowNamed(load_s))


def test_the_trainer_works_with_our_loader_and_the_verdict_is_true(
    tmp_path: Path,
) -> None:
    for load_s, step_s in ((0.005, 0.0), (0.0, 0.05)):
        training = trainer(tmp_path, load_s, step_s)
        training.train()
        assert len(training.model.seen) == 3 * STEPS
        assert all(
            whole(training.model.seen[n : n + STEPS]) for n in (0, STEPS, 2 * STEPS)
        )
        inner = training.callback_handler.train_dataloader.base_dataloader
        assert type(inner) is DataLoader
        verdict(inner, loading=load_s > 0)


def test_the_trainer_resumes_within_an_epoch(tmp_path: Path) -> None:
    first = trainer(tmp_path, save_strategy="steps", save_steps=STEPS + 7, seed=3)
    first.train()
    second = trainer(tmp_path, seed=3)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS + 7}"))
    assert second.model.seen == first.model.seen[STEPS + 7 :]
    assert len(second.model.seen) == 2 * STEPS - 7


def test_verdicts_are_logged_beside_metrics_and_are_none(tmp_path: Path) -> None:
    training = trainer(tmp_path)
    training.train()
    metrics = training.evaluate(SlowNamed(0.0))
    assert "epoch" in metrics  # which the Trainer adds when it logs them
    assert [name for name in metrics if name.startswith("penstock/")] == []
    logged = training.state.log_history[-1]
    assert [name for name in logged if name.endswith("/wait_share")]


def test_verdicts_are_logged_beside_the_loss(tmp_path: Path) -> None:
    training = trainer(tmp_path, logging_strategy="steps", logging_steps=STEPS)
    training.train()
    waits = [
        value
        for row in training.state.log_history
        for name, value in row.items()
        if name.startswith("penstock/") and name.endswith("/wait_share")
    ]
    assert waits
    assert all(0 <= wait <= 1 for wait in waits)
