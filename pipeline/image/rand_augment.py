"""RandAugment: a few changes drawn from a list, all of the same magnitude.

Source: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced
search space", 2019. The list of changes, and the amount that a magnitude stands for in
each, are those of torchvision's `RandAugment` with its 31 bins. The pixels are
Pillow's.
"""
# ruff: noqa: N801

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch

from ...errors import check
from .annotations import Points, moved
from .color import Change, brightened, contrasted, saturated, sharpened
from .kinds import like, pixels_of
from .sample import SampleParts

Picture = PIL.Image.Image
MAX_SHEAR = 0.3
"""Pixels of shift per pixel of distance."""
MAX_SHIFT = 150 / 331
"""Share of the side in its direction (images in the paper have 331 pixels)."""
MAX_TURN = 30.0
"""Degrees."""
MAX_FACTOR = 0.9
"""Distance of a factor from 1."""
MAX_POSTERIZED = 4
"""Bits, of eight, that may be cleared."""


class Warp(NamedTuple):
    """An affine move: the new pixel (x, y) shows the old one at `matrix` (x, y, 1)."""

    matrix: tuple[float, float, float, float, float, float]
    """Two rows of three, as for Pillow's `transform`."""
    size: tuple[int, int]
    """Height and width in pixels, which do not change."""

    @property
    def shown(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the visible part, in pixels."""
        return 0, 0, self.size[1], self.size[0]

    @property
    def cuts(self) -> bool:
        """Whether a part of the old image may lie outside the new one."""
        return True

    def points(self, points: Points) -> Points:
        """Return the new places of points, `float64 [m, 2]`."""
        a, b, c, d, e, f = self.matrix
        linear = np.array([[a, b], [d, e]])
        found: Points = np.linalg.solve(linear, (points - (c, f)).T).T
        return found

    def masks(self, masks: torch.Tensor, fill: int) -> torch.Tensor:
        """Return masks `[n, H, W]` warped, by nearest pixels."""
        height, width = self.size
        a, b, c, d, e, f = self.matrix
        # A pixel's place is its center.
        y, x = np.mgrid[:height, :width] + 0.5
        column = np.floor(a * x + b * y + c).astype(np.int64)
        row = np.floor(d * x + e * y + f).astype(np.int64)
        seen = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        made = masks.new_full(masks.shape, fill)
        made[:, torch.from_numpy(seen)] = masks[:, row[seen], column[seen]]
        return made

    def drawn(self, picture: Picture, fill: int) -> Picture:
        """Return the picture warped, with `fill` where it leaves a gap."""
        size = (self.size[1], self.size[0])
        method = PIL.Image.Transform.AFFINE
        colors = (fill,) * 3
        return picture.transform(size, method, self.matrix, fillcolor=colors)


def sheared_x(size: tuple[int, int], amount: float) -> Warp:
    """Return a warp that shifts each row sideways in proportion to its y."""
    return Warp((1, amount, 0, 0, 1, 0), size)


def sheared_y(size: tuple[int, int], amount: float) -> Warp:
    """Return a warp that shifts each column up or down in proportion to its x."""
    return Warp((1, 0, 0, amount, 1, 0), size)


def shifted_x(size: tuple[int, int], amount: float) -> Warp:
    """Return a warp that shifts sideways by a share of the width (whole pixels)."""
    return Warp((1, 0, -int(amount * size[1]), 0, 1, 0), size)


def shifted_y(size: tuple[int, int], amount: float) -> Warp:
    """Return a warp that shifts vertically by a share of the height (whole pixels)."""
    return Warp((1, 0, 0, 0, 1, -int(amount * size[0])), size)


def rotated(size: tuple[int, int], degrees: float) -> Warp:
    """Return a warp that turns an image counter-clockwise about its center."""
    height, width = size
    angle = -math.radians(degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = width / 2, height / 2
    matrix = (
        cosine, sine, x - cosine * x - sine * y,
        -sine, cosine, y + sine * x - cosine * y,
    )  # fmt: skip
    return Warp(matrix, size)


WARPS: dict[Callable[[tuple[int, int], float], Warp], float] = {
    sheared_x: MAX_SHEAR,
    sheared_y: MAX_SHEAR,
    shifted_x: MAX_SHIFT,
    shifted_y: MAX_SHIFT,
    rotated: MAX_TURN,
}
"""The warps, and the largest amount of each. Its sign is drawn."""


def posterized(picture: Picture, level: float) -> Picture:
    """Clear the lowest bits of each pixel: more of them for a higher level, 0 to 1."""
    return PIL.ImageOps.posterize(picture, 8 - round(level * MAX_POSTERIZED))


def solarized(picture: Picture, level: float) -> Picture:
    """Invert pixels above a threshold, which falls as the level, 0 to 1, rises."""
    return PIL.ImageOps.solarize(picture, math.ceil(255 * (1 - level)))


def stretched(picture: Picture, level: float) -> Picture:
    """Stretch each channel to its full range, whatever the level."""
    del level
    return PIL.ImageOps.autocontrast(picture)


def equalized(picture: Picture, level: float) -> Picture:
    """Equalize the histogram of each channel, whatever the level."""
    del level
    return PIL.ImageOps.equalize(picture)


def unchanged(picture: Picture, level: float) -> Picture:
    """Return the picture as it is."""
    del level
    return picture


SIGNED: tuple[Change, ...] = (brightened, saturated, contrasted, sharpened)
"""Changes by a factor. Whether it is above or below 1 is drawn."""
UNSIGNED: tuple[Change, ...] = (posterized, solarized, stretched, equalized, unchanged)
CHANGES = (*WARPS, *SIGNED, *UNSIGNED)


@dataclass(frozen=True, slots=True)
class rand_augment:
    """Apply a few changes, drawn from 14, to an image, all of the same magnitude.

    If the image is sheared, shifted or turned, boxes, masks and keypoints move with it.
    A turned box becomes the upright box around it.

    Args:
        num_ops: how many changes to apply, one after another.
        magnitude: of each change, 0 to `bins` - 1.
        bins: number of magnitudes.
        fill: value of the pixels that come in from outside the image, 0 to 255.
        per_box: further annotations that have one entry per box, by name.

    Raises:
        SpecError: an argument is out of range.
    """

    num_ops: int = 2
    magnitude: int = 9
    _: KW_ONLY
    bins: int = 31
    fill: int = 0
    per_box: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(
            type(self.num_ops) is int and self.num_ops >= 0,
            f"`num_ops` must be an int >= 0, got {self.num_ops!r}; 2 is usual",
        )
        check(
            self.bins >= 2 and 0 <= self.magnitude < self.bins,
            f"`magnitude` must be 0 to `bins` - 1, {self.bins - 1}, got"
            f" {self.magnitude}; magnitude=9, bins=31 are usual",
        )

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with its image changed; annotations move with it.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        parts = SampleParts.of(sample)
        pixels = pixels_of(parts.image)
        picture = PIL.Image.fromarray(pixels)
        size, target = (picture.height, picture.width), parts.target
        level = self.magnitude / (self.bins - 1)
        for number in rng.integers(len(CHANGES), size=self.num_ops):
            sign = 1 if rng.random() < 0.5 else -1
            change: Any = CHANGES[number]
            if change in WARPS:
                warp = change(size, sign * level * WARPS[change])
                picture = warp.drawn(picture, self.fill)
                if target is not None:
                    target = moved(target, warp, size, per_box=self.per_box)
            elif change in SIGNED:
                picture = change(picture, 1 + sign * level * MAX_FACTOR)
            else:
                picture = change(picture, level)
        return parts.made(like(parts.image, np.array(picture)), target)
