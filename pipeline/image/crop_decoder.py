"""Crops of JPEGs, decoded and resized in native code, several at once.

`_photos.c` is compiled if a compiler and libjpeg-turbo's headers are installed. It may
be linked to another release of libjpeg-turbo than simplejpeg, which brings its own, and
it must resize as the installed torch does. So it is used only once it has made the same
pixels. Without it, and for files that it refuses, the whole image is decoded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import simplejpeg

from .codec import decode_reduced
from .geometry import Box, mirror, resize
from .sample import Encoded, Image

FULL = "in full"
"""The version of a decoder without the extension."""
TRIED = Box(19, 21, 33, 35)
"""A box whose edges lie inside iMCUs, with rows and columns left out on all sides."""
TRIED_SIDE = 96
"""Height and width in pixels of the images on which the extension is tried."""
TRIED_SIZES = ((TRIED.height, TRIED.width), (20, 47))
MAX_SIDE = 65_500
"""Pixels of a JPEG's side, beyond which the extension takes no image."""
SAMPLINGS = ("444", "422", "440", "420", "Gray")


class Crop(NamedTuple):
    """Which part of a file to take."""

    of: tuple[int, int]
    """Height and width of the whole image in pixels, from `image_size`."""
    box: Box
    """The part, in pixels of the whole image."""
    factor: int = 1
    """The n of the scale 1/n to decode at: 1, 2, 4 or 8."""
    mirrored: bool = False

    @property
    def reduced(self) -> Box:
        """The part, in pixels of the image at 1/`factor` scale."""
        return self.box if self.factor == 1 else self.box.reduced(self.factor)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The crop as the extension takes it."""
        box = self.reduced
        sides = box.top, box.left, box.height, box.width
        return *self.of, self.factor, *sides, int(self.mirrored)

    def decoded(self, data: Encoded) -> Image:
        """Decode all of the image; return the part, at 1/`factor` scale, not mirrored.

        Raises:
            ValueError: as for `decode_reduced`.
        """
        return self.reduced.cut(decode_reduced(data, self.factor))


@dataclass(frozen=True, slots=True)
class CropDecoder:
    """Decodes and resizes crops. Fingerprints identify it by its version."""

    @property
    def version(self) -> str:
        """The versions of the extension and its libjpeg-turbo; `FULL` without it."""
        extension, _ = crop_extension()
        return FULL if extension is None else str(extension.VERSION)

    def __penstock_fingerprint__(self) -> str:
        return self.version

    def sizes(self, files: list[Encoded]) -> list[tuple[int, int]]:
        """Return the height and width of each image; (0, 0) if a file is refused."""
        extension, _ = crop_extension()
        found = np.zeros((len(files), 2), np.int32)
        if extension is not None:
            extension.sizes(files, found)
        return [(height, width) for height, width in found.tolist()]

    def crops(
        self,
        files: list[Encoded],
        crops: Sequence[Crop],
        size: tuple[int, int],
        *,
        to_end: bool,
    ) -> list[Image | None]:
        """Return a crop of each file, resized with antialiasing: `uint8 [*size, 3]`.

        They lie in one piece of memory.

        Args:
            files: the bytes of each.
            crops: which part of each.
            size: height and width of all results in pixels.
            to_end: also read each file below its box. Otherwise a file that was cut off
                there, or whose markers are out of order, is still refused, but changed
                codes may go unnoticed.

        Returns:
            None for a file that is refused, or damaged.
        """
        extension, _ = crop_extension()
        if extension is None:
            return [None] * len(files)
        return made_by(extension, files, crops, size, to_end=to_end)

    def crop(
        self,
        data: Encoded,
        crop: Crop,
        size: tuple[int, int],
        *,
        antialias: bool,
        to_end: bool,
    ) -> Image:
        """Return one crop, `uint8 [*size, 3]`, of any image file.

        Args:
            data: the bytes of the file.
            crop: which part of it.
            size: height and width of the result in pixels.
            antialias: filter when shrinking.
            to_end: as for `crops`.

        Raises:
            ValueError: as for `decode_reduced`.
        """
        if antialias:
            (image,) = self.crops([data], [crop], size, to_end=to_end)
            if image is not None:
                return image
            pixels = None
        else:
            box, upright = crop.reduced, crop._replace(mirrored=False)
            only = box.height, box.width
            (pixels,) = self.crops([data], [upright], only, to_end=to_end)
        if pixels is None:
            pixels = crop.decoded(data)
        return resized(pixels, size, antialias=antialias, mirrored=crop.mirrored)


def resized(
    image: Image, size: tuple[int, int], *, antialias: bool, mirrored: bool = False
) -> Image:
    """Return an image resized bilinearly, as `resize` does it: `uint8 [*size, 3]`.

    Args:
        image: `uint8 [H, W, 3]`.
        size: height and width of the result in pixels.
        antialias: filter when shrinking.
        mirrored: exchange left and right.
    """
    extension, _ = crop_extension()
    if extension is None or not antialias or max(image.shape + size) > MAX_SIDE:
        made = resize(image, *size, antialias=antialias)
        return mirror(made) if mirrored else made
    pixels: Image = np.empty((*size, 3), np.uint8)
    extension.resize(np.ascontiguousarray(image), pixels, mirrored, False)  # noqa: FBT003
    return pixels


@cache
def crop_extension() -> tuple[Any | None, str]:
    """Return the extension and an empty text, or None and why it is not used."""
    try:
        extension = importlib.import_module("._photos", __package__)
    except ModuleNotFoundError:
        return None, "it was not built"
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"
    if not all(is_exact(extension, sampling) for sampling in SAMPLINGS):
        found = extension.VERSION
        return None, f"its pixels differ from simplejpeg's or torch's (version {found})"
    return extension, ""


def is_exact(extension: Any, sampling: str) -> bool:
    """Whether the extension makes of an image of noise what simplejpeg and torch do."""
    shape = (TRIED_SIDE, TRIED_SIDE, 1 if sampling == "Gray" else 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = simplejpeg.encode_jpeg(
        noise, colorspace="Gray" if shape[2] == 1 else "RGB", colorsubsampling=sampling
    )
    for factor in (1, 2):
        crop = Crop((TRIED_SIDE, TRIED_SIDE), TRIED, factor, mirrored=True)
        image = mirror(crop.decoded(data))
        for size in TRIED_SIZES:
            (made,) = made_by(extension, [data], [crop], size, to_end=True)
            expected = resize(image, *size, antialias=True)
            if made is None or not np.array_equal(made, expected):
                return False
    return True


def made_by(
    extension: Any,
    files: list[Encoded],
    crops: Sequence[Crop],
    size: tuple[int, int],
    *,
    to_end: bool,
) -> list[Image | None]:
    """Return crops as the extension makes them, and None where it refuses the file."""
    pixels: Image = np.empty((len(files), *size, 3), np.uint8)
    numbers = np.array([crop.numbers for crop in crops], np.int32)
    made = extension.crops(files, numbers, pixels, to_end)
    return [image if done else None for image, done in zip(pixels, made, strict=True)]
