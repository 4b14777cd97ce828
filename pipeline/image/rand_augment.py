"""RandAugment: a few changes drawn from a list, all of one magnitude.

Source: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced
search space", 2019. The list, and what a magnitude means to each change, are those of
torchvision's `RandAugment` with its 31 bins; the pixels are Pillow's.
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
MAX_SHIFT = 150 / 331
"""Of the side that it goes along (the paper's images have 331 pixels)."""
MAX_TURN = 30.0
MAX_FACTOR = 0.9
MAX_POSTERIZED = 4
"""Bits of eight that are taken away at most."""


class Warp(NamedTuple):
    """A change of places: pixel (x, y) shows what was at `matrix` times (x, y, 1)."""

    matrix: tuple[float, float, float, float, float, float]
    """Two rows of three, as Pillow's `transform` takes them."""
    size: tuple[int, int]
    """Height and width, which stay."""

    @property
    def shown(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of what may be seen."""
        return 0, 0, self.size[1], self.size[0]

    @property
    def cuts(self) -> bool:
        """Whether something may lie outside afterwards."""
        return True

    def points(self, points: Points) -> Points:
        """Return where points come to lie, `float64 [m, 2]`."""
        a, b, c, d, e, f = self.matrix
        linear = np.array([[a, b], [d, e]])
        found: Points = np.linalg.solve(linear, (points - (c, f)).T).T
        return found

    def masks(self, masks: torch.Tensor, fill: int) -> torch.Tensor:
        """Return masks `[n, H, W]` warped, nearest pixels."""
        height, width = self.size
        a, b, c, d, e, f = self.matrix
        # Pixels are seen at their middles.
        y, x = np.mgrid[:height, :width] + 0.5
        column = np.floor(a * x + b * y + c).astype(np.int64)
        row = np.floor(d * x + e * y + f).astype(np.int64)
        seen = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        made = masks.new_full(masks.shape, fill)
        made[:, torch.from_numpy(seen)] = masks[:, row[seen], column[seen]]
        return made

    def drawn(self, picture: Picture, fill: int) -> Picture:
        """Return a picture warped."""
        size = (self.size[1], self.size[0])
        method = PIL.Image.Transform.AFFINE
        colors = (fill,) * 3
        return picture.transform(size, method, self.matrix, fillcolor=colors)


def sheared_x(size: tuple[int, int], amount: float) -> Warp:
    """Move rows sideways, the more the further down."""
    return Warp((1, amount, 0, 0, 1, 0), size)


def sheared_y(size: tuple[int, int], amount: float) -> Warp:
    """Move columns up or down, the more the further right."""
    return Warp((1, 0, 0, amount, 1, 0), size)


def shifted_x(size: tuple[int, int], amount: float) -> Warp:
    """Move an image sideways by a share of its width, in whole pixels."""
    return Warp((1, 0, -int(amount * size[1]), 0, 1, 0), size)


def shifted_y(size: tuple[int, int], amount: float) -> Warp:
    """Move an image up or down by a share of its height, in whole pixels."""
    return Warp((1, 0, 0, 0, 1, -int(amount * size[0])), size)


def rotated(size: tuple[int, int], degrees: float) -> Warp:
    """Turn an image about its middle, counter-clockwise."""
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
"""Changes of places, and the greatest amount of each: either way, as is drawn."""


def posterized(picture: Picture, level: float) -> Picture:
    """Take away the lowest bits of each pixel."""
    return PIL.ImageOps.posterize(picture, 8 - round(level * MAX_POSTERIZED))


def solarized(picture: Picture, level: float) -> Picture:
    """Invert what is brighter than a threshold, which falls with the level."""
    return PIL.ImageOps.solarize(picture, math.ceil(255 * (1 - level)))


def stretched(picture: Picture, level: float) -> Picture:
    """Stretch each channel to the whole range."""
    del level
    return PIL.ImageOps.autocontrast(picture)


def equalized(picture: Picture, level: float) -> Picture:
    """Make each value of a channel as frequent as any other."""
    del level
    return PIL.ImageOps.equalize(picture)


def unchanged(picture: Picture, level: float) -> Picture:
    """Do nothing."""
    del level
    return picture


SIGNED: tuple[Change, ...] = (brightened, saturated, contrasted, sharpened)
"""Changes by a factor: more or less, as is drawn."""
UNSIGNED: tuple[Change, ...] = (posterized, solarized, stretched, equalized, unchanged)
CHANGES = (*WARPS, *SIGNED, *UNSIGNED)


@dataclass(frozen=True, slots=True)
class rand_augment:
    """Change an image in a few ways drawn from 14, all by one magnitude.

    Boxes, masks and keypoints move with it where it is sheared, shifted or turned; a
    turned box becomes the upright one around it.

    Args:
        num_ops: changes, one after the other.
        magnitude: of each, 0 to `bins` - 1.
        bins: magnitudes there are.
        fill: what pixels are that come in from outside, 0 to 255.
        per_box: names of what has one entry a box, besides the usual ones.
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
            f"`magnitude` must be within 0 and `bins` - 1, {self.bins - 1}, got"
            f" {self.magnitude}; 9 of 31 is usual",
        )

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with its image changed."""
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
