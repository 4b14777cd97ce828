"""Decoding one box of a JPEG: faster than all of it, where the extension was built.

`_crop.c` is compiled where there are a compiler and libjpeg-turbo's headers. It is used
only after it was seen to decode the pixels that simplejpeg does, which brings its own
libjpeg-turbo, another release as a rule. What it refuses is decoded in full.
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
"""Said in the place of a version where there is no extension to have one."""
TRIED = Box(19, 21, 33, 35)
"""Edges in the middle of iMCUs, and rows and columns left out on all sides."""
TRIED_SIDE = 96
"""Pixels on both sides of the photos on which the extension is tried."""
SAMPLINGS = ("444", "422", "440", "420", "Gray")


@dataclass(frozen=True, slots=True)
class CropDecoder:
    """What decodes boxes of JPEGs on this machine: told by its version, as data is."""

    @property
    def version(self) -> str:
        """The extension's version and its libjpeg-turbo's; `FULL` if there is none."""
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
            size: height and width of the whole image, by `image_size`.
            box: which part of it.
            to_end: read what is below the box, too. Otherwise damage there is an error
                where the file was cut off or its markers are out of order, and may go
                unnoticed where codes were changed.

        Raises:
            ValueError: as `decode_reduced`.
        """
        extension, _ = crop_extension()
        if extension is not None:
            image = decoded_box(extension, data, size, box, to_end=to_end)
            if image is not None:
                return image
        return box.cut(decode_reduced(data, 1))


@cache
def crop_extension() -> tuple[Any | None, str]:
    """Return the extension, or None and why it is not used."""
    try:
        extension = importlib.import_module("._crop", __package__)
    except ModuleNotFoundError:
        return None, "it was not built"
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"
    if not all(is_exact(extension, sampling) for sampling in SAMPLINGS):
        found = extension.VERSION
        return None, f"its pixels are not those of simplejpeg (version {found})"
    return extension, ""


def is_exact(extension: Any, sampling: str) -> bool:
    """Whether the extension decodes what simplejpeg does, of noise."""
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
    """Return what the extension makes of a box; None: it leaves it to others."""
    image: Image = np.empty((box.height, box.width, 3), np.uint8)
    done = extension.decode(data, image, *size, box.top, box.left, to_end)
    return image if done else None
