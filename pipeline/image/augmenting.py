"""Augmentations that Pillow computes: jitter of color, and RandAugment.

Factors have the meaning they have in Pillow's `ImageEnhance`: 0 gives black or grey, 1
leaves the image as it is, and more than 1 strengthens it. The pixels are exactly
Pillow's.
"""
# ruff: noqa: N801

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps

from ...errors import check
from .codec import like, on_pixels, pixels_of
from .geometry import Image, Matrix, Range, SampleParts, Warp, moved

Picture = PIL.Image.Image

ENHANCERS: dict[str, Any] = {
    "brightness": PIL.ImageEnhance.Brightness,
    "saturation": PIL.ImageEnhance.Color,
    "contrast": PIL.ImageEnhance.Contrast,
    "sharpness": PIL.ImageEnhance.Sharpness,
}
"""Changes by a factor."""
UNCHANGED = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
"""The changes of `color_jitter`, and the amounts that leave an image as it is."""


def changed(picture: Picture, change: str, amount: float) -> Picture:
    """Return a picture after a change that moves no pixel.

    Args:
        picture: the picture.
        change: its name; "identity" changes nothing.
        amount: a factor, or for "hue" a share of the circle, by which all hues turn in
            whole steps of 1/256. For the changes that only RandAugment has, a level
            from 0 to 1: the higher it is, the more bits are cleared, and the lower is
            the threshold above which pixels are inverted.
    """
    match change:
        case "hue":
            hue, *rest = picture.convert("HSV").split()
            steps = math.trunc(amount * 255) % 256
            hue = hue.point([(step + steps) % 256 for step in range(256)])
            picture = PIL.Image.merge("HSV", (hue, *rest)).convert("RGB")
        case "posterize":
            picture = PIL.ImageOps.posterize(
                picture, 8 - round(amount * MAX_POSTERIZED)
            )
        case "solarize":
            picture = PIL.ImageOps.solarize(picture, math.ceil(255 * (1 - amount)))
        case "autocontrast":
            picture = PIL.ImageOps.autocontrast(picture)
        case "equalize":
            picture = PIL.ImageOps.equalize(picture)
        case _ if change in ENHANCERS:
            picture = ENHANCERS[change](picture).enhance(amount)
    return picture


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
            low, high = self._range(name)
            check(
                0 <= low <= high and (isinstance(given, tuple) or given >= 0),
                f"`{name}` must be a number >= 0, or a range (min, max) of these, got"
                f" {given}; 0.4 is usual",
            )
        low, high = self._range("hue")
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

        def jittered(pixels: Image) -> Image:
            picture = PIL.Image.fromarray(pixels)
            for change, amount in changes:
                picture = changed(picture, change, amount)
            return np.array(picture)  # `asarray` would be read-only

        return on_pixels(sample, jittered)

    def _drawn(self, rng: np.random.Generator) -> list[tuple[str, float]]:
        """Return the changes to make, each with its amount, in order.

        A change whose range is fixed at "no change" is left out.
        """
        ranges = {name: self._range(name) for name in UNCHANGED}
        wanted = [name for name, it in UNCHANGED.items() if ranges[name] != (it, it)]
        order = rng.permutation(len(wanted))
        return [(wanted[at], rng.uniform(*ranges[wanted[at]])) for at in order]

    def _range(self, name: str) -> Range:
        """Return the smallest and the largest amount of a change."""
        given, none = getattr(self, name), UNCHANGED[name]
        if isinstance(given, tuple):
            return given
        return max(none - 1, none - given), none + given


# RandAugment: Cubuk et al., "RandAugment: Practical automated data augmentation with a
# reduced search space", 2019. The list of changes, and the amount that a magnitude
# stands for in each, are those of torchvision's `RandAugment` with its 31 bins.

MAX_FACTOR = 0.9
"""Distance of a factor from 1."""
MAX_POSTERIZED = 4
"""Bits, of eight, that may be cleared."""
WARPS = {
    "shear x": 0.3,
    "shear y": 0.3,
    "shift x": 150 / 331,
    "shift y": 150 / 331,
    "rotate": 30.0,
}
"""The warps, and the largest amount of each: pixels of shift per pixel of distance, a
share of the side in its direction (images in the paper have 331 pixels), and degrees.
Its sign is drawn, as for a factor."""
UNSIGNED = ("posterize", "solarize", "autocontrast", "equalize", "identity")
CHANGES = (*WARPS, *ENHANCERS, *UNSIGNED)


def matrix_of(warp: str, amount: float, size: tuple[int, int]) -> Matrix:
    """Return the matrix of a warp.

    Args:
        warp: "shear x" shifts each row sideways in proportion to its y, "shear y" each
            column; "shift x" and "shift y" shift by whole pixels, "rotate" turns
            counter-clockwise about the center.
        amount: pixels per pixel, a share of the side, or degrees.
        size: height and width of the image in pixels.
    """
    height, width = size
    match warp:
        case "shear x":
            return 1, amount, 0, 0, 1, 0
        case "shear y":
            return 1, 0, 0, amount, 1, 0
        case "shift x":
            return 1, 0, -int(amount * width), 0, 1, 0
        case "shift y":
            return 1, 0, 0, 0, 1, -int(amount * height)
    angle = -math.radians(amount)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = width / 2, height / 2
    return (
        cosine, sine, x - cosine * x - sine * y,
        -sine, cosine, y + sine * x - cosine * y,
    )  # fmt: skip


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
            change = CHANGES[number]
            if change in WARPS:
                matrix = matrix_of(change, sign * level * WARPS[change], size)
                picture = picture.transform(
                    picture.size,
                    PIL.Image.Transform.AFFINE,
                    matrix,
                    fillcolor=(self.fill,) * 3,
                )
                if target is not None:
                    warp = Warp(matrix, size)
                    target = moved(target, warp, size, per_box=self.per_box)
            else:
                factor = 1 + sign * level * MAX_FACTOR
                amount = factor if change in ENHANCERS else level
                picture = changed(picture, change, amount)
        return parts.made(like(parts.image, np.array(picture)), target)
