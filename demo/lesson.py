"""What the demo trains: a small network, on photos that are slow to read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from ..errors import SpecError
from ..pipeline.image import decode_random_resized_crop
from ..pipeline.pipeline import Pipeline
from ..pipeline.sources.folder import Folder
from ..pipeline.testing import draw_photos

# Drawn in four seconds. However few there are, each read of one waits.
PHOTOS = 128
# JPEG quality, the default of many programs: 50 KB per photo.
QUALITY = 75
# Side of a crop in pixels, small enough to decode every photo of the demo at 1/2.
SIZE = 48
SCALE = (0.35, 1.0)
BATCH = 32
# Enough for one core to train slightly slower than another decodes. Loading can then
# keep up with the trainer, even if other programs use a part of the cores.
CHANNELS = 40
RATE, MOMENTUM = 0.02, 0.9


def cached_photos(progress: Callable[[int, int], None]) -> Path:
    """Return a folder of drawn photos; draw the missing ones first.

    Args:
        progress: called with (photos drawn, all photos) after each photo.

    Raises:
        SpecError: the photos cannot be written.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "penstock" / f"photos-{PHOTOS}-q{QUALITY}"
    try:
        return draw_photos(folder, PHOTOS, quality=QUALITY, progress=progress)
    except OSError as error:
        raise SpecError(
            f"the demo draws its photos into {folder}, but cannot write there: {error};"
            " set XDG_CACHE_HOME to a folder with 10 MB of free space, or pass --data"
            " DIR with photos of your own"
        ) from error


@dataclass(frozen=True, slots=True)
class Remote:
    """A folder of photos that acts like an object store: reads wait `latency_s` first.

    A sample is `(bytes, int)`: the file and its label.
    """

    photos: Folder
    latency_s: float

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        time.sleep(self.latency_s)
        data, label = self.photos[index]
        return data, label


def pipeline(photos: Remote) -> Pipeline:
    """Return a pipeline of batches `(uint8 [32, 48, 48, 3], int64 [32])`.

    Both stages have bounds for their workers, so each is a segment of its own and
    starts with one worker.
    """
    return (
        Pipeline.from_dataset(photos, num_parallel_workers=(1, 128), name="read")
        .shuffle(seed=0)
        .map(
            decode_random_resized_crop(SIZE, scale=SCALE, flip=0.5, reducing_gap=2),
            num_parallel_workers=(1, 16),
            name="decode",
        )
        .batch(BATCH, on_error="substitute")
        .options(name="demo")
    )


class Lesson:
    """A convolutional network, trained by gradient descent with momentum.

    That is written out here. `torch.optim` would load torch's compiler: two seconds of
    the time to the first decision, and five where Python has not compiled it yet.

    Args:
        classes: number of labels.
    """

    def __init__(self, classes: int) -> None:
        torch.manual_seed(0)
        widths = (3, CHANNELS, 2 * CHANNELS, 4 * CHANNELS)
        layers = [
            nn.Sequential(
                nn.Conv2d(narrow, wide, 3, stride=2, padding=1),
                nn.BatchNorm2d(wide),
                nn.ReLU(),
            )
            for narrow, wide in pairwise(widths)
        ]
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self._network = nn.Sequential(*layers, *pooled, nn.Linear(widths[-1], classes))
        self._velocities = [torch.zeros_like(p) for p in self._network.parameters()]

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on one batch and return its loss.

        Args:
            images: `uint8 [N, H, W, 3]`.
            labels: `int64 [N]`.
        """
        pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        loss = nn.functional.cross_entropy(self._network(pixels), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self._descend()
        return loss.item()

    @torch.no_grad()
    def _descend(self) -> None:
        """Move all parameters, and forget their gradients."""
        parameters = self._network.parameters()
        for parameter, velocity in zip(parameters, self._velocities, strict=True):
            assert parameter.grad is not None
            velocity.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(velocity, alpha=RATE)
            parameter.grad = None
