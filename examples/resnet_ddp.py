"""A small ResNet, data-parallel, whose batch and image sizes follow a policy string.

    torchrun --standalone --nproc-per-node=2 examples/resnet_ddp.py --data photos/
    torchrun --standalone --nproc-per-node=2 examples/resnet_ddp.py --small

The string is "END_EPOCH:IMAGE-BATCH,...", as in ModelArts MoXing, with the batch size
of one rank. The learning rate follows the batch size and a table, and the momentum
follows a table of its own; `ps.optim.follow` sets both for each batch. Convolutions run
in bfloat16. A batch that is too large for the device is processed in parts of
`--at-once` images, whose gradients add up to those of the batch. Without `--data`,
photographs are drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it never lets it go
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

POLICY = "20:128-224,38:224-224,40:288-128"
SMALL = "4:32-16,6:64-8"
RATES = {0: 1.0, 30: 0.1}
MOMENTA = {0: 0.85, 20: 0.9, 38: 0.95}
"""The first epoch of each value. The rates are factors of `--lr`."""
SMALL_RATES = {0: 1.0, 5: 0.1}
SMALL_MOMENTA = {0: 0.85, 4: 0.9}


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's features, `[N, after, H / stride, W / stride]`."""
        return torch.relu(self.body(images) + self.around(images))


def resnet(classes: int, width: int) -> nn.Module:
    """Return a ResNet of four blocks, for images of any size."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    pairs = pairwise(widths)
    blocks = [Block(a, b, 1 if at == 0 else 2) for at, (a, b) in enumerate(pairs)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], classes),
    )


def train(options: argparse.Namespace, folder: Path) -> None:
    """Train for the whole policy."""
    schedule = ps.schedule.policy(
        options.policy,
        coupling="linear",
        lr_mult=ps.schedule.steps(options.rates),
        momentum=ps.schedule.steps(options.momenta),
    )
    pipe = (
        ps.Pipeline.from_folder(folder, schedule=schedule)
        .shuffle(seed=0)
        .map(ps.image.decode_random_resized_crop(None))  # as large as the current batch
        .batch()
    )
    samples = len(list(folder.glob("*/*")))
    first = dist.get_rank() == 0
    if first:
        print(schedule.preview(samples, world=dist.get_world_size()), flush=True)
    torch.manual_seed(0)
    classes = len([path for path in folder.iterdir() if path.is_dir()])
    model = DistributedDataParallel(resnet(classes, options.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, weight_decay=1e-4)
    ps.optim.follow(optimizer, pipe)
    rows: list[dict[str, Any]] = []
    for _ in range(options.epochs):
        for images, labels in pipe:
            optimizer.zero_grad()
            loss = learn(model, images, labels, pipe.plan, options.at_once)
            optimizer.step()
            rows.append(row(pipe.plan, optimizer, options.lr, samples, loss))
        if first:
            print(pipe.explain(), flush=True)
    if first and options.rows:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        options.rows.write_text(text)


def learn(model: Any, images: Any, labels: Any, plan: Any, at_once: int) -> float:
    """Add up the gradients of one batch, part by part; return this rank's mean loss."""
    # Rows beyond `n_local` pad an epoch's last batch, and do not count.
    counts = torch.arange(len(images)) < plan.n_local
    parts = [tensor.split(at_once) for tensor in (images, labels, counts)]
    total = 0.0
    for number, (some, classes, count) in enumerate(zip(*parts, strict=True), 1):
        is_last = number == len(parts[0])
        # The ranks exchange gradients once per batch, after its last part.
        with contextlib.nullcontext() if is_last else model.no_sync():
            pixels = some.permute(0, 3, 1, 2).float().div_(255).sub_(0.45).div_(0.25)
            with torch.autocast("cpu", torch.bfloat16):
                scores = model(pixels)
            losses = nn.functional.cross_entropy(
                scores.float(), classes, reduction="none"
            )
            loss = (losses * count).sum() / max(plan.n_local, 1)
            (loss * plan.loss_weight).backward()
        total += loss.item()
    return total


def row(plan: Any, optimizer: Any, lr: float, samples: int, loss: float) -> Any:
    """Return the settings that a batch was trained with."""
    group = optimizer.param_groups[0]
    return {
        "epoch": plan.epoch,
        "step": plan.step,
        "image_size": plan.image_size,
        "batch": plan.n_global,
        "left": samples - plan.start,
        "base_lr": lr,
        "lr": group["lr"],
        "momentum": group["momentum"],
        "loss": loss,
    }


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder of class folders")
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--at-once", type=int, default=64, help="images a forward pass")
    parser.add_argument("--rows", type=Path, help="where each batch gets a line")
    parser.add_argument("--small", action="store_true", help="seconds, not days")
    options = parser.parse_args()
    options.rates, options.momenta = RATES, MOMENTA
    if options.small:
        options.policy, options.epochs, options.width = SMALL, 6, 8
        options.rates, options.momenta = SMALL_RATES, SMALL_MOMENTA
        options.at_once, options.lr = 6, 0.02
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as workspace:
        folder = options.data
        if folder is None:
            folder = Path(workspace)
            ps.testing.draw_photos(folder, 160, classes=4)
        train(options, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
