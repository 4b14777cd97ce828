"""What an image operator is given: where in a sample the image is, and what moves."""

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
    "an operator takes the image itself, a tuple that starts with it or a dict with an"
    ' "image"; take other samples apart in a function of your own and call the operator'
    " in there"
)


@dataclass(frozen=True, slots=True)
class SampleParts:
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
    def of(cls, sample: Any) -> SampleParts:
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
    """Return `sample` with its image replaced by `change(image)`.

    `SampleParts` says where the image is. All else passes unchanged. A namedtuple stays
    one.
    """
    parts = SampleParts.of(sample)
    return parts.made(change(parts.image))


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
        return cast("Image", value)
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
