"""A model cut into stages, trained by interleaved 1F1B on micro-batches.

    torchrun --standalone --nproc-per-node=4 examples/pipeline_parallel.py

Each rank along "pp" holds two stages of one model, and "dp" has copies of the model.
The first stage needs the inputs of a batch and the last one its labels, so all ranks
along "pp" have the same `ps.Shard`, and each reads its own copy. Ranks that need
neither read it, too, so that all have the same number of steps. The script compares
digests.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import penstock as ps

FEATURES, CLASSES, STAGES_A_RANK = 16, 4, 2


def sample(index: np.int64, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    """Return features that lean to their class, with noise drawn for this epoch."""
    label = int(index) % CLASSES
    noise = rng.standard_normal(FEATURES).astype(np.float32)
    noise[label] += 2
    return torch.from_numpy(noise), label


def build(mesh: DeviceMesh) -> tuple[nn.ModuleList, list[PipelineStage]]:
    """Return this rank's parts of the model, and the stages made of them."""
    ranks, rank = mesh.size(1), mesh.get_local_rank("pp")
    count = STAGES_A_RANK * ranks
    torch.manual_seed(0)  # each rank makes all stages, then keeps its own
    whole = [
        nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(count)
    ]
    whole[-1] = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    numbers = range(rank, count, ranks)  # interleaved: 0 and 2, 1 and 3
    group = mesh.get_group("pp")
    modules = [whole[number] for number in numbers]
    stages = [
        PipelineStage(module, number, count, torch.device("cpu"), group=group)
        for module, number in zip(modules, numbers, strict=True)
    ]
    return nn.ModuleList(modules), stages


def digest(parts: list[Any]) -> torch.Tensor:
    """Return a digest of 63 bits of a batch's bytes."""
    hasher = xxhash.xxh3_64()
    for values, labels in parts:
        hasher.update(values.numpy().tobytes())
        hasher.update(labels.numpy().tobytes())
    return torch.tensor([hasher.intdigest() >> 1])


def along(mesh: DeviceMesh, name: str, value: torch.Tensor) -> list[int]:
    """Return the values of all ranks along a dimension of the mesh."""
    group = mesh.get_group(name)
    rank_values = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rank_values, value, group=group)
    return [int(number) for number in rank_values]


def train(options: argparse.Namespace) -> None:
    """Train, and check that the ranks got the right batches."""
    shape = (dist.get_world_size() // options.pp, options.pp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    pipe = (
        ps.Pipeline.from_dataset(
            np.arange(options.samples), shard=ps.Shard.from_device_mesh(mesh, "dp")
        )
        .shuffle(seed=0)
        .map(sample)
        .batch(
            global_size=options.batch, microbatches=options.microbatches, drop_last=True
        )
    )
    modules, stages = build(mesh)
    schedule = ScheduleInterleaved1F1B(
        stages, options.microbatches, loss_fn=nn.functional.cross_entropy
    )
    optimizer = torch.optim.AdamW(modules.parameters(), lr=options.lr)
    is_last = any(stage.is_last for stage in stages)
    means: list[float] = []
    for _ in range(options.epochs):
        for parts in pipe:
            mine = digest(parts)
            assert len({*along(mesh, "pp", mine)}) == 1, "ranks of one model differ"
            assert len({*along(mesh, "dp", mine)}) == shape[0], "shards are the same"
            losses: list[torch.Tensor] = []
            optimizer.zero_grad()
            run(schedule, stages, parts, losses)
            average(modules, mesh)
            optimizer.step()
            if is_last:
                means.append(torch.stack(losses).mean().item())
    if is_last and mesh.get_local_rank("dp") == 0:
        print(f"{len(means)} steps on {shape} ranks, the same bytes along pp in each")
        print(f"loss {means[0]:.3f} -> {means[-1]:.3f}")


def run(schedule: Any, stages: Any, parts: list[Any], losses: list[Any]) -> None:
    """Run one batch forwards and backwards through the stages of all ranks."""
    inputs = torch.cat([values for values, _ in parts])
    targets = torch.cat([labels for _, labels in parts])
    arguments = (inputs,) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        schedule.step(*arguments, target=targets, losses=losses)
    else:
        schedule.step(*arguments)


def average(modules: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients over "dp", whose batches have equal sizes."""
    for parameter in modules.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh.size(0)


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=2, help="ranks that share a model")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="samples over all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
