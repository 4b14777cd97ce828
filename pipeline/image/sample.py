"""What an image operator is given: where the image is, and of what kind.

An image is the bytes of a file, an array `uint8 [H, W, 3]`, a tensor `uint8 [3, H, W]`
as torch has them, or a Pillow image. Operators work on arrays, and return what they
were given: of a tensor a tensor, of a Pillow image one. Bytes are decoded to an array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from ...errors import SampleError

Encoded: TypeAlias = bytes | bytearray | memoryview
"""A whole image file."""
Image: TypeAlias = NDArray[np.uint8]
"""`uint8 [H, W, 3]`, RGB."""
Target: TypeAlias = Mapping[str, Any]
"""Annotations of an image by name: see `annotations`."""

IMAGE = "image"
"""The key of the image in a dict."""
ANNOTATIONS = frozenset(("boxes", "masks", "mask", "keypoints"))
"""What moves with the pixels, by its name in a dict."""

CURE = (
    'an operator takes the image itself, a tuple that starts with it or a dict with an'
    ' "image"; take other samples apart in a function of your own and call the operator'
    " in there"
)


@dataclass(frozen=True, slots=True)
class Parts:
    """A sample taken apart: its image, and the annotations that move with it.

    The image is the sample itself, the first element of a tuple, or a dict's "image".
    The annotations are the first dict of the tuple that has some, or the dict itself.
    """

    image: Any
    target: Target | None
    sample: Any
    place: int | None
    """Where the annotations are in a tuple."""

    @classmethod
    def of(cls, sample: Any) -> Parts:
        """Take a sample apart; nothing is copied."""
        if isinstance(sample, Mapping) and IMAGE in sample:
            target = sample if ANNOTATIONS & sample.keys() else None
            return cls(sample[IMAGE], target, sample, None)
        if not isinstance(sample, tuple) or not sample:
            return cls(sample, None, sample, None)
        for place, part in enumerate(sample):
            if place and isinstance(part, Mapping) and ANNOTATIONS & part.keys():
                return cls(sample[0], part, sample, place)
        return cls(sample[0], None, sample, None)

    def made(self, image: Any, target: Target | None = None) -> Any:
        """Return the sample with this image and, unless None, these annotations."""
        if isinstance(self.sample, Mapping) and IMAGE in self.sample:
            return {**self.sample, **(target or {}), IMAGE: image}
        if not isinstance(self.sample, tuple) or not self.sample:
            return image
        changed = [image, *self.sample[1:]]
        if target is not None and self.place is not None:
            changed[self.place] = target
        make = getattr(type(self.sample), "_make", tuple)
        return make(changed)


def on_image(sample: Any, change: Callable[[Any], Any]) -> Any:
    """Return `sample` with its image replaced by `change(image)`, as `Parts` find it.

    All else passes unchanged, and a namedtuple stays one.
    """
    parts = Parts.of(sample)
    return parts.made(change(parts.image))


def on_pixels(sample: Any, change: Callable[[Image], Image]) -> Any:
    """The same for `change` of an array, whatever kind of image it is."""
    return on_image(sample, lambda image: like(image, change(pixels_of(image))))


def pixels_of(image: Any) -> Image:
    """Return the pixels of an image of any kind, `uint8 [H, W, 3]`.

    Raises:
        SampleError: it is none of them.
        ValueError: bytes that cannot be decoded.
    """
    if isinstance(image, torch.Tensor):
        if image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3:
            return require_image(image.permute(1, 2, 0).contiguous().numpy())
    elif isinstance(image, PIL.Image.Image):
        if image.mode == "RGB":
            return require_image(np.asarray(image))
    elif isinstance(image, bytes | bytearray | memoryview):
        from .codec import decode_reduced

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
    """Return (height, width) in pixels of an image of any kind; of bytes: undecoded."""
    if isinstance(image, bytes | bytearray | memoryview):
        from .codec import image_size

        return image_size(image)
    if isinstance(image, PIL.Image.Image):
        return image.height, image.width
    if isinstance(image, torch.Tensor) and image.ndim == 3:
        return int(image.shape[1]), int(image.shape[2])
    height, width, _ = require_image(image).shape
    return height, width


def require_encoded(value: object) -> Encoded:
    """Return `value` if it is the bytes of a file; else raise `SampleError`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return value
    raise SampleError(f"decoding takes bytes, got {described(value)}; {CURE}")


def require_image(value: object) -> Image:
    """Return `value` if it is `uint8 [H, W, 3]`, not empty; else `SampleError`."""
    if (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.shape[2:] == (3,)
        and value.size > 0
    ):
        return cast(Image, value)
    raise SampleError(
        "an image must be a numpy array uint8 [H, W, 3], a tensor uint8 [3, H, W], a"
        f" Pillow image in RGB, or the bytes of a file, got {described(value)}; {CURE}"
    )


def described(value: object) -> str:
    """Return the kind of `value`, and of an array its dtype and shape."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor {dtype} {list(value.shape)}"
    if isinstance(value, PIL.Image.Image):
        return f"a Pillow image {value.mode} {value.height} x {value.width}"
    return type(value).__name__
