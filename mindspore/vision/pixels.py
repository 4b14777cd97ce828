"""Computes on arrays `[H, W, C]` and `[H, W]` what MindSpore computes with OpenCV.

Results are OpenCV's but for rounding: tests/test_mindspore_operators.py has the largest
difference of each operator. Functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from ...errors import SampleError, check
from ...pipeline.image import geometry
from ...pipeline.image.geometry import described
from .utils import Border, Inter

Array = NDArray[Any]
# Two rows of three: where a pixel of the old image goes.
Matrix = tuple[float, float, float, float, float, float]

# Steps per pixel in which OpenCV computes positions.
SCALE = 1024
# Names of interpolations in torch.
MODES = {Inter.LINEAR: "bilinear", Inter.CUBIC: "bicubic"}


def is_picture(image: object) -> bool:
    """Whether it is an image of Pillow."""
    return isinstance(image, PIL.Image.Image)


def array_of(image: Any, channels: int | None = None) -> Array:
    """Return an image as an array `[H, W, C]` or `[H, W]`.

    Args:
        image: an array, or an image of Pillow.
        channels: how many it must have; None: any number.

    Raises:
        SampleError: it is something else.
    """
    array: Array = np.asarray(image)
    is_image = isinstance(image, np.ndarray) or is_picture(image)
    if not is_image or array.ndim not in (2, 3) or not array.size:
        raise SampleError(
            "this operator takes an array [H, W, C] or [H, W] or a Pillow image, got"
            f" {described(image)}; put vision.Decode() before it"
        )
    if channels is not None and array.shape[2:] != (channels,):
        raise SampleError(
            f"this operator takes an array [H, W, {channels}], got {described(image)};"
            " put it before HWC2CHW() or ToTensor(), and Decode() before it"
        )
    return array


def changed_pixels(image: Any, change: Callable[[Array], Array]) -> Any:
    """Return an image of the same kind, its array changed by a function."""
    pixels = change(array_of(image))
    return PIL.Image.fromarray(pixels) if is_picture(image) else pixels


def by_pillow(image: Any, change: Callable[[PIL.Image.Image], PIL.Image.Image]) -> Any:
    """Return an image of the same kind, its picture changed by a function of Pillow."""
    if is_picture(image):
        return change(image)
    array = array_of(image)
    if array.dtype != np.uint8:
        raise SampleError(
            f"this operator takes uint8, got {described(image)}; put it before"
            " Rescale() or ToTensor()"
        )
    flat = array[..., 0] if array.shape[2:] == (1,) else array
    picture = change(PIL.Image.fromarray(flat))
    return np.array(picture).reshape((picture.height, picture.width, *array.shape[2:]))


def saturated(values: Array, kind: np.dtype[Any]) -> Array:
    """Return numbers as another type; for integers rounded, and cut off at its ends."""
    if kind.kind == "f":
        return values.astype(kind)
    ends = np.iinfo(kind)
    pixels: Array = np.clip(np.rint(values), ends.min, ends.max).astype(kind)
    return pixels


def blended(first: Array, second: Any, share: float) -> Array:
    """Return `share` of the first image and 1 - `share` of the second."""
    one, other = np.float32(share), np.float32(1 - share)
    return saturated(first.astype(np.float32) * one + second * other, first.dtype)


# Places.


def cut_out(image: Array, top: int, left: int, height: int, width: int) -> Array:
    """Return a part of an image, in new memory, with zeros for what lies outside."""
    canvas = np.zeros((height, width, *image.shape[2:]), image.dtype)
    part = image[max(top, 0) : top + height, max(left, 0) : left + width]
    y, x = max(-top, 0), max(-left, 0)
    canvas[y : y + part.shape[0], x : x + part.shape[1]] = part
    return canvas


def padded(
    image: Array, sides: Sequence[int], fill: Sequence[int], border: Border
) -> Array:
    """Return an image with pixels around it: left, top, right, bottom."""
    left, top, right, bottom = sides
    if not any(sides):
        return image
    widths = ((top, bottom), (left, right), (0, 0))[: image.ndim]
    if border is not Border.CONSTANT:
        pad: Any = np.pad  # its types name each mode
        canvas: Array = pad(image, widths, border.value)
        return canvas
    height, width = image.shape[:2]
    size = (top + height + bottom, left + width + right, *image.shape[2:])
    canvas = np.empty(size, image.dtype)
    canvas[:] = fill[: size[2]] if len(size) == 3 and size[2] <= 3 else fill[0]
    canvas[top : top + height, left : left + width] = image
    return canvas


def short_side_of(image: Array, short: int) -> tuple[int, int]:
    """Return (height, width) of the same aspect, as MindSpore rounds it (in float32).

    The smaller side becomes `short` pixels.
    """
    height, width = image.shape[:2]
    if height < width:
        ratio = np.float32(width) / np.float32(height)
        return short, int(ratio * np.float32(short))
    ratio = np.float32(height) / np.float32(width)
    return int(ratio * np.float32(short)), short


def resized(image: Array, height: int, width: int, inter: Inter) -> Array:
    """Return an image of another size, without antialiasing, as OpenCV does it.

    Raises:
        SpecError: arrays cannot be resized in this way.
    """
    check(
        inter is not Inter.ANTIALIAS,
        "Inter.ANTIALIAS is for Pillow images, got an array; put vision.ToPIL() before"
        " it, or use Inter.AREA",
    )
    if inter is Inter.NEAREST:
        rows, columns = (
            np.minimum(np.arange(after) * (1 / (after / before)), before - 1).astype(
                int
            )
            for before, after in zip(image.shape, (height, width), strict=False)
        )
        pixels: Array = image[rows][:, columns]
        return pixels
    if inter is Inter.PILCUBIC:
        cubic = PIL.Image.Resampling.BICUBIC
        pixels = by_pillow(image, lambda it: it.resize((width, height), cubic))
        return np.asarray(pixels)
    if inter is Inter.AREA:
        return averaged(image, height, width)
    deep = image.reshape((*image.shape[:2], -1))
    shape = (height, width, *image.shape[2:])
    if inter is Inter.LINEAR and image.dtype == np.uint8:
        return geometry.resize(deep, height, width, antialias=False).reshape(shape)
    # torch's cubic interpolation of bytes is off by up to 3.
    values = deep if image.dtype.kind == "f" else deep.astype(np.float32)
    planes = torch.from_numpy(np.require(values, requirements=("C", "W")))
    tensor = torch.nn.functional.interpolate(
        planes.permute(2, 0, 1)[None],
        size=(height, width),
        mode=MODES[inter],
        align_corners=False,
        antialias=False,
    )
    pixels = saturated(tensor[0].numpy(), image.dtype).transpose(1, 2, 0)
    return np.ascontiguousarray(pixels).reshape(shape)


def averaged(image: Array, height: int, width: int) -> Array:
    """Return an image of another size whose pixels are means of those they cover."""
    rows, columns = image.shape[:2]
    shrinks = height <= rows and width <= columns
    values = image.astype(np.float32)
    values = np.tensordot(shares(rows, height, shrinks=shrinks), values, (1, 0))
    values = np.tensordot(shares(columns, width, shrinks=shrinks), values, (1, 1))
    return saturated(np.ascontiguousarray(np.swapaxes(values, 0, 1)), image.dtype)


def shares(before: int, after: int, *, shrinks: bool) -> Array:
    """Return how much of each old pixel is in each new one, `[after, before]`.

    If the image grows on either side, OpenCV blends two pixels: the later one begins to
    show where the new pixel reaches into it.
    """
    inverse = after / before
    scale = 1 / inverse  # rounded as in OpenCV
    starts, ends = np.arange(after) * scale, np.arange(1, after + 1) * scale
    pixels = np.arange(before)
    if shrinks:
        low = np.maximum(starts[:, None], pixels)
        high = np.minimum(ends[:, None], pixels + 1)
        overlap: Array = np.maximum(high - low, 0) / scale
        return overlap.astype(np.float32)
    first = np.floor(starts).astype(int)
    later = (np.arange(1, after + 1) - (first + 1) * inverse).astype(np.float32)
    later = np.where(later <= 0, 0, later - np.floor(later))[:, None]
    second = np.minimum(first + 1, before - 1)[:, None]
    weights: Array = (pixels == first[:, None]) * (1 - later)
    weights = weights + (pixels == second) * later
    return weights.astype(np.float32)


def sheared(
    degrees: float, scale: float, shear: Sequence[float], x: float, y: float
) -> Matrix:
    """Return the matrix that shears, then rotates clockwise, about a point, in pixels.

    Args:
        degrees: of the rotation.
        scale: by which the image grows.
        shear: degrees along x, and along y.
        x: the point that stays.
        y: likewise.
    """
    angle, along, across = (math.radians(it) for it in (degrees, *shear))
    lean = math.tan(along)
    cosine = math.cos(angle - across) / math.cos(across)
    sine = math.sin(angle - across) / math.cos(across)
    a, b = scale * cosine, scale * (-cosine * lean - math.sin(angle))
    c, d = scale * sine, scale * (-sine * lean + math.cos(angle))
    return a, b, x - a * x - b * y, c, d, y - c * x - d * y


def warped(
    image: Array, matrix: Matrix, size: tuple[int, int], inter: Inter, fill: Any
) -> Array:
    """Return an image moved by a matrix, with OpenCV's positions in 1/1024 pixel.

    Args:
        image: `[H, W, C]` or `[H, W]`.
        matrix: where its pixels go.
        size: height and width of the new image, in pixels.
        inter: `NEAREST`, or `LINEAR` (in steps of 1/32 pixel).
        fill: the value of pixels that come from outside.

    Raises:
        SpecError: it is another interpolation.
    """
    check(
        inter in (Inter.NEAREST, Inter.LINEAR),
        "arrays are rotated with Inter.NEAREST or Inter.BILINEAR, got"
        f" Inter.{inter.name}; use one of these, or put vision.ToPIL() before it",
    )
    (a, b, e), (c, d, f) = matrix[:3], matrix[3:]
    area = a * d - b * c
    a, b, c, d = d / area, -b / area, -c / area, a / area
    rows, columns = (np.arange(side) for side in size)

    def places(on_x: float, on_y: float, shift: float) -> Array:
        along = np.rint(on_x * columns * SCALE).astype(np.int64)
        down = np.rint((on_y * rows + shift) * SCALE).astype(np.int64)
        positions: Array = down[:, None] + along
        return positions

    x, y = places(a, b, -a * e - b * f), places(c, d, -c * e - d * f)
    if inter is Inter.NEAREST:
        return pixels_at(image, (y + 512) >> 10, (x + 512) >> 10, fill)
    x, y = (x + 16) >> 5, (y + 16) >> 5
    lanes = (..., *(None,) * (image.ndim - 2))
    right, low = ((it[lanes] & 31) / np.float32(32) for it in (x, y))
    values, x, y = image.astype(np.float32), x >> 5, y >> 5
    upper = pixels_at(values, y, x, fill) * (1 - right)
    upper += pixels_at(values, y, x + 1, fill) * right
    lower = pixels_at(values, y + 1, x, fill) * (1 - right)
    lower += pixels_at(values, y + 1, x + 1, fill) * right
    return saturated(upper * (1 - low) + lower * low, image.dtype)


def pixels_at(image: Array, y: Array, x: Array, fill: Any) -> Array:
    """Return the pixels at these places, and `fill` for those outside the image."""
    height, width = image.shape[:2]
    pixels: Array = image[np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)]
    outside = (y < 0) | (y >= height) | (x < 0) | (x >= width)
    colored = image.ndim == 3 and image.shape[2] <= 3
    pixels[outside] = fill[: image.shape[2]] if colored else fill[0]
    return pixels


# Colors.

# Shares of red, green and blue in grey, of 2**15.
GRAY = np.array((9798, 19235, 3735))
# Steps of hue.
CIRCLE = 256
LEVELS = np.maximum(np.arange(256), 1)
BY_VALUE = np.rint((255 << 12) / LEVELS).astype(np.int32)
# What saturation and hue are multiplied by, in OpenCV's fixed point.
BY_SPREAD = np.rint((CIRCLE << 12) / (6.0 * LEVELS)).astype(np.int32)


def gray_of(image: Array) -> Array:
    """Return the brightness of each pixel of an image `[H, W, 3]`, `[H, W, 1]`."""
    if image.dtype.kind == "f":
        gray: Array = image @ (GRAY / 2.0**15).astype(image.dtype)
    else:
        gray = (image.astype(np.int64) @ GRAY + (1 << 14)) >> 15
    return gray[..., None]


def hue_shifted(image: Array, share: float) -> Array:
    """Return an image `uint8 [H, W, 3]` with its hues moved by a share of the circle.

    The steps are those of OpenCV's conversion to HSV in 8 bits. The way back is its
    formula: a color is as far below the brightest one as its hue is from its own.
    """
    red, green, blue = np.moveaxis(image.astype(np.int32), 2, 0)
    value = np.maximum(np.maximum(red, green), blue)  # faster than max(axis=2)
    spread = value - np.minimum(np.minimum(red, green), blue)
    saturation = (spread * BY_VALUE[value] + 2048) >> 12
    sixths = np.where(
        value == red,
        green - blue,
        np.where(value == green, blue - red + 2 * spread, red - green + 4 * spread),
    )
    steps = ((sixths * BY_SPREAD[spread] + 2048) >> 12) + math.trunc(share * 255)
    hue = (steps % CIRCLE) * np.float32(6 / 255)
    depth = value * (saturation / np.float32(255))
    pixels = np.empty_like(image)
    for channel, place in enumerate((5, 3, 1)):
        apart = np.fmod(hue + np.float32(place), np.float32(6))
        near = np.clip(np.minimum(apart, 4 - apart), 0, 1)
        pixels[..., channel] = value - depth * near  # cut off, as its vector code does
    return pixels


def equalized(channel: Array) -> Array:
    """Return one channel `uint8 [H, W]` with its histogram made flat."""
    counts = np.bincount(channel.ravel(), minlength=256)
    first = counts[channel.min()]
    if first == channel.size:
        return channel.copy()
    scale = np.float32(255 / (channel.size - first))
    flat: Array = saturated((np.cumsum(counts) - first) * scale, channel.dtype)[channel]
    return flat


def sharpened(image: Array, share: float) -> Array:
    """Return an image, blurred if `share` < 1 and sharpened above; edges stay."""
    values, pixels = image.astype(np.float32), image.copy()
    height, width = image.shape[:2]
    if min(height, width) < 3:
        return pixels
    views = [
        values[y : height - 2 + y, x : width - 2 + x]
        for y in range(3)
        for x in range(3)
    ]
    inner = (slice(1, -1), slice(1, -1))
    blur = saturated((sum(views) + 4 * views[4]) / np.float32(13), image.dtype)
    pixels[inner] = blended(image[inner], blur, share)
    return pixels
