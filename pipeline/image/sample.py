"""The samples that image operators take: where the image and its annotations are."""

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
"""The annotations of an image, by name: see `annotations`."""

IMAGE = "image"
"""The key of the image in a dict."""
ANNOTATIONS = frozenset(("boxes", "masks", "mask", "keypoints"))
"""The entries of a dict that move with the pixels."""

CURE = (
    "an operator takes an image, a tuple that starts with an image, or a dict with an"
    ' "image"; for other samples, write a function that calls the operator on the image'
)


@dataclass(frozen=True, slots=True)
class SampleParts:
    """A sample taken apart: its image, and the annotations that move with it.

    The image is the sample itself, the first element of a tuple, or a dict's "image".
    The annotations are in the dict itself, or in the first dict of the tuple that has
    some.
    """

    image: Any
    target: Target | None
    sample: Any
    place: int | None
    """The index of the annotations in a tuple."""

    @property
    def file(self) -> Encoded:
        """The bytes of a file that has no annotations; empty if it is not one."""
        plain = self.target is None and isinstance(self.image, Encoded)
        return self.image if plain else b""

    @classmethod
    def of(cls, sample: Any) -> SampleParts:
        """Take a sample apart, without copying anything."""
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

    `SampleParts` says where the image is. Everything else stays as it is; a namedtuple
    stays a namedtuple.
    """
    parts = SampleParts.of(sample)
    return parts.made(change(parts.image))


def require_encoded(value: object) -> Encoded:
    """Return `value` if it is the bytes of a file.

    Raises:
        SampleError: it is not.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return value
    raise SampleError(f"decoding takes bytes, got {described(value)}; {CURE}")


def require_image(value: object) -> Image:
    """Return `value` if it is an array `uint8 [H, W, 3]` that is not empty.

    Raises:
        SampleError: it is not.
    """
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
    """Return the kind of `value`; for arrays and tensors, also dtype and shape."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor {dtype} {list(value.shape)}"
    if isinstance(value, PIL.Image.Image):
        return f"a Pillow image {value.mode} {value.height} x {value.width}"
    return type(value).__name__
