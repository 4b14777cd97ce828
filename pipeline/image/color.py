"""Changes of color, by Pillow: brightness, contrast, saturation and hue.

Factors have the meaning they have in Pillow's `ImageEnhance`: 0 gives black or grey, 1
leaves the image as it is, and more than 1 strengthens it. The pixels are exactly
Pillow's.
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

    The four are applied in a random order (Howard, "Some Improvements on Deep
    Convolutional Neural Network Based Image Classification", 2013). The ranges are
    those of torchvision's `ColorJitter`.

    Args:
        brightness, contrast, saturation: x, for a factor drawn uniformly from 1 - x
            (but at least 0) to 1 + x; or its range, (min, max).
        hue: x <= 0.5, for a turn of the hue drawn uniformly from -x to x, as a share of
            the circle; or its range, (min, max).

    Raises:
        SpecError: an argument is out of range.
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
                f"`{name}` must be a number >= 0, or a range (min, max) of these, got"
                f" {given}; 0.4 is usual",
            )
        low, high = around_zero(self.hue)
        check(
            -0.5 <= low <= high <= 0.5,
            f"`hue` must be 0 to 0.5, or a range (min, max) within -0.5 and 0.5, got"
            f" {self.hue}; 0.1 is usual",
        )

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with the colors of its image changed.

        Raises:
            SampleError: it has no image.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        changes = self._drawn(rng)

        def changed(pixels: Image) -> Image:
            picture = PIL.Image.fromarray(pixels)
            for change, amount in changes:
                picture = change(picture, amount)
            return np.array(picture)  # `asarray` would be read-only

        return on_pixels(sample, changed)

    def _drawn(self, rng: np.random.Generator) -> list[tuple[Change, float]]:
        """Return the changes to make, each with its amount, in order.

        A change whose range is fixed at "no change" is left out.
        """
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
"""A function that changes a picture by an amount."""


def around_one(given: float | Range) -> Range:
    """Return the smallest and the largest factor."""
    return given if isinstance(given, tuple) else (max(0.0, 1 - given), 1 + given)


def around_zero(given: float | Range) -> Range:
    """Return the smallest and the largest turn, as shares of the circle."""
    return given if isinstance(given, tuple) else (-given, given)


def brightened(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return the picture with its brightness multiplied by a factor; 0 gives black."""
    return PIL.ImageEnhance.Brightness(picture).enhance(factor)


def contrasted(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return the picture with its contrast multiplied; 0 gives its mean grey."""
    return PIL.ImageEnhance.Contrast(picture).enhance(factor)


def saturated(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return the picture with its saturation multiplied; 0 gives shades of grey."""
    return PIL.ImageEnhance.Color(picture).enhance(factor)


def sharpened(picture: PIL.Image.Image, factor: float) -> PIL.Image.Image:
    """Return the picture with its sharpness multiplied; 0 gives a blurred one."""
    return PIL.ImageEnhance.Sharpness(picture).enhance(factor)


def turned(picture: PIL.Image.Image, share: float) -> PIL.Image.Image:
    """Return the picture with its hues turned by a share of the circle.

    The turn is in whole steps of 1/256.
    """
    hue, saturation, value = picture.convert("HSV").split()
    steps = math.trunc(share * 255) % 256
    shifted = hue.point([(step + steps) % 256 for step in range(256)])
    return PIL.Image.merge("HSV", (shifted, saturation, value)).convert("RGB")
