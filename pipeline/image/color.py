"""Changes of color, by Pillow: brightness, contrast, saturation and hue.

Factors mean what they mean to Pillow's `ImageEnhance`: 0 is black, or grey, 1 is the
image as it is, and beyond 1 is more. The pixels are Pillow's, to the last bit.
"""
# ruff: noqa: N801

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageEnhance

from ...errors import check
from .geometry import Range
from .kinds import on_pixels
from .sample import Image

UNCHANGED: Range = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class color_jitter:
    """Change brightness, contrast, saturation and hue by random amounts.

    The four are done in a random order (Howard, "Some Improvements on Deep
    Convolutional Neural Network Based Image Classification", 2013; the ranges are those
    of torchvision's `ColorJitter`).

    Args:
        brightness, contrast, saturation: the factor is uniform in 1 - x to 1 + x, but
            not below 0; or in (least, greatest).
        hue: the hue turns by a share of the circle that is uniform in -x to x, x <=
            0.5; or in (least, greatest).
    """

    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            given = getattr(self, name)
            low, high = around_one(given)
            check(
                0 <= low <= high and (isinstance(given, tuple) or given >= 0),
                f"`{name}` must be a number >= 0, or (least, greatest) of these, got"
                f" {given}; 0.4 is usual",
            )
        low, high = around_zero(self.hue)
        check(
            -0.5 <= low <= high <= 0.5,
            f"`hue` must be within 0 and 0.5, or (least, greatest) within -0.5 and 0.5,"
            f" got {self.hue}; 0.1 is usual",
        )

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with the colors of its image changed."""
        changes = self._drawn(rng)

        def changed(pixels: Image) -> Image:
            picture = PIL.Image.fromarray(pixels)
            for change, amount in changes:
                picture = change(picture, amount)
            return np.array(picture)  # `asarray` would be read-only

        return on_pixels(sample, changed)

    def _drawn(self, rng: np.random.Generator) -> list[tuple[Change, float]]:
        """Return what to do, and by how much; what would change nothing is left out."""
        ranges: list[tuple[Change, Range, Range]] = [
            (brightened, around_one(self.brightness), UNCHANGED),
            (contrasted, around_one(self.contrast), UNCHANGED),
            (saturated, around_one(self.saturation), UNCHANGED),
            (turned, around_zero(self.hue), (0.0, 0.0)),
        ]
        wanted = [(change, it) for change, it, none in ranges if it != none]
        order = rng.permutation(len(wanted))
        return [(wanted[at][0], rng.uniform(*wanted[at][1])) for at in order]


Change = Callable[[PIL.Image.Image, float], PIL.Image.Image]
"""Changes a picture by an amount."""


def around_one(given: float | Range) -> Range:
    """Return the least and the greatest factor."""
    return given if isinstance(given, tuple) else (max(0.0, 1 - given), 1 + given)


def around_zero(given: float | Range) -> Range:
    """Return the least and the greatest turn."""
    return given if isinstance(given, tuple) else (-given, given)


def brightened(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return a picture brighter by a factor: 0 is black."""
    return PIL.ImageEnhance.Brightness(picture).enhance(factor)


def contrasted(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return a picture with more contrast by a factor: 0 is its mean grey."""
    return PIL.ImageEnhance.Contrast(picture).enhance(factor)


def saturated(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return a picture with more color by a factor: 0 is grey."""
    return PIL.ImageEnhance.Color(picture).enhance(factor)


def sharpened(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return a picture sharper by a factor: 0 is blurred."""
    return PIL.ImageEnhance.Sharpness(picture).enhance(factor)


def turned(picture: PIL.Image.Image, share: float) -> PIL.Image.Image:
    """Return a picture with its hues turned by a share of the circle, in 1/256."""
    hue, saturation, value = picture.convert("HSV").split()
    steps = math.trunc(share * 255) % 256
    shifted = hue.point([(step + steps) % 256 for step in range(256)])
    return PIL.Image.merge("HSV", (shifted, saturation, value)).convert("RGB")
