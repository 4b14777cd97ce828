"""The same training in four frameworks, each on two ranks with penstock's loader.

    torchrun --standalone --nproc-per-node=2 examples/frameworks.py lightning
    torchrun --standalone --nproc-per-node=2 examples/frameworks.py accelerate
    torchrun --standalone --nproc-per-node=2 examples/frameworks.py transformers
    python examples/frameworks.py ray

The first three shard the data with their own sampler, which penstock's loader keeps.
Ray Train starts the ranks itself; a `Pipeline` finds its shard in the process group.
The model records its samples, to check that each epoch has every sample once.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps

SAMPLES, BATCH, EPOCHS, FEATURES = 512, 16, 3, 8
LR = 0.05


class Lines:
    """Features, and a linear function of them as the target."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        self.values = torch.randn(SAMPLES, FEATURES, generator=draws)
        self.labels = self.values @ torch.randn(FEATURES, generator=draws)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.labels[index]
        return {"values": self.values[index], "labels": labels, "index": index}


class Model(nn.Module):
    """A linear layer that records its losses and its samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, 1)
        self.samples: list[list[int]] = []
        self.losses: list[float] = []

    def forward(self, values: Any, labels: Any, index: Any) -> dict[str, Any]:
        """Return the loss, as the models of transformers do."""
        loss = nn.functional.mse_loss(self.layer(values).squeeze(-1), labels)
        self.samples.append(index.tolist())
        self.losses.append(loss.item())
        return {"loss": loss}


def lightning(model: Model) -> None:
    """Train with Lightning, which accepts the loader as it is."""
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), LR)

    quiet = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, **quiet
    )
    loader = ps.DataLoader(Lines(), BATCH, shuffle=True)
    trainer.fit(Module(), loader)
    assert isinstance(trainer.train_dataloader, ps.DataLoader)


def accelerate(model: Model) -> None:
    """Train with Accelerate; penstock's `prepare` keeps the loader."""
    from accelerate import Accelerator

    from penstock.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    loader = ps.DataLoader(Lines(), BATCH, shuffle=True)
    wrapped, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    assert isinstance(loader.base_dataloader, ps.DataLoader)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(wrapped(**batch)["loss"])
            optimizer.step()


def transformers(model: Model) -> None:
    """Train with the Trainer of transformers, with penstock's mixin before it."""
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainingArguments

    from penstock.integrations.transformers import TrainerMixin

    class OurTrainer(TrainerMixin, Trainer):
        pass

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            learning_rate=LR,
            remove_unused_columns=False,  # the model uses every column
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = OurTrainer(
            model, arguments, train_dataset=Lines(), data_collator=default_collate
        )
        loader = trainer.get_train_dataloader()
        assert isinstance(loader.base_dataloader, ps.DataLoader)
        trainer.train()


def ray() -> None:
    """Train with Ray Train, which starts two processes."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            on_ray,
            train_loop_config={"told": f"{folder}/told"},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        print(Path(folder, "told").read_text())
    ray.shutdown()


def on_ray(settings: dict[str, str]) -> None:
    """Train on one of Ray's workers."""
    from ray.train.torch import prepare_model

    model = Model()
    wrapped = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    pipe = ps.Pipeline.from_dataset(Lines()).shuffle(seed=0).batch(BATCH)
    for _ in range(EPOCHS):
        for batch in pipe:
            optimizer.zero_grad()
            wrapped(**batch)["loss"].backward()
            optimizer.step()
    summary = check(model)
    if dist.get_rank() == 0:
        Path(settings["told"]).write_text(summary)


def check(model: Model) -> str:
    """Check that the ranks saw every sample once per epoch; print the result."""
    ranks: list[Any] = [None] * dist.get_world_size()
    # A group of its own ends here. Frameworks keep the default one and its threads
    # alive; one that frees the last collective only at exit aborts the process.
    group = dist.new_group()
    dist.all_gather_object(ranks, model.samples, group)
    dist.destroy_process_group(group)
    steps = SAMPLES // (BATCH * len(ranks))
    for first in range(0, EPOCHS * steps, steps):
        batches = chain.from_iterable(rank[first : first + steps] for rank in ranks)
        ids = sorted(chain.from_iterable(batches))
        assert ids == list(range(SAMPLES)), "an epoch has each sample once"
    assert all(len(rank) == EPOCHS * steps for rank in ranks)
    return (
        f"{EPOCHS} epochs on {len(ranks)} ranks, each sample once in each\n"
        f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}"
    )


def main() -> None:
    """Parse the command line, and train."""
    ways = {way.__name__: way for way in (lightning, accelerate, transformers)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=[*ways, "ray"])
    framework = parser.parse_args().framework
    if framework == "ray":
        ray()
        return
    dist.init_process_group("gloo")  # otherwise each framework makes its own
    model = Model()
    ways[framework](model)
    summary = check(model)
    if dist.get_rank() == 0:
        print(summary, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
