"""What an image operator is given, and which part of it is the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import SampleError

Encoded: TypeAlias = bytes | bytearray | memoryview
"""A whole image file."""
Image: TypeAlias = NDArray[np.uint8]
"""`uint8 [H, W, 3]`, RGB."""
Result: TypeAlias = Image | tuple[object, ...]
"""An image, or a tuple whose first element is one."""

CURE = (
    "an operator takes the image itself or a tuple that starts with it; take other "
    "samples apart in a function of your own and call the operator in there"
)


def on_image(sample: object, change: Callable[[Any], Image]) -> Result:
    """Return `sample` with its image replaced by `change(image)`.

    The image is the sample itself or, in a tuple, the first element; the other elements
    pass unchanged, and a namedtuple stays one.
    """
    if not isinstance(sample, tuple) or not sample:
        return change(sample)
    changed = (change(sample[0]), *sample[1:])
    make = getattr(type(sample), "_make", tuple)
    return make(changed)


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
        return value
    raise SampleError(
        f"an image must be a numpy array uint8 [H, W, 3], got {described(value)}; "
        f"put `.map(ps.image.decode)` before this for files; {CURE}"
    )


def described(value: object) -> str:
    """Return the kind of `value`, and of an array its dtype and shape."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    return type(value).__name__
