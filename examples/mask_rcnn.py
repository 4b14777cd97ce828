"""A two-stage detector with masks, modelled on Mask R-CNN, on drawn scenes.

    torchrun --standalone --nproc-per-node=2 examples/mask_rcnn.py

Images differ in size. They are resized by their shorter side and flipped, and boxes and
masks move with them. A batch has images of about the same aspect, so it has little
padding. Targets stay lists, because images differ in their number of boxes. For COCO,
use torchvision's `CocoDetection` as the dataset, wrapped by its
`wrap_dataset_for_transforms_v2` with boxes, labels and masks among the `target_keys`,
so that targets are dicts, and its `maskrcnn_resnet50_fpn` as the model.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it never lets it go
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

CLASSES, STRIDE, WIDTH, POOLED = 3, 8, 32, 7
DIVISOR = 16


class Scenes:
    """Rectangles on noise, in the color of their class: samples `(image, target)`."""

    def __init__(self, count: int) -> None:
        self.sizes = np.random.default_rng(0).integers(48, 120, (count, 2))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        rng = np.random.default_rng(index)
        size = self.sizes[index]
        image = rng.integers(0, 60, (*size, 3), np.uint8)
        labels = rng.integers(CLASSES, size=int(rng.integers(1, 3)))
        masks = np.zeros((len(labels), *size), np.uint8)
        boxes = []
        for mask, label in zip(masks, labels, strict=True):
            top, left = rng.integers(size // 2)
            tall, wide = rng.integers(size // 4, size // 2)
            down, right = top + tall, left + wide
            image[top:down, left:right, label] = 220
            mask[top:down, left:right] = 1
            boxes.append((left, top, right, down))
        target = {
            "boxes": np.array(boxes, np.float32),
            "labels": labels,
            "masks": masks,
        }
        return image, {**target, "image_id": index}


class Detector(nn.Module):
    """Proposes boxes from a grid of cells, then classifies and outlines the objects."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (3, WIDTH, WIDTH):
            layers += [nn.Conv2d(before, WIDTH, 3, 2, 1), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.proposals = nn.Conv2d(WIDTH, 5, 1)  # a box's score and four edges
        self.classes = nn.Linear(WIDTH * POOLED**2, CLASSES + 1)  # and the background
        self.masks = nn.ConvTranspose2d(WIDTH, CLASSES, 2, 2)

    def forward(self, images: torch.Tensor, targets: list[Any]) -> torch.Tensor:
        """Return the loss of each image."""
        features = self.backbone(images.float() / 255)
        rows = zip(features, self.proposals(features), targets, strict=True)
        return torch.stack([self.loss(*row) for row in rows])

    def loss(self, features: Any, proposed: Any, target: Any) -> torch.Tensor:
        """Return the loss of one image: proposals, edges, classes and masks."""
        boxes, labels = map(torch.as_tensor, (target["boxes"], target["labels"]))
        # First stage: a cell is responsible for each box whose center lies in it.
        cells = torch.cartesian_prod(*map(torch.arange, proposed.shape[1:])).flip(1)
        middles = STRIDE * (cells + 0.5).repeat(1, 2)
        ahead = (boxes - middles[:, None]) * torch.tensor([-1, -1, 1, 1])
        inside, owner = (ahead > 0).all(2).max(1)
        scores, edges = proposed[0].flatten(), STRIDE * proposed[1:].flatten(1).T
        targets = ahead[torch.arange(len(cells)), owner]
        score_loss = functional.binary_cross_entropy_with_logits(scores, inside.float())
        apart = functional.l1_loss(edges[inside], targets[inside], reduction="sum")
        # Second stage: on the true boxes and as many proposals, labelled by overlap.
        best = scores.topk(len(boxes)).indices
        guesses = middles[best] + edges[best].detach() * torch.tensor([-1, -1, 1, 1])
        regions = [pooled(features, box / STRIDE, POOLED) for box in guesses]
        true = [pooled(features, box / STRIDE, POOLED) for box in boxes]
        names = torch.cat(
            [labels, torch.where(inside[best], labels[owner[best]], CLASSES)]
        )
        logits = self.classes(torch.stack(true + regions).flatten(1))
        shapes = self.masks(torch.stack(true))[torch.arange(len(boxes)), labels]
        masks = torch.as_tensor(target["masks"])[:, None].float()
        outlines = [
            pooled(*pair, 2 * POOLED) for pair in zip(masks, boxes, strict=True)
        ]
        return (
            score_loss
            + apart / (STRIDE * 4 * max(int(inside.sum()), 1))
            + functional.cross_entropy(logits, names)
            + functional.binary_cross_entropy_with_logits(shapes, torch.cat(outlines))
        )


def pooled(features: torch.Tensor, box: torch.Tensor, size: int) -> torch.Tensor:
    """Return the features inside a box, `[C, size, size]`: at least one cell."""
    tall, wide = features.shape[1:]
    left, top, right, down = box.round().int().tolist()
    left, top = min(max(left, 0), wide - 1), min(max(top, 0), tall - 1)
    part = features[:, top : max(down, top + 1), left : max(right, left + 1)]
    return functional.adaptive_avg_pool2d(part, size)


def check(targets: list[Any], sizes: torch.Tensor) -> None:
    """Check that each box still frames its mask, and lies within the image."""
    for target, (height, width) in zip(targets, sizes.tolist(), strict=True):
        masks = np.asarray(target["masks"])
        assert masks.shape[1:] == (height, width), "a mask is as large as its image"
        for mask, box in zip(masks, np.asarray(target["boxes"]), strict=True):
            rows, columns = np.nonzero(mask)
            frame = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            assert np.abs(frame - box).max() <= 1.5, f"{box} does not frame {frame}"


def train(options: argparse.Namespace) -> None:
    """Train, and check the images, boxes and masks."""
    scenes = Scenes(options.images)
    pipe = (
        ps.Pipeline.from_dataset(scenes)
        .shuffle(seed=0)
        .map(ps.detection.resize((48, 64), max_size=112))  # one of these is drawn
        .map(ps.detection.flip())
        .batch(
            global_size=options.batch,
            lengths=ps.detection.aspect_groups(scenes.sizes),
            collate_fn=ps.detection.collate(size_divisor=DIVISOR),
        )
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    means, pixels, areas = [], 0, 0
    for _ in range(options.epochs):
        image_ids, total = [], 0.0
        for images, targets, sizes in pipe:
            plan = pipe.plan
            check(targets, sizes)
            # Rows beyond `n_local` pad an epoch's last batch, and do not count.
            losses = model(images, targets)[: plan.n_local]
            loss = losses.sum() / max(plan.n_local, 1)
            optimizer.zero_grad()
            (loss * plan.loss_weight).backward()
            optimizer.step()
            total += float(losses.detach().sum())
            image_ids += [int(target["image_id"]) for target in targets[: plan.n_local]]
            pixels += int(sizes.prod(1).sum())
            areas += images.shape[0] * images.shape[2] * images.shape[3]
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, (image_ids, total))
        ids = sorted(image_id for part, _ in by_rank for image_id in part)
        assert ids == list(range(len(scenes))), "an epoch has each image once"
        means.append(sum(part for _, part in by_rank) / len(scenes))
    if dist.get_rank() == 0:
        print(f"each image once an epoch; {1 - pixels / areas:.0%} of the pixels pad")
        print(f"loss {means[0]:.3f} -> {means[-1]:.3f}")


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--batch", type=int, default=8, help="images over all ranks")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
