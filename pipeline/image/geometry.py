"""Which part of a photo is taken, and how it is resized and mirrored. Pure.

Boxes are drawn at random, or central. Pixels are `uint8 [H, W, 3]`; torch works on them
outside the GIL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from .sample import Image

Range: TypeAlias = tuple[float, float]
"""Least and greatest, both possible."""

TRIES = 10


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of whole pixels inside an image."""

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

        Its edges lie at most half a (reduced) pixel off.
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
    """Draw the box of a random resized crop, by the rule that torchvision's follows.

    The area's share of the image is uniform in `scale`, the aspect (width / height)
    log-uniform in `ratio`, the place uniform. A box that does not fit is drawn again,
    up to 10 times; then it is the largest central one with an aspect within `ratio`.
    (Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6; the tries
    and the rounding are those of torchvision's `RandomResizedCrop`.)
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
    """Return (height, width) of the largest box with an aspect within `ratio`."""
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
    """Return (height, width), same aspect, of which the smaller is `short` pixels.

    Where the larger would be more than `longest` it is that, and the smaller less.
    """
    low, high = min(height, width), max(height, width)
    long = max(short, short * high // low)
    if longest is not None and long > longest:
        short, long = max(1, longest * low // high), longest
    return (short, long) if height <= width else (long, short)


def resize(image: Image, height: int, width: int, *, antialias: bool) -> Image:
    """Return `image` bilinearly resized, as new memory `uint8 [height, width, 3]`.

    With `antialias` it is within 1/255 of Pillow's `BILINEAR`, pixel by pixel.
    """
    # As channels-last memory, for which torch has a vectorised path, twice as fast. In
    # one call: each lets go of the GIL, which takes some 50 us to get back where other
    # threads want it.
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
    """Return `image` with left and right exchanged, as new memory."""
    # numpy copies reversed rows a pixel at a time: 20 times slower.
    mirrored: Image = torch.flip(torch.from_numpy(writable(image)), (1,)).numpy()
    return mirrored


def writable(image: Image) -> Image:
    """Return `image` as memory that torch takes: contiguous, not read-only."""
    return np.require(image, requirements=("C", "W"))
