"""Operators that cut, resize, mirror, pad and rotate.

Arrays `[H, W, C]` and `[H, W]` are computed as OpenCV does it, and images of Pillow by
Pillow, as in MindSpore.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image

from ...errors import SampleError, check, whole_number
from ...pipeline.image.codec import size_of
from ...pipeline.image.geometry import Box, Placement, mirror
from ...pipeline.image.operators import DECODER
from ..drawing import RandomOperator, Rng
from .conversion import encoded
from .pixels import (
    Array,
    array_of,
    changed_pixels,
    cut_out,
    is_picture,
    padded,
    resized,
    sheared,
    short_side_of,
    warped,
)
from .utils import (
    Border,
    ByChance,
    Inter,
    Range,
    Size,
    around,
    check_interpolation,
    colors_of,
    pair_of_sides,
    pillow_filter,
    range_of,
    sides_of_padding,
)


@dataclass(frozen=True, slots=True)
class Resize:
    """Resize an image.

    Args:
        size: (height, width) in pixels, or an int for the shorter side: the other one
            then keeps the aspect.
        interpolation: one of `Inter`.

    Raises:
        SpecError: an argument is out of range.
    """

    size: Size
    interpolation: Inter = Inter.LINEAR

    def __post_init__(self) -> None:
        pair_of_sides(self.size)
        check_interpolation("interpolation", self.interpolation)

    def __call__(self, image: Any) -> Any:
        if is_picture(image):
            return self._picture(image)
        array = array_of(image)
        if isinstance(self.size, int):
            height, width = short_side_of(array, self.size)
        else:
            height, width = self.size
        return resized(array, height, width, self.interpolation)

    def _picture(self, picture: PIL.Image.Image) -> PIL.Image.Image:
        kind, size = pillow_filter(self.interpolation), self.size
        if not isinstance(size, int):
            return picture.resize((size[1], size[0]), kind)
        width, height = picture.size
        if size == min(width, height):
            return picture
        aspect = width / height
        wide = (
            (size, int(size / aspect)) if width < height else (int(size * aspect), size)
        )
        return picture.resize(wide, kind)


@dataclass(frozen=True, slots=True)
class RandomResize(RandomOperator):
    """Resize an image with an interpolation drawn from four, but Pillow's.

    Args:
        size: (height, width) in pixels, or an int for the shorter side.

    Raises:
        SpecError: `size` is not a number of pixels.
    """

    size: Size

    def __post_init__(self) -> None:
        pair_of_sides(self.size)

    def drawn(self, image: Any, rng: Rng) -> Any:
        kinds = (Inter.LINEAR, Inter.NEAREST, Inter.CUBIC, Inter.AREA)
        return Resize(self.size, kinds[rng.integers(4)])(array_of(image))


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cut out the middle of an image; what lies outside it is black.

    Args:
        size: (height, width) in pixels, or one number for both.

    Raises:
        SpecError: `size` is not a number of pixels.
    """

    size: Size

    def __post_init__(self) -> None:
        pair_of_sides(self.size)

    def __call__(self, image: Any) -> Any:
        tall, wide = pair_of_sides(self.size)
        height, width = array_of(image).shape[:2]
        if is_picture(image):
            top, left = round((height - tall) / 2), round((width - wide) / 2)
        else:
            top, left = (height - tall) // 2, (width - wide) // 2
        return changed_pixels(image, lambda it: cut_out(it, top, left, tall, wide))


@dataclass(frozen=True, slots=True)
class Crop:
    """Cut a part out of an image.

    Args:
        coordinates: (top, left) of the part in pixels.
        size: its (height, width) in pixels, or one number for both.

    Raises:
        SpecError: an argument is not a number of pixels.
    """

    coordinates: tuple[int, int]
    size: Size

    def __post_init__(self) -> None:
        pair_of_sides(self.size)
        for side in self.coordinates:
            whole_number("coordinates", side, 0, "(0, 0) is the upper left corner")

    def __call__(self, image: Any) -> Any:
        top, left = self.coordinates
        tall, wide = pair_of_sides(self.size)
        array = array_of(image)
        check_fits(array, top + tall, left + wide)
        return cut_out(array, top, left, tall, wide)


@dataclass(frozen=True, slots=True)
class RandomCrop(RandomOperator):
    """Cut a part out of an image, at a uniformly random place.

    Args:
        size: (height, width) in pixels, or one number for both.
        padding: pixels added first: one number, (left and right, top and bottom), or
            (left, top, right, bottom).
        pad_if_needed: whether an image that is smaller than that is padded.
        fill_value: the value of added pixels: 0 to 255, or three such numbers.
        padding_mode: one of `Border`.

    Raises:
        SpecError: an argument is out of range.
    """

    size: Size
    padding: Size | None = None
    pad_if_needed: bool = False
    fill_value: int | tuple[int, int, int] = 0
    padding_mode: Border = Border.CONSTANT

    def __post_init__(self) -> None:
        pair_of_sides(self.size)
        sides_of_padding(self.padding or 0)
        colors_of(self.fill_value)

    def drawn(self, image: Any, rng: Rng) -> Any:
        tall, wide = pair_of_sides(self.size)

        def cut(array: Array) -> Array:
            array = self._padded(array, sides_of_padding(self.padding or 0))
            height, width = array.shape[:2]
            if self.pad_if_needed:
                x, y = max(wide - width, 0), max(tall - height, 0)
                array = self._padded(array, (x, y, x, y))
            check_fits(array, tall, wide)
            top = int(rng.integers(array.shape[0] - tall + 1))
            left = int(rng.integers(array.shape[1] - wide + 1))
            return cut_out(array, top, left, tall, wide)

        return changed_pixels(image, cut)

    def _padded(self, array: Array, sides: tuple[int, ...]) -> Array:
        return padded(array, sides, colors_of(self.fill_value), self.padding_mode)


@dataclass(frozen=True, slots=True)
class Pad:
    """Add pixels around an image.

    Args:
        padding: pixels: one number, (left and right, top and bottom), or (left, top,
            right, bottom).
        fill_value: their value: 0 to 255, or three such numbers.
        padding_mode: one of `Border`.

    Raises:
        SpecError: an argument is out of range.
    """

    padding: Size
    fill_value: int | tuple[int, int, int] = 0
    padding_mode: Border = Border.CONSTANT

    def __post_init__(self) -> None:
        sides_of_padding(self.padding)
        colors_of(self.fill_value)

    def __call__(self, image: Any) -> Any:
        sides, fill = sides_of_padding(self.padding), colors_of(self.fill_value)
        return changed_pixels(
            image, lambda it: padded(it, sides, fill, self.padding_mode)
        )


def check_fits(image: Array, tall: int, wide: int) -> None:
    """Check that a part of this height and width is inside an image.

    Raises:
        SampleError: it is not.
    """
    height, width = image.shape[:2]
    if tall > height or wide > width:
        raise SampleError(
            f"a part must fit into the image, got {tall} x {wide} of {height} x {width}"
            " pixels; put vision.Resize() before it, or set pad_if_needed=True"
        )


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(RandomOperator):
    """Cut a random part out of an image and resize it.

    The part's share of the image's area is uniform in `scale`, its aspect (width /
    height) log-uniform in `ratio`, and its place uniform. If none of `max_attempts`
    parts fits, the largest central one with an aspect within `ratio` is taken.

    Args:
        size: (height, width) in pixels, or one number for both.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width / height of the part.
        interpolation: one of `Inter`.
        max_attempts: parts to try.

    Raises:
        SpecError: an argument is out of range.
    """

    size: Size
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    interpolation: Inter = Inter.BILINEAR
    max_attempts: int = 10

    def __post_init__(self) -> None:
        pair_of_sides(self.size)
        range_of("scale", self.scale, 0, usual="(0.08, 1.0) is usual")
        range_of("ratio", self.ratio, 1e-6, usual="(3/4, 4/3) is usual")
        check_interpolation("interpolation", self.interpolation)
        whole_number("max_attempts", self.max_attempts, 1, "10 is usual")

    def drawn(self, image: Any, rng: Rng) -> Any:
        array = array_of(image)
        box = self._box((array.shape[0], array.shape[1]), rng)
        if is_picture(image):
            sides = box.left, box.top, box.left + box.width, box.top + box.height
            image = image.crop(sides)
        else:
            image = box.cut(array)
        return Resize(pair_of_sides(self.size), self.interpolation)(image)

    def _box(self, of: tuple[int, int], rng: Rng) -> Box:
        """Draw the part of an image of this height and width."""
        height, width = of
        low, high = self.ratio
        for _ in range(self.max_attempts):
            area = height * width * rng.uniform(*self.scale)
            aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
            wide = rounded(math.sqrt(area * aspect))
            tall = rounded(wide / aspect)
            if 0 < tall <= height and 0 < wide <= width:
                top = int(rng.integers(height - tall + 1))
                return Box(top, int(rng.integers(width - wide + 1)), tall, wide)
        tall = min(height, rounded(width / low))
        wide = min(width, rounded(height * high))
        top, left = rounded((height - tall) / 2), rounded((width - wide) / 2)
        return Box(top, left, tall, wide)


def rounded(number: float) -> int:
    """Return the nearest whole number; halves go up, as in C."""
    return math.floor(number + 0.5)


class RandomCropDecodeResize(RandomResizedCrop):
    """Decode a random part of an image file and resize it: see `RandomResizedCrop`.

    Only the part is decoded, where penstock's extension in C was built.
    """

    __slots__ = ()

    def drawn(self, image: Any, rng: Rng) -> Array:
        data = encoded(image)
        of = size_of(data)
        box = self._box(of, rng)
        part = Placement(box, box.height, box.width, of, antialias=False)
        pixels = DECODER.crop(data, part, to_end=True)
        return resized(pixels, *pair_of_sides(self.size), self.interpolation)


class RandomHorizontalFlip(ByChance):
    """Exchange left and right of an image with probability `prob`."""

    __slots__ = ()

    def _made(self, image: Any) -> Any:
        return changed_pixels(image, mirror)


class RandomVerticalFlip(ByChance):
    """Exchange top and bottom of an image with probability `prob`."""

    __slots__ = ()

    def _made(self, image: Any) -> Any:
        return changed_pixels(image, lambda it: np.ascontiguousarray(it[::-1]))


@dataclass(frozen=True, slots=True)
class RandomRotation(RandomOperator):
    """Rotate an image counter-clockwise by a random angle.

    Args:
        degrees: (min, max), or d for (-d, d).
        resample: `Inter.NEAREST` or `BILINEAR`; for Pillow images also `BICUBIC`.
        expand: whether the image grows so that all of it is seen.
        center: (x, y) of the point that stays, in pixels; None: the middle.
        fill_value: the value of pixels from outside: 0 to 255, or three such numbers.

    Raises:
        SpecError: an argument is out of range.
    """

    degrees: float | Range
    resample: Inter = Inter.NEAREST
    expand: bool = False
    center: tuple[float, float] | None = None
    fill_value: int | tuple[int, int, int] = 0

    def __post_init__(self) -> None:
        around("degrees", self.degrees, center=0, low=-1e7, high=1e7)
        check_interpolation("resample", self.resample)
        colors_of(self.fill_value)

    def drawn(self, image: Any, rng: Rng) -> Any:
        low, high = around("degrees", self.degrees, center=0, low=-1e7, high=1e7)
        if high - low >= 360:
            low, high = -180, 180
        angle, fill = rng.uniform(low, high), colors_of(self.fill_value)
        if is_picture(image):
            kind = pillow_filter(self.resample)
            return image.rotate(
                angle % 360, kind, self.expand, self.center, fillcolor=fill
            )
        array = array_of(image)
        height, width = array.shape[:2]
        middle = self.center or ((width - 1) / 2, (height - 1) / 2)
        a, b, x, c, d, y = sheared(-angle, 1, (0, 0), *middle)
        if self.expand:
            wide = abs(a) * width + abs(b) * height
            tall = abs(c) * width + abs(d) * height
            x, y = x + (wide - width) / 2, y + (tall - height) / 2
            height, width = round(tall), round(wide)
        # MindSpore has the colors in OpenCV's order here.
        return warped(
            array, (a, b, x, c, d, y), (height, width), self.resample, fill[::-1]
        )


@dataclass(frozen=True, slots=True)
class RandomAffine(RandomOperator):
    """Rotate, shift, scale and shear an array about its middle by random amounts.

    Args:
        degrees: (min, max) of the rotation, or d for (-d, d).
        translate: (min, max) of the shift to the right as a share of the width, or
            these two and (min, max) of the shift down as a share of the height.
        scale: (min, max) of the scale.
        shear: (min, max) degrees along x, or these two and those along y, or s for
            (-s, s) along x.
        resample: `Inter.NEAREST` or `BILINEAR`.
        fill_value: the value of pixels from outside: 0 to 255, or three such numbers.

    Raises:
        SpecError: an argument is out of range.
    """

    degrees: float | Range
    translate: tuple[float, ...] | None = None
    scale: Range | None = None
    shear: float | tuple[float, ...] | None = None
    resample: Inter = Inter.NEAREST
    fill_value: int | tuple[int, int, int] = 0

    def __post_init__(self) -> None:
        self._ranges()
        check_interpolation("resample", self.resample)
        colors_of(self.fill_value)

    def drawn(self, image: Any, rng: Rng) -> Any:
        if is_picture(image):
            raise SampleError(
                "RandomAffine takes an array [H, W, C], got a Pillow image; leave out"
                " to_pil=True or ToPIL() before it"
            )
        array = array_of(image)
        height, width = array.shape[:2]
        angle, right, down, scale, *shear = (rng.uniform(*it) for it in self._ranges())
        middle = (width - 1) / 2, (height - 1) / 2
        a, b, x, c, d, y = sheared(angle, scale, shear, *middle)
        matrix = a, b, x + right * width, c, d, y + down * height
        fill = colors_of(self.fill_value)
        return warped(array, matrix, (height, width), self.resample, fill)

    def _ranges(self) -> list[Range]:
        """Return (min, max) of angle, shifts right and down, scale, and both shears.

        Raises:
            SpecError: one is out of range.
        """
        shear = self.shear or 0
        if isinstance(shear, int | float):
            shear = (-shear, shear)
        shifts, shears = self.translate or (0, 0), shear
        for name, numbers in (("translate", shifts), ("shear", shears)):
            check(
                isinstance(numbers, list | tuple) and len(numbers) in (2, 4),
                f"`{name}` must have two or four numbers, got {numbers!r}; (min, max)"
                " is usual",
            )
        low_x, high_x, low_y, high_y = (*shears, 0, 0)[:4]
        left, right, up, down = (*shifts, 0, 0)[:4]
        return [
            around("degrees", self.degrees, center=0, low=-1e7, high=1e7),
            range_of("translate", (left, right), -1, 1),
            range_of("translate", (up, down), -1, 1),
            range_of("scale", self.scale or (1, 1), 1e-6),
            range_of("shear", (low_x, high_x)),
            range_of("shear", (low_y, high_y)),
        ]
