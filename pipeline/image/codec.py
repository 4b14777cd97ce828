"""From images of all kinds to pixels, and back: files, arrays, tensors, Pillow's.

An image is the bytes of a file, an array `uint8 [H, W, 3]`, a tensor `uint8 [3, H, W]`
as in torch, or a Pillow image. Operators work on arrays and return the kind they were
given: a tensor for a tensor, a Pillow image for a Pillow image. Bytes are decoded to an
array.

simplejpeg (libjpeg-turbo) decodes JPEG; Pillow decodes everything else, such as PNG,
CMYK and unusual sampling. Both release the GIL while they decode.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import PIL
import PIL.Image
import simplejpeg
import torch
from numpy.typing import NDArray

from .geometry import Image
from .sample import Encoded, on_image, require_encoded, require_image

SIMPLEJPEG_COLORS = frozenset({"Gray", "RGB", "YCbCr"})
FORMATS = (
    "AVIF",
    "BMP",
    "GIF",
    "JPEG",
    "JPEG2000",
    "MPO",
    "PNG",
    "PPM",
    "TGA",
    "TIFF",
    "WEBP",
)
"""The formats that are read, if Pillow can read them. The others start a program (EPS
starts Ghostscript), or do not hold photographs."""


def decode(sample: Any) -> Any:
    """Decode an image file to RGB pixels, the same as Pillow's `convert("RGB")`.

    The EXIF orientation is not applied. The loader of torchvision's `ImageFolder` does
    not apply it either, so the pixels agree.

    Args:
        sample: the bytes of the file, a tuple that starts with them, or a dict that
            has them as "image".

    Returns:
        `uint8 [H, W, 3]`, or the tuple or dict with this in place of the bytes.

    Raises:
        ValueError: the bytes are empty, truncated, corrupt or not an image, or the
            image has more than twice `PIL.Image.MAX_IMAGE_PIXELS` pixels (a
            decompression bomb).
        SampleError: the sample has no bytes in any of these places.
    """
    return on_image(sample, lambda data: decode_reduced(require_encoded(data), 1))


def image_size(data: Encoded) -> tuple[int, int]:
    """Return (height, width) in pixels from the file's header, without decoding it.

    Raises:
        ValueError: as for `decode`, if the header shows it.
    """
    size = simplejpeg_size(data)
    if size is not None:
        return size
    with opened(data) as picture:
        return picture.height, picture.width


def decode_reduced(data: Encoded, factor: int) -> Image:
    """Decode at 1/`factor` scale: `uint8 [ceil(H / factor), ceil(W / factor), 3]`.

    Args:
        data: the bytes of the file.
        factor: 1, 2, 4 or 8. A JPEG is decoded at this scale, which saves most of the
            inverse DCT; other formats are decoded at full size and averaged. Of fewer
            than 8 pixels a side, a scale nearby may be taken that makes as many.

    Raises:
        ValueError: as for `decode`.
    """
    size = simplejpeg_size(data)
    if size is None:
        return decode_with_pillow(data, factor)
    height, width = (-(-side // factor) for side in size)
    try:
        pixels: Image = simplejpeg.decode_jpeg(
            data, min_height=height, min_width=width, strict=True
        )
    except ValueError as error:
        if is_damage(str(error)):
            raise ValueError(damage(data, error)) from error
        return decode_with_pillow(data, factor)
    return pixels


def simplejpeg_size(data: Encoded) -> tuple[int, int] | None:
    """Return (height, width) in pixels of a JPEG that simplejpeg can decode, else None.

    Raises:
        ValueError: it has more than twice `PIL.Image.MAX_IMAGE_PIXELS` pixels.
    """
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None  # not a JPEG, or an unusual one: left to Pillow
    if colors not in SIMPLEJPEG_COLORS:
        return None
    if is_bomb(height, width):
        limit = PIL.Image.MAX_IMAGE_PIXELS or 0
        raise ValueError(
            f"an image may have at most {2 * limit} pixels (twice "
            f"PIL.Image.MAX_IMAGE_PIXELS), got {height} x {width}; if you trust the "
            "file, raise PIL.Image.MAX_IMAGE_PIXELS"
        )
    return height, width


def is_bomb(height: int, width: int) -> bool:
    """Whether an image has so many pixels that it may be made to use up memory."""
    limit = PIL.Image.MAX_IMAGE_PIXELS
    return limit is not None and height * width > 2 * limit


def is_damage(complaint: str) -> bool:
    """Whether libjpeg's `complaint` means that pixels are missing or invented.

    Stray bytes between two segments cost no pixels. Pillow skips them, and so do we.
    """
    if complaint.startswith("Corrupt JPEG data"):
        return "extraneous bytes" not in complaint
    return complaint.startswith("Premature end")


def decode_with_pillow(data: Encoded, factor: int) -> Image:
    """Decode any of the `FORMATS`, as `decode_reduced` does."""
    with opened(data) as picture:
        pixels = picture.convert("RGB")
        return np.array(pixels if factor == 1 else pixels.reduce(factor))


@contextmanager
def opened(data: Encoded) -> Iterator[PIL.Image.Image]:
    """Open an image with Pillow.

    Pillow's readers raise all kinds of exceptions for files that they cannot read. Each
    becomes a `ValueError` that says what is wrong with the file.

    Raises:
        ValueError: the file cannot be read, when it is opened or inside the `with`.
    """
    try:
        with PIL.Image.open(io.BytesIO(data), formats=readable()) as picture:
            yield picture
    except Exception as error:
        raise ValueError(damage(data, error)) from error


@cache
def readable() -> list[str]:
    """Return the `FORMATS` that the installed Pillow can read."""
    PIL.Image.init()
    return [name for name in FORMATS if name in PIL.Image.OPEN]


def damage(data: Encoded, error: Exception) -> str:
    """Return a message: what is wrong with `data`, by `error`, and what to do."""
    cure = "restore this file from its source, or leave it out"
    if len(data) == 0:
        return f"an image file must not be empty, got 0 bytes; {cure}"
    if isinstance(error, PIL.UnidentifiedImageError):
        start = bytes(data[:8])
        return (
            f"an image file must be one of {', '.join(readable())}, "
            f"got {len(data)} bytes that start with {start!r}; {cure}"
        )
    return f"an image file must be intact, got {len(data)} bytes: {error}; {cure}"


# Images of any kind.


def on_pixels(sample: Any, change: Callable[[Image], Image]) -> Any:
    """Return `sample` with its image, of any kind, changed by a function of arrays.

    Raises:
        SampleError: the sample has no image.
        ValueError: the image is the bytes of a file that cannot be decoded.
    """
    return on_image(sample, lambda image: like(image, change(pixels_of(image))))


def pixels_of(image: Any) -> Image:
    """Return the pixels of an image of any kind, `uint8 [H, W, 3]`.

    Raises:
        SampleError: it is not an image.
        ValueError: it is the bytes of a file that cannot be decoded.
    """
    if isinstance(image, torch.Tensor):
        if image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3:
            return require_image(image.permute(1, 2, 0).contiguous().numpy())
    elif isinstance(image, PIL.Image.Image):
        if image.mode == "RGB":
            return require_image(np.asarray(image))
    elif isinstance(image, bytes | bytearray | memoryview):
        return decode_reduced(image, 1)
    return require_image(image)


def like(image: Any, pixels: NDArray[Any]) -> Any:
    """Return pixels `[H, W, C]` as the kind of image that `image` is."""
    if isinstance(image, torch.Tensor):
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    if isinstance(image, PIL.Image.Image):
        return PIL.Image.fromarray(pixels)
    return pixels


def size_of(image: Any) -> tuple[int, int]:
    """Return (height, width) in pixels of an image of any kind; bytes stay undecoded.

    Raises:
        SampleError: it is not an image.
        ValueError: it is the bytes of a file whose header cannot be read.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        return image_size(image)
    if isinstance(image, PIL.Image.Image):
        return image.height, image.width
    if isinstance(image, torch.Tensor) and image.ndim == 3:
        return int(image.shape[1]), int(image.shape[2])
    height, width, _ = require_image(image).shape
    return height, width
