"""Operators between files, pictures, arrays and the floats that models train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from ...errors import SampleError, SpecError, check
from ...pipeline.image import decode
from ...pipeline.image.geometry import described
from .pixels import Array, array_of

Floats = NDArray[np.float32]


def numpy_dtype(kind: Any) -> np.dtype[Any]:
    """Return numpy's type for one of numpy, of torch, for a name, or for MindSpore's.

    Anything counts whose text ends with the name: `torch.int32`, `Int32`,
    `mindspore.int32`.

    Raises:
        SpecError: there is no such type.
    """
    name = str(kind).rpartition(".")[2].lower().rstrip("_")
    plain = isinstance(kind, type | np.dtype)
    try:
        return np.dtype(kind if plain else name.replace("string", "str"))
    except TypeError as error:
        raise SpecError(
            f"a type must be one of numpy, torch or MindSpore, got {kind!r}; np.int32"
            ' and "float32" are examples'
        ) from error


def encoded(data: Any) -> bytes:
    """Return the bytes of an image file, given as bytes or as `uint8 [n]`.

    Raises:
        SampleError: it is something else.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if isinstance(data, np.ndarray) and data.dtype.kind == "S" and data.ndim == 0:
        return bytes(data.item())
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1:
        return data.tobytes()
    raise SampleError(
        "decoding takes the bytes of a file, or these as an array uint8 [n], got"
        f" {described(data)}; leave Decode() out if images are decoded already"
    )


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode an image file to `uint8 [H, W, 3]`, or to an image of Pillow.

    Args:
        to_pil: whether to make an image of Pillow. Operators after it are then computed
            by Pillow, with antialiasing.
    """

    to_pil: bool = False

    def __post_init__(self) -> None:
        check(
            isinstance(self.to_pil, bool),
            f"`to_pil` must be True or False, got {self.to_pil!r}; images are RGB in"
            " any case",
        )

    def __call__(self, image: Any) -> Any:
        pixels = decode(encoded(image))
        return PIL.Image.fromarray(pixels) if self.to_pil else pixels


@dataclass(frozen=True, slots=True)
class ToPIL:
    """Make an image of Pillow of an array `[H, W, C]` or `[H, W]`."""

    def __call__(self, image: Any) -> PIL.Image.Image:
        if isinstance(image, PIL.Image.Image):
            return image
        array = array_of(image)
        flat = array[..., 0] if array.shape[2:] == (1,) else array
        try:
            return PIL.Image.fromarray(flat)
        except TypeError as error:
            raise SampleError(
                "ToPIL takes uint8 [H, W, 1 to 4] or [H, W], got"
                f" {described(image)}; put it before ToTensor() or Rescale()"
            ) from error


@dataclass(frozen=True, slots=True)
class ToTensor:
    """Make an array `[C, H, W]` of pixels divided by 255.

    Args:
        output_type: its type: of numpy or torch, or a name.

    Raises:
        SpecError: there is no such type.
    """

    output_type: Any = np.float32

    def __post_init__(self) -> None:
        numpy_dtype(self.output_type)

    def __call__(self, image: Any) -> Array:
        array = array_of(image)
        planes = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        kind = numpy_dtype(self.output_type)
        if array is not image:  # a picture, which MindSpore divides in Python
            return np.ascontiguousarray(planes / 255.0).astype(kind)
        values = np.multiply(planes, np.float32(1 / 255), dtype=np.float32, order="C")
        return values.astype(kind, copy=False)


@dataclass(frozen=True, slots=True)
class HWC2CHW:
    """Change `[H, W, C]` to `[C, H, W]`; `[H, W]` stays as it is."""

    def __call__(self, image: Any) -> Array:
        array = array_of(image)
        return array if array.ndim == 2 else array.transpose(2, 0, 1).copy()


@dataclass(frozen=True, slots=True)
class Rescale:
    """Return pixels times `rescale`, plus `shift`, as `float32`."""

    rescale: float
    shift: float

    def __call__(self, image: Any) -> Floats:
        values = np.multiply(
            array_of(image), np.float32(self.rescale), dtype=np.float32
        )
        values += np.float32(self.shift)
        return values


@dataclass(frozen=True, slots=True)
class Normalize:
    """Return (pixels - mean) / std as `float32`.

    Args:
        mean: of each channel, or one for all.
        std: likewise.
        is_hwc: whether channels come last; False: first.

    Raises:
        SpecError: an argument is out of range.
    """

    mean: Sequence[float]
    std: Sequence[float]
    is_hwc: bool = True

    def __post_init__(self) -> None:
        lists = all(isinstance(it, list | tuple) for it in (self.mean, self.std))
        check(
            lists and len(self.mean) == len(self.std),
            "`mean` and `std` must be lists with a number for each channel, got"
            f" {self.mean!r} and {self.std!r}; [0.5] is for one channel",
        )
        check(
            all(0 <= it <= 255 for it in self.mean)
            and all(0 < it <= 255 for it in self.std),
            "`mean` must be 0 to 255, and `std` above 0 and to 255, got"
            f" {list(self.mean)} and {list(self.std)}; take those of the dataset's"
            " pixels",
        )

    def __call__(self, image: Any) -> Floats:
        array, count = array_of(image), len(self.mean)
        channels = 1 if array.ndim == 2 else array.shape[2 if self.is_hwc else 0]
        if count not in (1, channels):
            place = "last" if self.is_hwc else "first"
            raise SampleError(
                f"`mean` must have a number for each channel, got {count} for"
                f" {described(image)} with channels {place}; set `is_hwc`, or give"
                f" {channels} numbers"
            )
        shape = (-1,) if self.is_hwc or array.ndim == 2 else (-1, 1, 1)
        mean, std = (
            np.array(it, np.float32).reshape(shape) for it in (self.mean, self.std)
        )
        values = np.subtract(array, mean, dtype=np.float32)
        values /= std
        return values
