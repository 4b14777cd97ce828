"""Training that may lose some or all of its ranks, and continues on any number.

    torchrun --standalone --nproc-per-node=4 --max-restarts=3 examples/elastic_resume.py
    torchrun --standalone --nproc-per-node=2 examples/elastic_resume.py  # continues

Checkpoints are kept in `--folder`, by default a temporary folder from which the next
run continues. A checkpoint holds the model, the optimiser and the pipeline's state.
That state is the same on every rank and fits any number of ranks: the global batches
that follow are the same, divided among the ranks that are there. The samples of each
step are written to `steps.jsonl`, so you can check that every sample of an epoch
appears exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it never lets it go
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

GLOBAL_BATCH = 24
EVERY = 5
"""Steps from one checkpoint to the next."""


def sample(index: np.int64, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    """Return a sample with noise of its own."""
    noise = torch.from_numpy(rng.standard_normal(8).astype(np.float32))
    return noise + float(index) / 1000, int(index)


def pipeline(samples: int) -> ps.Pipeline:
    """Describe the global batches; the shard is found in the process group."""
    return (
        ps.Pipeline.from_dataset(np.arange(samples))
        .shuffle(seed=0)
        .map(sample)
        .batch(global_size=GLOBAL_BATCH)
    )


def save(path: Path, parts: dict[str, Any]) -> None:
    """Write a checkpoint completely or not at all."""
    new = path.with_suffix(".new")
    torch.save(parts, new)
    os.replace(new, path)


def gathered(ids: torch.Tensor) -> list[int]:
    """Return the ids of all ranks, in rank order."""
    padded_ids = torch.full((GLOBAL_BATCH,), -1)
    padded_ids[: len(ids)] = ids
    parts = [torch.empty_like(padded_ids) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded_ids)
    return [int(i) for part in parts for i in part if i >= 0]


class Steps:
    """The samples of each finished step, one line per step. Rank 0 writes it."""

    def __init__(self, path: Path, step: int) -> None:
        """Keep the lines before `step`; later steps will be repeated."""
        lines = path.read_text().splitlines() if path.exists() else []
        earlier_lines = [line for line in lines if json.loads(line)["step"] < step]
        new = path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in earlier_lines))
        os.replace(new, path)
        self._path = path

    def add(self, step: int, ids: list[int]) -> None:
        """Append a step."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "ids": ids}) + "\n")


def train(folder: Path, samples: int, epochs: int, step_s: float) -> None:
    """Train, starting at the last checkpoint in `folder` if there is one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pipe = pipeline(samples)
    path, step = folder / "checkpoint.pt", 0
    if path.exists():
        parts = torch.load(path, weights_only=True)
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        pipe.load_state_dict(parts["pipe"])
        step = parts["step"]
    first = dist.get_rank() == 0
    steps = Steps(folder / "steps.jsonl", step) if first else None
    if first:
        print(f"from step {step} on {dist.get_world_size()} ranks", flush=True)
    total = epochs * len(pipe)
    while step < total:
        for values, indices in pipe:
            plan = pipe.plan
            assert plan is not None
            # Rows beyond `n_local` pad an epoch's last batch. With these weights, the
            # mean over the ranks is the mean over the global batch.
            losses = model(values).square()[: plan.n_local]
            loss = losses.sum() / max(plan.n_local, 1)
            optimizer.zero_grad()
            (loss * plan.loss_weight).backward()
            optimizer.step()
            time.sleep(step_s)
            ids = gathered(indices[: plan.n_local])
            step = plan.step + 1
            if steps is not None:
                steps.add(plan.step, ids)
            if step % EVERY == 0 and first:
                parts = {"model": model.state_dict(), "pipe": pipe.state_dict()}
                parts |= {"optimizer": optimizer.state_dict(), "step": step}
                save(path, parts)
    if first:
        print(f"{step} steps, {epochs} epochs of {samples} samples", flush=True)


def join() -> None:
    """Make the process group.

    torchrun keeps its store when it restarts ranks, and gloo would find the addresses
    of dead ranks in it. So each attempt uses a prefix of its own.
    """
    store, rank, world = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def temporary() -> Path:
    """Return a folder that all ranks of all attempts agree on."""
    return Path(tempfile.gettempdir()) / f"penstock_elastic_{os.getuid()}"


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=temporary())
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.05)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    join()
    train(options.folder, options.samples, options.epochs, options.step_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
