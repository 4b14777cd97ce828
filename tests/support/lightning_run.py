"""Trainings with Lightning, to be run as a script: on one device, or one on two."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.utils.data as torchs

import penstock as ps
from penstock import DataLoader
from support.framework_data import BATCH, STEPS, Slow

SAVED_AT = STEPS // 2 + 3


class Model(lightning.LightningModule):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.step_s = step_s
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        time.sleep(self.step_s)
        self.seen.append(batch[1].tolist())
        return self.linear(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Saves(lightning.Callback):
    """Writes a checkpoint in the middle of an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:  # on all ranks, or they wait forever
            trainer.save_checkpoint(self.path)


def train(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    devices, inject = settings["devices"], settings["use_distributed_sampler"]
    lightning.seed_everything(3, workers=True, verbose=False)
    data = Slow(settings["load_s"])
    sampler = None
    resume = settings.get("resume")
    callbacks = [] if resume else [Saves(folder / "checkpoint.ckpt")]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=3,
        use_distributed_sampler=inject,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    if not inject:
        sampler = torchs.DistributedSampler(
            data, num_replicas=devices, rank=trainer.global_rank, seed=3
        )
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler)
    model = Model(settings["step_s"])
    trainer.fit(model, loader, ckpt_path=resume)
    train_loader: Any = trainer.train_dataloader
    return {
        "rank": trainer.global_rank,
        "seen": model.seen,
        "type": type(train_loader).__name__,
        "sampler": type(train_loader.sampler).__name__,
        "ours": isinstance(train_loader, DataLoader),
        "verdict": train_loader.explain().verdict,
    }


def main() -> None:
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    ps.set_enable_autotune(True)
    for settings in runs:
        report = train(folder, settings)
        path = folder / f"{settings['name']}{report['rank']}.json"
        path.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
