"""Operators that change colors, or erase parts.

Arrays are computed as OpenCV does it, and images of Pillow by Pillow, as in MindSpore.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps

from ...errors import SampleError, check, whole_number
from ...pipeline.image.geometry import described
from ...pipeline.image.values import ENHANCERS, changed_picture
from ..drawing import RandomOperator, Rng, called
from .pixels import (
    Array,
    array_of,
    blended,
    by_pillow,
    changed_pixels,
    equalized,
    gray_of,
    hue_shifted,
    is_picture,
    saturated,
    sharpened,
)
from .utils import ByChance, Range, around, check_probability, range_of


def brightened(image: Array, factor: float) -> Array:
    """Return an array with its pixels multiplied."""
    return saturated(image.astype(np.float32) * np.float32(factor), image.dtype)


def contrasted(image: Array, factor: float) -> Array:
    """Return an array with the distances from its mean brightness multiplied."""
    return blended(image, np.float32(int(gray_of(image).mean() + 0.5)), factor)


def colored(image: Array, factor: float) -> Array:
    """Return an array with the distances from grey multiplied."""
    return blended(image, gray_of(image).astype(np.float32), factor)


Change = Callable[[Array, float], Array]
# The changes of `RandomColorAdjust`: what changes nothing, and how arrays change.
CHANGES: dict[str, tuple[float, Change]] = {
    "brightness": (1, brightened),
    "contrast": (1, contrasted),
    "saturation": (1, colored),
    "hue": (0, hue_shifted),
}


@dataclass(frozen=True, slots=True)
class RandomColorAdjust(RandomOperator):
    """Change brightness, contrast, saturation and hue, in random order.

    Args:
        brightness, contrast, saturation: (min, max) of the factor, or x for max(0, 1 -
            x) to 1 + x.
        hue: (min, max) within -0.5 and 0.5, as a share of the circle, or x for (-x, x).

    Raises:
        SpecError: an argument is out of range.
    """

    brightness: float | Range = (1, 1)
    contrast: float | Range = (1, 1)
    saturation: float | Range = (1, 1)
    hue: float | Range = (0, 0)

    def __post_init__(self) -> None:
        for name in CHANGES:
            self._range(name)

    def drawn(self, image: Any, rng: Rng) -> Any:
        amounts = {name: rng.uniform(*self._range(name)) for name in CHANGES}
        names = [*CHANGES]
        for at in rng.permutation(len(names)):
            name = names[at]
            same, change = CHANGES[name]
            if is_picture(image):
                image = changed_picture(image, name, amounts[name])
            elif amounts[name] != same:
                image = change(array_of(image, 3), amounts[name])
        return image

    def _range(self, name: str) -> Range:
        amount = getattr(self, name)
        if name == "hue":
            return around(name, amount, center=0, low=-0.5, high=0.5)
        return around(name, amount, center=1, low=0, high=1e7)


@dataclass(frozen=True, slots=True)
class RandomEnhancement(RandomOperator):
    """Change an image by a random factor; 1 leaves it as it is.

    Args:
        degrees: (min, max) of the factor.

    Raises:
        SpecError: `degrees` is not a range of numbers >= 0.
    """

    degrees: Range = (0.1, 1.9)

    def __post_init__(self) -> None:
        range_of("degrees", self.degrees, 0, usual="(0.1, 1.9) is usual")

    def drawn(self, image: Any, rng: Rng) -> Any:
        factor = rng.uniform(*self.degrees)
        of_picture, of_array = self._ways()
        if is_picture(image):
            return ENHANCERS[of_picture](image).enhance(factor)
        return of_array(image, factor)

    @abstractmethod
    def _ways(self) -> tuple[str, Change]:
        """Return the name of Pillow's way, and the function for arrays."""


class RandomColor(RandomEnhancement):
    """Multiply the distances of pixels from grey by a random factor; 0 is grey."""

    __slots__ = ()

    def _ways(self) -> tuple[str, Change]:
        return "saturation", lambda image, factor: colored(array_of(image, 3), factor)


class RandomSharpness(RandomEnhancement):
    """Blur an image (a factor below 1) or sharpen it (above)."""

    __slots__ = ()

    def _ways(self) -> tuple[str, Change]:
        return "sharpness", lambda image, factor: sharpened(array_of(image), factor)


@dataclass(frozen=True, slots=True)
class RandomPosterize(RandomOperator):
    """Keep only the upper bits of pixels.

    Args:
        bits: how many, 1 to 8, or their range (min, max).

    Raises:
        SpecError: `bits` is out of range.
    """

    bits: int | tuple[int, int] = (8, 8)

    def __post_init__(self) -> None:
        self._range()

    def drawn(self, image: Any, rng: Rng) -> Any:
        low, high = self._range()
        shift = 8 - int(rng.integers(low, high + 1))
        return array_of(image) >> shift << shift

    def _range(self) -> tuple[int, int]:
        bits = self.bits
        low, high = (bits, bits) if isinstance(bits, int) else bits
        range_of("bits", (low, high), 1, 8, usual="8 keeps all")
        return low, high


@dataclass(frozen=True, slots=True)
class RandomSolarize(RandomOperator):
    """Invert pixels between two random thresholds.

    Args:
        threshold: (min, max) that both are drawn from. If they are the same number, all
            pixels from there on are inverted.

    Raises:
        SpecError: `threshold` is not a range within 0 and 255.
    """

    threshold: tuple[int, int] = (0, 255)

    def __post_init__(self) -> None:
        range_of("threshold", self.threshold, 0, 255, usual="(0, 255) is usual")

    def drawn(self, image: Any, rng: Rng) -> Array:
        array, (low, high) = array_of(image), self.threshold
        first, last = sorted(rng.integers(low, high + 1, 2).tolist())
        last = 255 if first == last else last
        return np.where((array >= first) & (array <= last), 255 - array, array)


@dataclass(frozen=True, slots=True)
class Invert:
    """Replace each pixel by 255 minus its value."""

    def __call__(self, image: Any) -> Any:
        return changed_pixels(image, lambda it: 255 - it)


@dataclass(frozen=True, slots=True)
class Equalize:
    """Make the histogram of each channel flat."""

    def __call__(self, image: Any) -> Any:
        if is_picture(image):
            return PIL.ImageOps.equalize(image)
        array = array_of(image)
        if array.dtype != np.uint8:
            raise SampleError(
                f"Equalize takes uint8, got {described(image)}; put it before"
                " Rescale() or ToTensor()"
            )
        planes = array.reshape((*array.shape[:2], -1))
        channels = [equalized(planes[..., at]) for at in range(planes.shape[2])]
        return np.stack(channels, axis=2).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class AutoContrast:
    """Stretch each channel so that it reaches from black to white.

    Args:
        cutoff: percent of the darkest and of the lightest pixels to leave out of
            account, 0 to 49.
        ignore: values to leave out, too.

    Raises:
        SpecError: `cutoff` is out of range.
    """

    cutoff: float = 0.0
    ignore: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        check(
            0 <= self.cutoff < 50,
            f"`cutoff` must be 0 to 49 percent, got {self.cutoff}; 0 is usual",
        )

    def __call__(self, image: Any) -> Any:
        return by_pillow(
            image,
            partial(PIL.ImageOps.autocontrast, cutoff=self.cutoff, ignore=self.ignore),
        )


class RandomGrayscale(ByChance):
    """Make an image of Pillow grey with probability `prob`; it keeps its channels."""

    __slots__ = ()

    def _made(self, image: Any) -> PIL.Image.Image:
        if not isinstance(image, PIL.Image.Image):
            raise SampleError(
                f"RandomGrayscale takes a Pillow image, got {described(image)}; put"
                " vision.ToPIL() before it, or use Decode(to_pil=True)"
            )
        return image.convert("L").convert(image.mode)


@dataclass(frozen=True, slots=True)
class CutOut(RandomOperator):
    """Make random squares of an array black; they may reach over its edges.

    Args:
        length: side of a square in pixels.
        num_patches: number of squares.
        is_hwc: whether channels come last; False: first.

    Raises:
        SpecError: an argument is out of range.
    """

    length: int
    num_patches: int = 1
    is_hwc: bool = True

    def __post_init__(self) -> None:
        whole_number("length", self.length, 1, "16 is usual")
        whole_number("num_patches", self.num_patches, 1, "1 is usual")

    def drawn(self, image: Any, rng: Rng) -> Array:
        array = array_of(image).copy()
        height, width = array.shape[:2] if self.is_hwc else array.shape[-2:]
        if self.length > min(height, width):
            raise SampleError(
                f"`length` must be at most the image's sides, {height} x {width}, got"
                f" {self.length}; make the squares smaller"
            )
        for _ in range(self.num_patches):
            top, left = (
                int(rng.integers(-self.length, side + 1)) for side in (height, width)
            )
            rows = slice(max(top, 0), max(top + self.length, 0))
            columns = slice(max(left, 0), max(left + self.length, 0))
            array[(rows, columns) if self.is_hwc else (..., rows, columns)] = 0
        return array


@dataclass(frozen=True, slots=True)
class RandomErasing(RandomOperator):
    """Fill a random rectangle of an array `[C, H, W]` with probability `prob`.

    Args:
        prob: the probability.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width / height of the rectangle.
        value: what to fill it with: a number, one for each channel, or "random" for
            normal noise.
        inplace: ignored: samples are never changed in place.
        max_attempts: rectangles to try; if none fits, nothing is erased.

    Raises:
        SpecError: an argument is out of range.
    """

    prob: float = 0.5
    scale: Range = (0.02, 0.33)
    ratio: Range = (0.3, 3.3)
    value: int | str | Sequence[int] = 0
    inplace: bool = False
    max_attempts: int = 10

    def __post_init__(self) -> None:
        check_probability(self.prob)
        range_of("scale", self.scale, 0, usual="(0.02, 0.33) is usual")
        range_of("ratio", self.ratio, 1e-6, usual="(0.3, 3.3) is usual")
        whole_number("max_attempts", self.max_attempts, 1, "10 is usual")
        check(
            self.value == "random" if isinstance(self.value, str) else True,
            f'`value` must be a number, three, or "random", got {self.value!r}; 0 is'
            " black",
        )

    def drawn(self, image: Any, rng: Rng) -> Array:
        if not isinstance(image, np.ndarray) or image.ndim != 3:
            raise SampleError(
                f"RandomErasing takes an array [C, H, W], got {described(image)}; put"
                " ToTensor() before it"
            )
        if rng.random() >= self.prob:
            return image
        channels, height, width = image.shape
        for _ in range(self.max_attempts):
            area = height * width * rng.uniform(*self.scale)
            aspect = rng.uniform(*self.ratio)
            wide = round(math.sqrt(area * aspect))
            tall = round(wide / aspect)
            if tall < height and wide < width:
                top = int(rng.integers(height - tall + 1))
                left = int(rng.integers(width - wide + 1))
                array: Array = image.copy()
                part = array[:, top : top + tall, left : left + wide]
                part[:] = self._filling((channels, tall, wide), rng)
                return array
        return image

    def _filling(self, shape: tuple[int, int, int], rng: Rng) -> Any:
        if isinstance(self.value, str):
            return rng.normal(size=shape)
        return np.asarray(self.value).reshape(-1, 1, 1)


Policy = Sequence[Sequence[tuple[Any, float]]]


@dataclass(frozen=True, slots=True)
class RandomSelectSubpolicy(RandomOperator):
    """Choose a list of operators at random; apply each with its own probability.

    Args:
        policy: lists of (operator, probability).

    Raises:
        SpecError: there is no list, or one is empty, or a probability is out of range.
    """

    policy: Policy

    def __post_init__(self) -> None:
        check(
            len(self.policy) and all(map(len, self.policy)),
            f"`policy` must be lists of (operator, probability), got {self.policy!r};"
            " [[(vision.Invert(), 0.5)]] is an example",
        )
        for subpolicy in self.policy:
            for operation, prob in subpolicy:
                check_probability(prob)
                check(
                    callable(operation),
                    f"an operator must be callable, got {operation!r}; vision.Invert()"
                    " is an example",
                )

    def drawn(self, image: Any, rng: Rng) -> Any:
        for operation, prob in self.policy[int(rng.integers(len(self.policy)))]:
            if rng.random() < prob:
                image = called(operation, (image,), rng)
        return image
