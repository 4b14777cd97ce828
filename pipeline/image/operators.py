"""The operators that a user writes into `map`.

Each is a frozen value which compares, pickles and prints as the call that makes it. The
lower-case class names are what makes that true, in the log as well: they are used as
functions, as `functools.partial` is.
"""
# ruff: noqa: N801

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import numpy as np

from ...engine.plan import Context
from ...errors import SpecError, check
from .codec import decode_reduced, image_size
from .crop_decoder import CropDecoder
from .geometry import (
    Box,
    Range,
    central_box,
    mirror,
    random_box,
    resize,
    short_side_size,
)
from .sample import Encoded, Image, Result, on_image, require_encoded, require_image

REDUCTIONS = (8, 4, 2)
"""Scales 1/n at which libjpeg decodes faster than in full."""


@dataclass(frozen=True, slots=True)
class random_resized_crop:
    """Cut a random part out of an image and resize it to a square.

    The geometry is torchvision's (see `random_box`), drawn from the ticket's `rng`.

    Args:
        size: side of the square in pixels, >= 1; None: the context's `image_size`,
            which a schedule sets.
        scale: least and greatest share of the image's area, > 0 and <= 1.
        ratio: least and greatest width / height of the part, > 0.
        antialias: filter when shrinking, as Pillow does; False is faster and aliases.
    """

    size: int | None
    _: KW_ONLY
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    antialias: bool = True

    def __post_init__(self) -> None:
        check_crop(self.size, self.scale, self.ratio)

    def __call__(
        self,
        sample: object,
        rng: np.random.Generator,
        ctx: Context | None = None,
    ) -> Result:
        """Return `uint8 [size, size, 3]` for an image `uint8 [H, W, 3]`."""
        size = wanted_size(self.size, ctx)

        def cropped(value: object) -> Image:
            image = require_image(value)
            height, width, _ = image.shape
            box = random_box(height, width, self.scale, self.ratio, rng)
            return resize(box.cut(image), size, size, antialias=self.antialias)

        return on_image(sample, cropped)


@dataclass(frozen=True, slots=True)
class horizontal_flip:
    """Exchange left and right of an image with probability `p`, 0 to 1."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability("p", self.p)

    def __call__(self, sample: object, rng: np.random.Generator) -> Result:
        """Return an image `uint8 [H, W, 3]` mirrored, or as it is."""
        flip = rng.random() < self.p

        def flipped(value: object) -> Image:
            image = require_image(value)
            return mirror(image) if flip else image

        return on_image(sample, flipped)


@dataclass(frozen=True, slots=True)
class resize_short_side:
    """Resize an image, keeping its aspect, until its shorter side has `size` pixels."""

    size: int
    _: KW_ONLY
    antialias: bool = True

    def __post_init__(self) -> None:
        check_size(self.size)

    def __call__(self, sample: object) -> Result:
        """Return `uint8 [h, w, 3]` with min(h, w) = size for `uint8 [H, W, 3]`."""

        def resized(value: object) -> Image:
            image = require_image(value)
            height, width, _ = image.shape
            tall, wide = short_side_size(height, width, self.size)
            return resize(image, tall, wide, antialias=self.antialias)

        return on_image(sample, resized)


@dataclass(frozen=True, slots=True)
class center_crop:
    """Cut a square of `size` pixels out of the middle of an image.

    Raises (when called):
        ValueError: the image is smaller than that.
    """

    size: int

    def __post_init__(self) -> None:
        check_size(self.size)

    def __call__(self, sample: object) -> Result:
        """Return `uint8 [size, size, 3]` for an image `uint8 [H, W, 3]`."""
        return on_image(sample, self._cut)

    def _cut(self, value: object) -> Image:
        image = require_image(value)
        height, width, _ = image.shape
        if min(height, width) < self.size:
            raise ValueError(
                f"`center_crop({self.size})` needs {self.size} pixels on both sides, "
                f"got {height} x {width}; put resize_short_side({self.size}) before it"
            )
        # A copy, so that the batch does not keep the whole photo alive.
        return central_box(height, width, self.size, self.size).cut(image).copy()


@dataclass(frozen=True, slots=True)
class decode_random_resized_crop:
    """`decode`, `random_resized_crop` and `horizontal_flip` in one, decoding less.

    The crop is drawn from the file's header; then the photo is decoded no larger than
    the crop needs. Where it is decoded in full, the pixels are those of the three.

    With penstock's extension in C (`penstock doctor` says whether it is there) only the
    crop of a usual JPEG is decoded; the pixels, and the errors, are the same.

    Args:
        size, scale, ratio, antialias: as for `random_resized_crop`.
        flip: probability of a mirror image, 0 to 1.
        reducing_gap: decode at 1/2, 1/4 or 1/8 scale where that leaves the crop at
            least this many times `size` pixels on both sides, >= 1 (Pillow's `resize`
            has the same option). On 500 ImageNet photos the crops decoded so differ
            from Pillow's, decoded in full, by 1.3/255 in the mean with 3 and by 1.9/255
            with 2; crops decoded in full by 0.02/255. `math.inf`: always in full.
    """

    TO_END: ClassVar[bool] = True
    """Whether what is below the crop is read, and damage there is an error."""

    size: int | None
    _: KW_ONLY
    antialias: bool = True
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    flip: float = 0.0
    reducing_gap: float = 3.0
    decoder: CropDecoder = field(
        default=CropDecoder(), init=False, repr=False, compare=False
    )
    """What decodes: caches, and ranks, tell it by its version."""

    def __post_init__(self) -> None:
        check_crop(self.size, self.scale, self.ratio)
        check_probability("flip", self.flip)
        check(
            self.reducing_gap >= 1,
            f"`reducing_gap` must be >= 1, got {self.reducing_gap}; below that the "
            "crop would be decoded smaller than `size`",
        )

    def __call__(
        self,
        sample: object,
        rng: np.random.Generator,
        ctx: Context | None = None,
    ) -> Result:
        """Return `uint8 [size, size, 3]` for the bytes of an image file."""
        size = wanted_size(self.size, ctx)
        return on_image(
            sample, lambda data: self._crop(require_encoded(data), size, rng)
        )

    def _crop(self, data: Encoded, size: int, rng: np.random.Generator) -> Image:
        shape = image_size(data)
        box = random_box(*shape, self.scale, self.ratio, rng)
        flip = rng.random() < self.flip
        factor = reduction(box, size * self.reducing_gap)
        if factor == 1:
            pixels = self.decoder.decode(data, shape, box, to_end=self.TO_END)
        else:
            pixels = box.reduced(factor).cut(decode_reduced(data, factor))
        image = resize(pixels, size, size, antialias=self.antialias)
        return mirror(image) if flip else image


@dataclass(frozen=True, slots=True)
class decode_only_random_resized_crop(decode_random_resized_crop):
    """`decode_random_resized_crop`, blind to damage below the crop, and faster for it.

    It takes the same arguments. With penstock's extension a usual JPEG is read only to
    the last row of the crop, so changed codes below it raise no error. A file that was
    cut off, or whose markers are out of order, is an error all the same. Without the
    extension the two are one.
    """

    TO_END: ClassVar[bool] = False


def reduction(box: Box, pixels: float) -> int:
    """Return the largest reduction that leaves `box` `pixels` on both sides; else 1."""
    room = box.short_side / pixels
    return next((factor for factor in REDUCTIONS if factor <= room), 1)


def wanted_size(size: int | None, ctx: Context | None) -> int:
    """Return `size`, or where it is None the context's."""
    if size is None:
        size = None if ctx is None else ctx.image_size
    if size is None:
        raise SpecError(
            "`size` is None and the context has no `image_size`; give the operator a "
            "size, or the pipeline a schedule with image sizes"
        )
    return size


def check_crop(size: int | None, scale: Range, ratio: Range) -> None:
    """Raise `SpecError` unless a random resized crop can be made of these."""
    if size is not None:
        check_size(size)
    check(
        0 < scale[0] <= scale[1] <= 1,
        f"`scale` must be (least, greatest) with 0 < least <= greatest <= 1, got "
        f"{scale}; (0.08, 1.0) is usual",
    )
    check(
        0 < ratio[0] <= ratio[1],
        "`ratio` must be (least, greatest) with 0 < least <= greatest, got "
        f"{ratio}; (3/4, 4/3) is usual",
    )


def check_size(size: object) -> None:
    """Raise `SpecError` unless `size` is a side in pixels."""
    check(
        isinstance(size, int) and size >= 1,
        f"`size` must be an int >= 1, in pixels, got {size!r}; 224 is usual",
    )


def check_probability(name: str, value: float) -> None:
    """Raise `SpecError` unless `value` is within 0 and 1."""
    check(
        0 <= value <= 1,
        f"`{name}` must be a probability, 0 to 1, got {value}; 0.5 is usual",
    )
