"""Decoding one box of a JPEG, which is faster than decoding all of it.

`_crop.c` is compiled if a compiler and libjpeg-turbo's headers are installed. It may be
linked to another release of libjpeg-turbo than simplejpeg, which brings its own. It is
therefore used only once it has decoded the same pixels as simplejpeg. Without it, and
for files that it refuses, the whole image is decoded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import simplejpeg

from .codec import decode_reduced
from .geometry import Box
from .sample import Encoded, Image

FULL = "in full"
"""The version of a decoder without the extension."""
TRIED = Box(19, 21, 33, 35)
"""A box whose edges lie inside iMCUs, with rows and columns left out on all sides."""
TRIED_SIDE = 96
"""Height and width in pixels of the images on which the extension is tried."""
SAMPLINGS = ("444", "422", "440", "420", "Gray")


@dataclass(frozen=True, slots=True)
class CropDecoder:
    """Decodes boxes of JPEGs. Fingerprints identify it by its version."""

    @property
    def version(self) -> str:
        """The versions of the extension and its libjpeg-turbo; `FULL` without it."""
        extension, _ = crop_extension()
        return FULL if extension is None else str(extension.VERSION)

    def __penstock_fingerprint__(self) -> str:
        return self.version

    def decode(
        self, data: Encoded, size: tuple[int, int], box: Box, *, to_end: bool
    ) -> Image:
        """Return `box` of an image: `uint8 [h, w, 3]`.

        Args:
            data: the bytes of the file.
            size: height and width of the whole image in pixels, from `image_size`.
            box: the part to decode.
            to_end: also read the file below the box. Otherwise a file that was cut off
                there, or whose markers are out of order, is still an error, but changed
                codes may go unnoticed.

        Raises:
            ValueError: as for `decode_reduced`.
        """
        extension, _ = crop_extension()
        if extension is not None:
            image = decoded_box(extension, data, size, box, to_end=to_end)
            if image is not None:
                return image
        return box.cut(decode_reduced(data, 1))


@cache
def crop_extension() -> tuple[Any | None, str]:
    """Return the extension and an empty text, or None and why it is not used."""
    try:
        extension = importlib.import_module("._crop", __package__)
    except ModuleNotFoundError:
        return None, "it was not built"
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"
    if not all(is_exact(extension, sampling) for sampling in SAMPLINGS):
        found = extension.VERSION
        return None, f"its pixels differ from simplejpeg's (version {found})"
    return extension, ""


def is_exact(extension: Any, sampling: str) -> bool:
    """Whether the extension and simplejpeg decode an image of noise alike."""
    shape = (TRIED_SIDE, TRIED_SIDE, 1 if sampling == "Gray" else 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = simplejpeg.encode_jpeg(
        noise, colorspace="Gray" if shape[2] == 1 else "RGB", colorsubsampling=sampling
    )
    found = decoded_box(extension, data, shape[:2], TRIED, to_end=True)
    return found is not None and np.array_equal(
        found, TRIED.cut(decode_reduced(data, 1))
    )


def decoded_box(
    extension: Any, data: Encoded, size: tuple[int, int], box: Box, *, to_end: bool
) -> Image | None:
    """Return the box as the extension decodes it, or None if it refuses the file."""
    image: Image = np.empty((box.height, box.width, 3), np.uint8)
    done = extension.decode(data, image, *size, box.top, box.left, to_end)
    return image if done else None
