"""The names of interpolations and of borders, and checks of arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import PIL.Image

from ...errors import check, whole_number
from ..drawing import RandomOperator, Rng

# The smallest and the largest value; both are included.
Range = tuple[float, float]
# (height, width) in pixels, or one number.
Size = int | Sequence[int]


class Inter(IntEnum):
    """How pixels between pixels are computed. All but two serve arrays and pictures.

    `ANTIALIAS` is for Pillow's pictures only; `AREA` and `PILCUBIC` are for arrays.
    """

    NEAREST = 0
    ANTIALIAS = 1
    BILINEAR = LINEAR = 2
    BICUBIC = CUBIC = 3
    AREA = 4
    PILCUBIC = 5


class Border(StrEnum):
    """What pixels around an image are made of; the values are modes of `numpy.pad`."""

    CONSTANT = "constant"
    EDGE = "edge"
    REFLECT = "reflect"
    SYMMETRIC = "symmetric"


ARRAYS_ONLY = (Inter.AREA, Inter.PILCUBIC)


def check_interpolation(name: str, value: object) -> None:
    """Check that an argument is one of `Inter`.

    Raises:
        SpecError: it is not.
    """
    check(
        isinstance(value, Inter),
        f"`{name}` must be one of vision.Inter, got {value!r}; Inter.BILINEAR is usual",
    )


def pillow_filter(inter: Inter) -> PIL.Image.Resampling:
    """Return Pillow's name of an interpolation.

    Raises:
        SpecError: Pillow has none such.
    """
    check(
        inter not in ARRAYS_ONLY,
        f"a Pillow image cannot be resized with Inter.{inter.name}; use Inter.BICUBIC,"
        " or leave out ToPIL() and to_pil=True: arrays can",
    )
    return PIL.Image.Resampling(inter)


def pair_of_sides(size: Size) -> tuple[int, int]:
    """Return (height, width); one number stands for both.

    Raises:
        SpecError: they are not one or two numbers of pixels.
    """
    sides = (size, size) if isinstance(size, int) else size
    check(
        isinstance(sides, tuple | list) and len(sides) == 2,
        f"`size` must be an int or (height, width), got {size!r}; 224 is usual",
    )
    height, width = (whole_number("size", it, 1, "224 is usual") for it in sides)
    return height, width


def check_probability(probability: Any) -> None:
    """Check a probability.

    Raises:
        SpecError: it is not a number from 0 to 1.
    """
    check(
        isinstance(probability, int | float) and 0 <= probability <= 1,
        f"`prob` must be a probability, 0 to 1, got {probability!r}; 0.5 is usual",
    )


@dataclass(frozen=True, slots=True)
class ByChance(RandomOperator):
    """An operator that does something with probability `prob`.

    Raises:
        SpecError: `prob` is not a probability.
    """

    prob: float = 0.5

    def __post_init__(self) -> None:
        check_probability(self.prob)

    def drawn(self, image: Any, rng: Rng) -> Any:
        return self._made(image) if rng.random() < self.prob else image

    @abstractmethod
    def _made(self, image: Any) -> Any:
        """Return the changed image."""


def range_of(
    name: str, bounds: Any, low: float = -1e7, high: float = 1e7, usual: str = ""
) -> Range:
    """Return an argument that is (min, max).

    Raises:
        SpecError: it is not, or not within `low` and `high`.
    """
    check(
        isinstance(bounds, tuple | list)
        and len(bounds) == 2
        and low <= bounds[0] <= bounds[1] <= high,
        f"`{name}` must be (min, max) with {low:g} <= min <= max <= {high:g}, got"
        f" {bounds!r}; {usual or 'exchange or change the two'}",
    )
    return bounds[0], bounds[1]


def around(name: str, value: Any, center: float, low: float, high: float) -> Range:
    """Return a range given as (min, max), or as the distance from its center.

    Raises:
        SpecError: it is not within `low` and `high`.
    """
    if not isinstance(value, int | float):
        return range_of(name, value, low, high)
    check(value >= 0, f"`{name}` must be >= 0 or (min, max), got {value}; try 0.4")
    return range_of(name, (max(low, center - value), center + value), low, high)


def sides_of_padding(padding: Size) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom in pixels; 1, 2 or 4 numbers say them.

    Raises:
        SpecError: they are not such numbers.
    """
    sides = (padding,) * 4 if isinstance(padding, int) else tuple(padding)
    check(
        len(sides) in (2, 4),
        "`padding` must be an int, (left and right, top and bottom) or (left, top,"
        f" right, bottom), got {padding!r}; 4 is usual",
    )
    left, top, right, bottom = sides * 2 if len(sides) == 2 else sides
    for side in sides:
        whole_number("padding", side, 0, "4 pixels are usual")
    return left, top, right, bottom


def colors_of(fill: Any) -> tuple[int, ...]:
    """Return the value of pixels around an image: three numbers, or one for all.

    Raises:
        SpecError: they are not numbers from 0 to 255.
    """
    values = (fill,) * 3 if isinstance(fill, int) else fill
    check(
        isinstance(values, tuple | list)
        and len(values) == 3
        and all(isinstance(value, int) and 0 <= value <= 255 for value in values),
        f"`fill_value` must be 0 to 255, or three such numbers, got {fill!r}; 0 is"
        " black",
    )
    return tuple(values)
