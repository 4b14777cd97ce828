"""From images of all kinds to pixels, and back: files, arrays, tensors, Pillow's.

An image is the bytes of a file, an array `uint8 [H, W, 3]`, a tensor `uint8 [3, H, W]`
as in torch, or a Pillow image. Operators work on arrays and return the kind they were
given: a tensor for a tensor, a Pillow image for a Pillow image. Bytes are decoded to an
array.

simplejpeg (libjpeg-turbo) decodes JPEG; Pillow decodes everything else, such as PNG,
CMYK and unusual sampling. Both release the GIL while they decode.

Crops of JPEGs are decoded and resized in native code, several at once. `_photos.c` is
compiled if a compiler and libjpeg-turbo's headers are installed. It may be linked to
another release of libjpeg-turbo than simplejpeg, which brings its own, and it must
resize as the installed torch does. So it is used only once it has made the same pixels.
Without it, and for files that it refuses, the whole image is decoded.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import PIL.Image
import simplejpeg
import torch
from numpy.typing import NDArray

from .geometry import (
    Box,
    Encoded,
    Image,
    Placement,
    mirror,
    on_image,
    require_encoded,
    require_image,
    resize,
)

# The formats that are read, if Pillow can read them. The others start a program (EPS
# starts Ghostscript), or do not hold photographs.
FORMATS = (
    "AVIF",
    "BMP",
    "GIF",
    "JPEG",
    "JPEG2000",
    "PNG",
    "PPM",
    "TGA",
    "TIFF",
    "WEBP",
)


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
        # Stray bytes between two segments cost no pixels. Pillow skips them.
        message, stray = str(error), "extraneous bytes" in str(error)
        if message.startswith(("Corrupt JPEG data", "Premature end")) and not stray:
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
    if colors not in {"Gray", "RGB", "YCbCr"}:
        return None
    if is_bomb(height, width):
        raise ValueError(
            f"an image may have at most {2 * (PIL.Image.MAX_IMAGE_PIXELS or 0)} pixels"
            f" (twice PIL.Image.MAX_IMAGE_PIXELS), got {height} x {width}; if you trust"
            " the file, raise PIL.Image.MAX_IMAGE_PIXELS"
        )
    return height, width


def is_bomb(height: int, width: int) -> bool:
    """Whether an image has so many pixels that it may be made to use up memory."""
    limit = PIL.Image.MAX_IMAGE_PIXELS
    return limit is not None and height * width > 2 * limit


def decode_with_pillow(data: Encoded, factor: int) -> Image:
    """Decode any of the `FORMATS`, as `decode_reduced` does."""
    with opened_picture(data) as picture:
        pixels = picture.convert("RGB")
        return np.array(pixels if factor == 1 else pixels.reduce(factor))


@contextmanager
def opened_picture(data: Encoded) -> Iterator[PIL.Image.Image]:
    """Open an image with Pillow.

    Pillow's readers raise all kinds of exceptions for files that they cannot read. Each
    becomes a `ValueError` that says what is wrong with the file.

    Raises:
        MemoryError: there is not enough memory, which says nothing about the file.
        ValueError: the file cannot be read, when it is opened or inside the `with`.
    """
    try:
        with PIL.Image.open(io.BytesIO(data), formats=readable()) as picture:
            yield picture
    except MemoryError:
        raise
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
        return (
            f"an image file must be one of {', '.join(readable())}, "
            f"got {len(data)} bytes that start with {bytes(data[:8])!r}; {cure}"
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
    if isinstance(image, Encoded):
        return decode_reduced(image, 1)
    is_tensor = isinstance(image, torch.Tensor) and image.dtype == torch.uint8
    if is_tensor and image.ndim == 3 and image.shape[0] == 3:
        image = image.permute(1, 2, 0).contiguous().numpy()
    elif isinstance(image, PIL.Image.Image) and image.mode == "RGB":
        image = np.asarray(image)
    return require_image(image)


def like(image: Any, pixels: NDArray[Any]) -> Any:
    """Return pixels `[H, W, C]` as the kind of image that `image` is."""
    match image:
        case torch.Tensor():
            return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        case PIL.Image.Image():
            return PIL.Image.fromarray(pixels)
    return pixels


def size_of(image: Any) -> tuple[int, int]:
    """Return (height, width) in pixels of an image of any kind; bytes stay undecoded.

    Raises:
        SampleError: it is not an image.
        ValueError: it is the bytes of a file whose header cannot be read.
    """
    match image:
        case bytes() | bytearray() | memoryview():
            if (size := simplejpeg_size(image)) is not None:
                return size
            with opened_picture(image) as picture:
                return picture.height, picture.width
        case PIL.Image.Image():
            return image.height, image.width
        case torch.Tensor(ndim=3):
            return int(image.shape[1]), int(image.shape[2])
    height, width, _ = require_image(image).shape
    return height, width


# Crops, in native code.

# A box whose edges lie inside iMCUs, with rows and columns left out on all sides.
TRIED = Box(19, 21, 33, 35)
# Pixels of the longest side that the extension takes: no JPEG has a longer one.
MAX_SIDE = 65_500
# Height and width in pixels of the images on which the extension is tried.
TRIED_SIDE = 96
SAMPLINGS = ("444", "422", "440", "420", "Gray")


@dataclass(frozen=True, slots=True)
class CropDecoder:
    """Decodes and resizes crops."""

    def __penstock_fingerprint__(self) -> str:
        """Return the versions of the extension and its libjpeg-turbo, if it is used."""
        extension, _ = crop_extension()
        return "in full" if extension is None else str(extension.VERSION)

    def sizes(self, files: list[Encoded]) -> list[tuple[int, int]]:
        """Return the height and width of each image; (0, 0) if a file is refused."""
        extension, _ = crop_extension()
        sizes = np.zeros((len(files), 2), np.int32)
        if extension is not None:
            extension.sizes(files, sizes)
        return [(height, width) for height, width in sizes.tolist()]

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
            None for a file that is refused or damaged, and for sides above `MAX_SIDE`.
        """
        crops: list[Image | None] = [None] * len(files)
        extension, _ = crop_extension()
        if extension is None:
            return crops
        sizes: dict[tuple[int, int], list[int]] = {}
        for at, placement in enumerate(placements):
            size = placement.height, placement.width
            if max(size) <= MAX_SIDE and (
                placement.antialias
                or (placement.reduced.height, placement.reduced.width) == size
            ):
                sizes.setdefault(size, []).append(at)
        for size, places in sizes.items():
            images = made_by(
                extension,
                [files[at] for at in places],
                [placements[at] for at in places],
                size,
                to_end=to_end,
            )
            for at, image in zip(places, images, strict=True):
                crops[at] = image
        return crops

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
    """Return a part of an image, resized and mirrored as the placement says.

    It is resized bilinearly, as `resize` does it.
    """
    size, antialias = (placement.height, placement.width), placement.antialias
    extension, _ = crop_extension()
    resizes = part.shape[:2] != size
    too_large = max(part.shape + size) > MAX_SIDE
    if extension is None or not resizes or not antialias or too_large:
        image = resize(part, *size, antialias=antialias) if resizes else part
        return mirror(image) if placement.mirrored else image
    pixels: Image = np.empty((*size, 3), np.uint8)
    extension.resize(np.ascontiguousarray(part), pixels, placement.mirrored, False)  # noqa: FBT003
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
        differ = "its pixels differ from simplejpeg's or torch's"
        return None, f"{differ} (version {extension.VERSION})"
    if not hasattr(extension, "normalize"):
        return None, "it was built of older sources: say make, or pip install -e ."
    return extension, ""


def is_exact(extension: Any, sampling: str) -> bool:
    """Whether the extension makes of an image of noise what simplejpeg and torch do."""
    shape = (TRIED_SIDE, TRIED_SIDE, 1 if sampling == "Gray" else 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = simplejpeg.encode_jpeg(
        noise, colorspace="Gray" if shape[2] == 1 else "RGB", colorsubsampling=sampling
    )
    for factor, size in product((1, 2), ((TRIED.height, TRIED.width), (20, 47))):
        placement = Placement(TRIED, *size, shape[:2], mirrored=True, factor=factor)
        (image,) = made_by(extension, [data], [placement], size, to_end=True)
        part = placement.reduced.cut(decode_reduced(data, factor))
        expected = mirror(resize(part, *size, antialias=True))
        if image is None or not np.array_equal(image, expected):
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
    numbers = np.empty((len(files), 8), np.int32)
    for row, placement in zip(numbers, placements, strict=True):
        box = placement.reduced
        sides = box.top, box.left, box.height, box.width
        row[:] = *placement.of, placement.factor, *sides, placement.mirrored
    successes = extension.crops(files, numbers, pixels, to_end)
    return [
        image if success else None
        for image, success in zip(pixels, successes, strict=True)
    ]
