"""A model on a 2-D mesh: FSDP2 over one dimension, tensor parallelism over the other.

    torchrun --standalone --nproc-per-node=4 examples/hybrid_parallel.py

Batches are divided over "dp". Ranks along "tp" hold parts of the same layers and
compute one forward pass together, so all of them need the same bytes. They have the
same `ps.Shard`, and each reads its own copy. The script compares digests.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it never lets it go
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import penstock as ps

FEATURES, HIDDEN, CLASSES = 16, 64, 4


def sample(index: np.int64, rng: np.random.Generator) -> tuple[torch.Tensor, int, int]:
    """Return features that lean to their class, with noise drawn for this epoch."""
    label = int(index) % CLASSES
    noise = rng.standard_normal(FEATURES).astype(np.float32)
    noise[label] += 2
    return torch.from_numpy(noise), label, int(index)


class Block(nn.Module):
    """Two layers, split over "tp" by columns and then by rows, and a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[N, FEATURES]`."""
        return values + self.down(torch.relu(self.up(values)))


def build(mesh: DeviceMesh) -> nn.Module:
    """Return the model, sharded over the mesh."""
    torch.manual_seed(0)  # each rank makes all of it, then keeps its part
    model = nn.Sequential(Block(), Block(), nn.Linear(FEATURES, CLASSES))
    for block in model[:2]:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def digest(batch: Any) -> torch.Tensor:
    """Return a digest of 63 bits of a batch's bytes."""
    hasher = xxhash.xxh3_64()
    for tensor in batch:
        hasher.update(tensor.numpy().tobytes())
    return torch.tensor([hasher.intdigest() >> 1])


def along(mesh: DeviceMesh, name: str, value: torch.Tensor) -> list[int]:
    """Return the values of all ranks along a dimension of the mesh."""
    group = mesh.get_group(name)
    rank_values = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rank_values, value, group=group)
    return [int(number) for number in rank_values]


def train(options: argparse.Namespace) -> None:
    """Train, and check that the ranks got the right batches."""
    tensor_parallel = options.tp
    shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    pipe = (
        ps.Pipeline.from_dataset(
            np.arange(options.samples), shard=ps.Shard.from_device_mesh(mesh, "dp")
        )
        .shuffle(seed=0)
        .map(sample)
        .batch(global_size=options.batch)
    )
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses, steps = [], 0
    for _ in range(options.epochs):
        ids: list[int] = []
        for values, labels, indices in pipe:
            plan = pipe.plan
            mine = digest((values, labels, indices))
            assert len({*along(mesh, "tp", mine)}) == 1, "ranks of one model differ"
            assert len({*along(mesh, "dp", mine)}) == shape[0], "shards are the same"
            scores = model(values)[: plan.n_local]
            row_losses = nn.functional.cross_entropy(
                scores, labels[: plan.n_local], reduction="none"
            )
            loss = row_losses.sum() / max(plan.n_local, 1)
            optimizer.zero_grad()
            (loss * plan.loss_weight).backward()
            optimizer.step()
            losses.append(loss.item())
            steps += 1
            padded_ids = torch.full((plan.n_rows,), -1)
            padded_ids[: plan.n_local] = indices[: plan.n_local]
            ids += [int(i) for i in gathered(mesh, padded_ids) if i >= 0]
        assert sorted(ids) == list(range(options.samples)), "an epoch has each once"
    if dist.get_rank() == 0:
        print(f"{steps} steps on {shape} ranks, the same bytes along tp in each")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def gathered(mesh: DeviceMesh, values: torch.Tensor) -> torch.Tensor:
    """Return the values of all data-parallel ranks, one after another."""
    group = mesh.get_group("dp")
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group=group)
    return torch.cat(parts)


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share layers")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32, help="samples over all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
