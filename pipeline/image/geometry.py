"""Which part of an image to cut out, and how to resize and mirror it. Pure.

Boxes are random or central. Pixels are `uint8 [H, W, 3]`; torch works on them without
holding the GIL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from .sample import Image

Range: TypeAlias = tuple[float, float]
"""The smallest and the largest value; both are included."""

TRIES = 10
"""Boxes drawn before the central one is taken."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of whole pixels inside an image; all numbers are pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def short_side(self) -> int:
        """The smaller of height and width, in pixels."""
        return min(self.height, self.width)

    def reduced(self, factor: int) -> Box:
        """Return the box that covers the same part of the image at 1/`factor` scale.

        Its edges are off by at most half a (reduced) pixel.
        """
        top, left = round(self.top / factor), round(self.left / factor)
        bottom = round((self.top + self.height) / factor)
        right = round((self.left + self.width) / factor)
        return Box(top, left, bottom - top, right - left)

    def cut(self, image: Image) -> Image:
        """Return this part of `image` `uint8 [H, W, 3]`, as a view of it."""
        return image[
            self.top : self.top + self.height, self.left : self.left + self.width
        ]


def random_box(
    height: int, width: int, scale: Range, ratio: Range, rng: np.random.Generator
) -> Box:
    """Draw the box of a random resized crop, by the same rule as torchvision.

    The box's share of the image's area is uniform in `scale`, its aspect (width /
    height) is log-uniform in `ratio`, and its place is uniform. If a box does not fit,
    another is drawn, 10 in all. If none fits, the largest central box with an aspect
    within `ratio` is taken. (Szegedy et al., "Going deeper with convolutions", CVPR
    2015, section 6. The number of tries and the rounding are those of torchvision's
    `RandomResizedCrop`.)
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(TRIES):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < tall <= height and 0 < wide <= width:
            top = int(rng.integers(height - tall + 1))
            left = int(rng.integers(width - wide + 1))
            return Box(top, left, tall, wide)
    return central_box(height, width, *widest_fit(height, width, ratio))


def widest_fit(height: int, width: int, ratio: Range) -> tuple[int, int]:
    """Return (height, width) of the largest box with its aspect within `ratio`."""
    aspect = width / height
    if aspect < ratio[0]:
        return max(1, round(width / ratio[0])), width
    if aspect > ratio[1]:
        return height, max(1, round(height * ratio[1]))
    return height, width


def central_box(height: int, width: int, tall: int, wide: int) -> Box:
    """Return the box of `tall` by `wide` pixels in the middle of an image."""
    return Box((height - tall) // 2, (width - wide) // 2, tall, wide)


def short_side_size(
    height: int, width: int, short: int, longest: int | None = None
) -> tuple[int, int]:
    """Return (height, width) of the same aspect whose smaller side is `short` pixels.

    If the larger side would then exceed `longest`, it becomes `longest`, and the
    smaller side is below `short`.
    """
    low, high = min(height, width), max(height, width)
    long = max(short, short * high // low)
    if longest is not None and long > longest:
        short, long = max(1, longest * low // high), longest
    return (short, long) if height <= width else (long, short)


def resize(image: Image, height: int, width: int, *, antialias: bool) -> Image:
    """Return `image` resized bilinearly, in new memory: `uint8 [height, width, 3]`.

    With `antialias`, each pixel is within 1/255 of Pillow's `BILINEAR`.
    """
    # torch has a vectorised path for channels-last memory, which is twice as fast. All
    # is done in one call: each call releases the GIL, and getting it back takes some
    # 50 us if other threads want it.
    tall, wide, channels = image.shape
    planes = torch.as_strided(
        torch.from_numpy(writable(image)),
        (1, channels, tall, wide),
        (image.size, 1, wide * channels, channels),
    )
    resized = torch.nn.functional.interpolate(
        planes, size=(height, width), mode="bilinear", antialias=antialias
    )
    pixels: Image = np.ascontiguousarray(resized.numpy()[0].transpose(1, 2, 0))
    return pixels


def mirror(image: Image) -> Image:
    """Return `image` with left and right exchanged, in new memory."""
    # numpy copies reversed rows one pixel at a time, which is 20 times slower.
    mirrored: Image = torch.flip(torch.from_numpy(writable(image)), (1,)).numpy()
    return mirrored


def writable(image: Image) -> Image:
    """Return `image` in memory that torch accepts: contiguous and writable."""
    return np.require(image, requirements=("C", "W"))
