"""Where an image and its annotations go: cut, resized, mirrored, on a canvas. Pure.

Boxes are random or central. Pixels are `uint8 [H, W, 3]`; torch works on them without
holding the GIL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Image: TypeAlias = NDArray[np.uint8]
"""`uint8 [H, W, 3]`, RGB."""
Points = NDArray[np.float64]
"""`[m, 2]`: x and y in pixels."""
Range: TypeAlias = tuple[float, float]
"""The smallest and the largest value; both are included."""

Fill = int | tuple[int, int, int]
"""The value of pixels around an image, 0 to 255: one number, or one per channel."""

TRIES = 10
"""Boxes drawn before the central one is taken."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of whole pixels inside an image; all numbers are pixels."""

    top: int
    left: int
    height: int
    width: int

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
    tall, wide = height, width
    if width / height < ratio[0]:
        tall = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        wide = max(1, round(height * ratio[1]))
    return central_box(height, width, tall, wide)


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


@dataclass(frozen=True, slots=True)
class Placement:
    """Which part of an image to take, how large to make it, and what goes around it."""

    box: Box
    """The part to take."""
    height: int
    """Its height in pixels, after resizing."""
    width: int
    """Its width, likewise."""
    of: tuple[int, int]
    """Height and width of the original image, in pixels."""
    mirrored: bool = False
    canvas: Box | None = None
    """The new image, of `height` by `width`, with the part placed at `top`, `left`.
    None: the part is the new image."""
    fill: Fill = 0
    antialias: bool = True
    factor: int = 1
    """The n of the scale 1/n at which a file is decoded: 1, 2, 4 or 8."""

    @classmethod
    def whole(cls, of: tuple[int, int], **changes: Any) -> Placement:
        """Return the placement that leaves an image as it is, apart from `changes`."""
        said = {"height": of[0], "width": of[1]} | changes
        return cls(Box(0, 0, *of), of=of, **said)

    @property
    def shown(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the old image in the new one, in pixels."""
        left, top = self._offset()
        return left, top, left + self.width, top + self.height

    @property
    def reduced(self) -> Box:
        """The part to take, in pixels of the image at 1/`factor` scale."""
        return self.box if self.factor == 1 else self.box.reduced(self.factor)

    @property
    def resizes(self) -> bool:
        """Whether the part is made larger or smaller."""
        box = self.reduced
        return (box.height, box.width) != (self.height, self.width)

    @property
    def cuts(self) -> bool:
        """Whether it takes less than the whole image."""
        return (self.box.height, self.box.width) != self.of

    def points(self, points: Points) -> Points:
        """Return where points come to lie, `float64 [m, 2]`."""
        box = self.box
        scale = (self.width / box.width, self.height / box.height)
        found: Points = (points - (box.left, box.top)) * scale
        if self.mirrored:
            found[:, 0] = self.width - found[:, 0]
        return found + self._offset()

    def masks(self, masks: torch.Tensor, fill: int) -> torch.Tensor:
        """Return masks `[n, H, W]` of the new image, by nearest pixels."""
        box = self.box
        made = masks[:, box.top : box.top + box.height, box.left : box.left + box.width]
        if made.shape[1:] != (self.height, self.width):
            rows = nearest_places(made.shape[1], self.height)
            made = made[:, rows][:, :, nearest_places(made.shape[2], self.width)]
        if self.mirrored:
            made = made.flip(2)
        if self.canvas is not None:
            size = self.canvas.height, self.canvas.width
            around = made.new_full((len(made), *size), fill)
            left, top = self._offset()
            around[:, top : top + self.height, left : left + self.width] = made
            return around
        return made.clone() if made._is_view() else made  # noqa: SLF001 public in use

    def _offset(self) -> tuple[int, int]:
        """Return left and top of the part on its canvas, in pixels."""
        return (0, 0) if self.canvas is None else (self.canvas.left, self.canvas.top)


def nearest_places(before: int, after: int) -> torch.Tensor:
    """Return which of `before` pixels each of `after` pixels copies, as in Pillow.

    It is the one at its center.
    """
    middles = (np.arange(after) + 0.5) * (before / after)
    return torch.from_numpy(np.minimum(middles.astype(np.int64), before - 1))


Matrix = tuple[float, float, float, float, float, float]
"""Two rows of three, as for Pillow's `transform`."""


@dataclass(frozen=True, slots=True)
class Warp:
    """An affine move: the new pixel (x, y) shows the old one at `matrix` (x, y, 1)."""

    matrix: Matrix
    size: tuple[int, int]
    """Height and width in pixels, which do not change."""
    cuts: ClassVar[bool] = True
    """Whether a part of the old image may lie outside the new one."""

    @property
    def shown(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the visible part, in pixels."""
        return 0, 0, self.size[1], self.size[0]

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


Transform: TypeAlias = Placement | Warp
"""Where an operator moves the places of an image."""


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
