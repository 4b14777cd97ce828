"""Crops of JPEGs, decoded and resized in native code, several at once.

`_photos.c` is compiled if a compiler and libjpeg-turbo's headers are installed. It may
be linked to another release of libjpeg-turbo than simplejpeg, which brings its own, and
it must resize as the installed torch does. So it is used only once it has made the same
pixels. Without it, and for files that it refuses, the whole image is decoded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import simplejpeg

from .codec import decode_reduced
from .geometry import Box, Image, Placement, mirror, resize
from .sample import Encoded

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


@dataclass(frozen=True, slots=True)
class CropDecoder:
    """Decodes and resizes crops."""

    def __penstock_fingerprint__(self) -> str:
        """Return the versions of the extension and its libjpeg-turbo, or `FULL`."""
        extension, _ = crop_extension()
        return FULL if extension is None else str(extension.VERSION)

    def sizes(self, files: list[Encoded]) -> list[tuple[int, int]]:
        """Return the height and width of each image; (0, 0) if a file is refused."""
        extension, _ = crop_extension()
        found = np.zeros((len(files), 2), np.int32)
        if extension is not None:
            extension.sizes(files, found)
        return [(height, width) for height, width in found.tolist()]

    def crops(
        self, files: list[Encoded], placements: Sequence[Placement], *, to_end: bool
    ) -> list[Image | None]:
        """Return what is placed of each file, `uint8 [H, W, 3]`, without a canvas.

        Those of one size lie in one piece of memory.

        Args:
            files: the bytes of each.
            placements: which part of each, and how large it becomes.
            to_end: also read each file below its part. Otherwise a file that was cut
                off there, or whose markers are out of order, is still refused, but
                changed codes may go unnoticed.

        Returns:
            None for a file that is refused, or damaged.
        """
        made: list[Image | None] = [None] * len(files)
        extension, _ = crop_extension()
        if extension is None:
            return made
        sizes: dict[tuple[int, int], list[int]] = {}
        for at, each in enumerate(placements):
            if each.antialias or not each.resizes:
                sizes.setdefault((each.height, each.width), []).append(at)
        for size, places in sizes.items():
            images = made_by(
                extension,
                [files[at] for at in places],
                [placements[at] for at in places],
                size,
                to_end=to_end,
            )
            for at, image in zip(places, images, strict=True):
                made[at] = image
        return made

    def crop(self, data: Encoded, placement: Placement, *, to_end: bool) -> Image:
        """Return what is placed of any image file, as `crops` does.

        Raises:
            ValueError: as for `decode_reduced`.
        """
        (image,) = self.crops([data], [placement], to_end=to_end)
        if image is not None:
            return image
        box, part = placement.reduced, None
        if not placement.antialias:
            upright = replace(
                placement, height=box.height, width=box.width, mirrored=False
            )
            (part,) = self.crops([data], [upright], to_end=to_end)
        if part is None:
            part = box.cut(decode_reduced(data, placement.factor))
        return shaped(part, placement)


def shaped(part: Image, placement: Placement) -> Image:
    """Return a part of an image, resized and mirrored as the placement says."""
    size = placement.height, placement.width
    if part.shape[:2] != size:
        how = {"antialias": placement.antialias, "mirrored": placement.mirrored}
        return resized(part, size, **how)
    return mirror(part) if placement.mirrored else part


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
    whole = (TRIED_SIDE, TRIED_SIDE)
    for factor, size in product((1, 2), TRIED_SIZES):
        tried = Placement(TRIED, *size, whole, mirrored=True, factor=factor)
        (made,) = made_by(extension, [data], [tried], size, to_end=True)
        part = tried.reduced.cut(decode_reduced(data, factor))
        expected = mirror(resize(part, *size, antialias=True))
        if made is None or not np.array_equal(made, expected):
            return False
    return True


def made_by(
    extension: Any,
    files: list[Encoded],
    placements: Sequence[Placement],
    size: tuple[int, int],
    *,
    to_end: bool,
) -> list[Image | None]:
    """Return what the extension makes, all of one size; None for what it refuses."""
    pixels: Image = np.empty((len(files), *size, 3), np.uint8)
    numbers = np.array([numbers_of(each) for each in placements], np.int32)
    made = extension.crops(files, numbers, pixels, to_end)
    return [image if done else None for image, done in zip(pixels, made, strict=True)]


def numbers_of(placement: Placement) -> tuple[int, ...]:
    """Return a placement as the extension takes it."""
    box = placement.reduced
    sides = box.top, box.left, box.height, box.width
    return *placement.of, placement.factor, *sides, int(placement.mirrored)
