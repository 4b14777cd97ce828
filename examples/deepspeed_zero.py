"""DeepSpeed: ZeRO, offload, recomputed activations, accumulated gradients.

    torchrun --standalone --nproc-per-node=2 examples/deepspeed_zero.py

DeepSpeed's ranks are data-parallel: each reads its own shard. Its engine takes
micro-batches, and makes a step after every `gradient_accumulation_steps` of them. With
`microbatches=`, one batch of the pipeline is one step of the optimiser, so schedules
and states count the same steps as DeepSpeed. Without a GPU, set `DS_ACCELERATOR=cpu`;
the first run then spends about a minute compiling an operator.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it never lets it go
from torch import nn

import penstock as ps

try:
    import deepspeed
except ImportError as error:
    sys.exit(f"this example needs DeepSpeed: pip install deepspeed ({error})")

FEATURES, HIDDEN, CLASSES = 16, 64, 4


def sample(index: np.int64, rng: np.random.Generator) -> tuple[torch.Tensor, int, int]:
    """Return features that lean to their class, with noise drawn for this epoch."""
    label = int(index) % CLASSES
    noise = rng.standard_normal(FEATURES).astype(np.float32)
    noise[label] += 2
    return torch.from_numpy(noise), label, int(index)


class Model(nn.Module):
    """Layers that recompute their activations instead of keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()) for _ in range(2)
        )
        self.scores = nn.Linear(HIDDEN, CLASSES)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a micro-batch."""
        hidden = self.before(values)
        for block in self.blocks:
            hidden = hidden + deepspeed.checkpointing.checkpoint(block, hidden)
        return nn.functional.cross_entropy(self.scores(hidden), labels)


def settings(options: argparse.Namespace, world: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with the batch size of the pipeline."""
    parts = options.microbatches
    return {
        "train_batch_size": options.batch,
        "train_micro_batch_size_per_gpu": options.batch // (parts * world),
        "gradient_accumulation_steps": parts,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": options.lr, "torch_adam": True},
        },
        "zero_optimization": {
            "stage": options.stage,
            "offload_optimizer": {"device": "cpu"},
        },
        "zero_force_ds_cpu_optimizer": False,  # otherwise its AdamW is compiled first
    }


def train(options: argparse.Namespace) -> None:
    """Train, and check that the steps agree."""
    world = dist.get_world_size()
    pipe = (
        ps.Pipeline.from_dataset(np.arange(options.samples))
        .shuffle(seed=0)
        .map(sample)
        .batch(
            global_size=options.batch, microbatches=options.microbatches, drop_last=True
        )
    )
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=settings(options, world),
    )
    deepspeed.checkpointing.configure(None, partition_activations=False)
    losses = []
    for _ in range(options.epochs):
        own_ids: list[int] = []
        for parts in pipe:
            means = []
            for values, labels, indices in parts:
                loss = engine(values, labels)
                engine.backward(loss)
                engine.step()  # of the optimiser, after the last part
                means.append(loss.item())
                own_ids += indices.tolist()
            assert engine.global_steps == pipe.plan.step + 1, "a batch is a step"
            losses.append(sum(means) / len(means))
        rank_ids: list[Any] = [None] * world
        # A group of its own ends here. DeepSpeed keeps the default one and its threads
        # alive; one that frees the last collective only at exit aborts the process.
        group = dist.new_group()
        dist.all_gather_object(rank_ids, own_ids, group)
        dist.destroy_process_group(group)
        ids = [sample_id for rank in rank_ids for sample_id in rank]
        assert len({*ids}) == len(ids) == len(pipe) * options.batch, "each sample once"
    if dist.get_rank() == 0:
        print(f"ZeRO {options.stage}: {engine.global_steps} steps on {world} ranks")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO: 1, 2 or 3")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="samples over all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
