"""The kinds of images: files, arrays, tensors and Pillow images.

An image is the bytes of a file, an array `uint8 [H, W, 3]`, a tensor `uint8 [3, H, W]`
as in torch, or a Pillow image. Operators work on arrays and return the kind they were
given: a tensor for a tensor, a Pillow image for a Pillow image. Bytes are decoded to an
array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from .codec import decode_reduced, image_size
from .sample import Image, on_image, require_image


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
