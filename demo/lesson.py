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

PHOTOS = 512
QUALITY = 75
"""Of the JPEGs, as programs choose where nobody says: 50 KB a photo."""
SIZE = 48
"""Side of a crop in pixels: so small that every photo of the demo is decoded at 1/2."""
SCALE = (0.35, 1.0)
BATCH = 32
CHANNELS = 40
"""So wide that a core trains a little slower than another one decodes: then the trainer
can be fed, and is, also where other programs take a share of the cores."""


def cached_photos(progress: Callable[[int, int], None]) -> Path:
    """Return a folder of drawn photos, drawing those that are not there.

    Args:
        progress: called with (photos there, all photos) after each.

    Raises:
        SpecError: they cannot be written.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "penstock" / f"photos-{PHOTOS}-q{QUALITY}"
    try:
        return draw_photos(folder, PHOTOS, quality=QUALITY, progress=progress)
    except OSError as error:
        raise SpecError(
            f"the photos of the demo must be drawn into {folder}, got {error}; set "
            "XDG_CACHE_HOME to a folder with 30 MB to spare, or pass --data DIR"
        ) from error


@dataclass(frozen=True, slots=True)
class Remote:
    """A folder of photos as if in an object store: a read first waits `latency_s`."""

    photos: Folder
    latency_s: float

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        time.sleep(self.latency_s)
        data, label = self.photos[index]
        return data, label


def pipeline(photos: Remote) -> Pipeline:
    """Return batches `(uint8 [32, 48, 48, 3], int64 [32])`, one worker a stage.

    Both stages have bounds of their own, so each is a segment and begins at the lower.
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
    """A convolutional network and its optimizer.

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
        self._optimizer = torch.optim.Adam(self._network.parameters())

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Train on one batch and return its loss.

        Args:
            images: `uint8 [N, H, W, 3]`.
            labels: `int64 [N]`.
        """
        pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        loss = nn.functional.cross_entropy(self._network(pixels), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self._optimizer.step()
        return loss.item()
