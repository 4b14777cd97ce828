"""LeNet with a parameter server: a scheduler, a server, and asynchronous workers.

    torchrun --standalone --nproc-per-node=5 examples/parameter_server.py

Rank 0 is the scheduler, which assigns shards and checks that each epoch was complete.
Rank 1 is the server, which holds the weights. The others are workers. A worker reads
its own shard, pushes gradients, gets weights back, and never waits for another worker.
Here some are slower than others. There is no process group, because ranks do not run in
step.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import rpc
from torch.nn import functional

import penstock as ps

CLASSES, SIDE = 10, 28
Tensors = list[torch.Tensor]


class Digits:
    """Noisy drawings of ten classes, of MNIST's size: `(image, label, index)`."""

    def __init__(self, count: int) -> None:
        self.count = count
        coarse = np.random.default_rng(0).random((CLASSES, 4, 4)) > 0.5
        self.shapes = 2 * np.kron(coarse, np.ones((1, SIDE // 4, SIDE // 4)))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        label = index % CLASSES
        noise = np.random.default_rng(index).normal(scale=0.5, size=(SIDE, SIDE))
        image = (self.shapes[label] + noise).astype(np.float32)
        return torch.from_numpy(image)[None], label, index


def lenet() -> nn.Module:
    """Return LeNet-5 (LeCun et al. 1998), with ReLU and max-pooling."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, CLASSES),
    )


class Scheduler:
    """Assigns shards, and keeps a record of the work of each worker."""

    def __init__(self, samples: int, workers: int) -> None:
        self.samples, self.workers = samples, workers
        self.lock = threading.Lock()  # each worker's call runs in a thread of its own
        self.dealt = 0
        self.done: dict[int, list[int]] = {}
        self.steps: list[int] = []
        self.apart = 0

    def register(self) -> ps.Shard:
        """Return a shard that no other worker has."""
        with self.lock:
            self.dealt += 1
            self.steps.append(0)
            return ps.Shard(self.dealt - 1, self.workers)

    def report(self, worker: int, epoch: int, indices: list[int]) -> None:
        """Record the samples of a finished step."""
        with self.lock:
            self.done.setdefault(epoch, []).extend(indices)
            self.steps[worker] += 1
            self.apart = max(self.apart, max(self.steps) - min(self.steps))

    def check(self, epochs: int) -> None:
        """Check that each epoch had every sample once; return a summary."""
        for epoch in range(epochs):
            assert sorted(self.done[epoch]) == list(range(self.samples)), epoch
        print(
            f"{epochs} epochs by {self.workers} workers, each sample once in each;"
            f" {self.steps} steps, at most {self.apart} apart"
        )


class Server:
    """Holds the weights. Each push is a step of its own; nothing is averaged."""

    def __init__(self, lr: float) -> None:
        self.weights = list(lenet().parameters())
        self.optimizer = torch.optim.Adam(self.weights, lr=lr)
        self.lock = threading.Lock()

    def push(self, gradients: Tensors) -> Tensors:
        """Apply one worker's gradients; return the weights after this step."""
        with self.lock:
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            self.optimizer.step()
            return [weight.detach().clone() for weight in self.weights]


NODES: dict[str, Any] = {}
"""The object that this process serves, if it is the scheduler or the server."""


def serve(node: str, method: str, *values: Any) -> Any:
    """Call a method of the object that this process serves, for another process."""
    while node not in NODES:  # this process has joined, but has not made it yet
        time.sleep(0.01)
    return getattr(NODES[node], method)(*values)


def ask(node: str, method: str, *values: Any) -> Any:
    """Call a method of the scheduler or the server, and return its result."""
    return rpc.rpc_sync(node, serve, args=(node, method, *values))


def work(options: argparse.Namespace) -> None:
    """Train on one shard, epoch by epoch."""
    shard = ask("scheduler", "register")
    pipe = (
        ps.Pipeline.from_dataset(Digits(options.samples), shard=shard)
        .shuffle(seed=0)
        .batch(options.batch)
    )
    model, losses = lenet(), []
    weights = list(model.parameters())
    for epoch in range(options.epochs):
        for images, labels, indices in pipe:
            time.sleep(shard.rank * options.slower_s)  # as if machines differed
            count = pipe.plan.n_local  # rows after these pad the last batch
            if not count:
                continue
            loss = functional.cross_entropy(model(images[:count]), labels[:count])
            fresh = ask("server", "push", list(torch.autograd.grad(loss, weights)))
            with torch.no_grad():
                for weight, value in zip(weights, fresh, strict=True):
                    weight.copy_(value)
            ask("scheduler", "report", shard.rank, epoch, indices[:count].tolist())
            losses.append(loss.item())
    if shard.rank == 0:
        last = sum(losses[-5:]) / 5
        print(f"loss {losses[0]:.3f} -> {last:.3f}", flush=True)


def main() -> None:
    """Parse the command line, and run the role of this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="samples of a worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--slower-s", type=float, default=0.02)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = {0: "scheduler", 1: "server"}.get(rank, f"worker{rank - 2}")
    rpc.init_rpc(name, rank=rank, world_size=world)
    if name == "scheduler":
        NODES[name] = Scheduler(options.samples, world - 2)
    elif name == "server":
        NODES[name] = Server(options.lr)
    else:
        work(options)
    rpc.shutdown()  # waits until all ranks are done
    if name == "scheduler":
        NODES[name].check(options.epochs)


if __name__ == "__main__":
    main()
