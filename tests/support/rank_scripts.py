"""The work of one rank of a process group in tests, as a script."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.pipeline.image import codec
from support.functions import sized


def uneven() -> dict[str, Any]:
    """An epoch of uneven data, in which samples fail, on found shards."""
    schedule = ps.schedule.policy("1:4-5,2:8-3")
    pipe = (
        ps.Pipeline.from_dataset(range(103), schedule=schedule)
        .shuffle(seed=1)
        .map(fails_at_times)
        .map(sized)
        .batch(on_error="substitute", error_budget=0.2)
    )
    steps, substituted, weights = 0, 0, 0.0
    for _ in range(2):
        for _ in pipe:
            assert pipe.plan is not None
            dist.barrier()  # as a training step does: who is alone here hangs
            steps += 1
            substituted += len(pipe.plan.substituted)
            weights += pipe.plan.loss_weight
    return {"steps": steps, "substituted": substituted, "weights": weights}


def fails_at_times(sample: int) -> int:
    if sample % 20 == 3:
        raise ValueError(f"sample {sample} is damaged")
    return sample


def differing() -> dict[str, Any]:
    """Ranks that are about to load different things."""
    pipe = ps.Pipeline.from_dataset(range(100 + dist.get_rank())).batch(4)
    try:
        next(iter(pipe))
    except ps.PenstockError as error:
        return {"error": str(error)}
    return {"error": None}


def resuming() -> dict[str, Any]:
    """Ranks of which one goes on from a state, and the others begin."""
    alone = ps.Pipeline.from_dataset(range(120), shard=ps.Shard.single())
    alone = alone.batch(global_size=12)
    next(iter(alone))
    pipe = ps.Pipeline.from_dataset(range(120)).batch(global_size=12)
    if dist.get_rank() == 1:
        pipe.load_state_dict(alone.state_dict())
    state = pipe.state_dict()
    try:
        iter(pipe)
    except ps.PenstockError as error:
        return {"error": str(error), "kept": pipe.state_dict() == state}
    return {"error": None}


def decoding() -> dict[str, Any]:
    """Ranks that decode the same photographs by different decoders."""
    extension = SimpleNamespace(VERSION=f"libjpeg-turbo 2.{dist.get_rank()}")
    codec.crop_extension = lambda: (extension, "")
    operator = ps.image.decode_only_random_resized_crop(8)
    pipe = ps.Pipeline.from_dataset([b""] * 8).map(operator).batch(4)
    try:
        next(iter(pipe))
    except ps.PenstockError as error:
        return {"error": str(error)}
    return {"error": None}


def mesh() -> dict[str, Any]:
    """A mesh of data, pipeline and tensor parallel ranks; a digest of their batches."""
    device_mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    shard = ps.Shard.from_device_mesh(device_mesh, "dp")
    pipe = ps.Pipeline.from_dataset(range(40), shard=shard).shuffle(seed=2).batch(4)
    digest = hashlib.sha256()
    for batch in pipe:
        digest.update(batch.numpy().tobytes())
    return {"shard": [shard.rank, shard.size], "digest": digest.hexdigest()}


def main() -> None:
    dist.init_process_group("gloo")
    tasks = {
        task.__name__: task for task in (uneven, differing, resuming, decoding, mesh)
    }
    results = {name: tasks[name]() for name in sys.argv[1].split(",")}
    path = os.path.join(sys.argv[2], f"{dist.get_rank()}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
