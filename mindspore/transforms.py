"""MindSpore's operators for labels, and those that combine operators.

    import penstock.mindspore.transforms as C  # was: mindspore.dataset.transforms

    data = data.map(C.TypeCast("int32"), "label")

The older names of this module, such as `transforms.c_transforms`, are it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError, check, whole_number
from . import vision
from .drawing import RandomOperator, Rng, called, chosen_rng
from .vision.conversion import numpy_dtype
from .vision.pixels import is_picture
from .vision.utils import Inter, check_probability

__all__ = ["Compose", "OneHot", "RandomApply", "RandomChoice", "TypeCast", "vision"]

Array = NDArray[Any]
Operation = Callable[..., Any]

c_transforms = py_transforms = transforms = sys.modules[__name__]
for _name, _module in {
    "c_transforms": transforms,
    "py_transforms": transforms,
    "transforms": transforms,
    "vision": vision,
    "vision.c_transforms": vision,
    "vision.py_transforms": vision.py_transforms,
    "vision.utils": vision.utils,
}.items():
    sys.modules[f"{__name__}.{_name}"] = _module


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"penstock.mindspore.transforms has no {name!r}; write a function of the"
        " array, and give it to map()"
    )


@dataclass(frozen=True, slots=True)
class TypeCast:
    """Change the type of an array.

    Args:
        data_type: one of numpy, torch or MindSpore, or a name.

    Raises:
        SpecError: there is no such type.
    """

    data_type: Any

    def __post_init__(self) -> None:
        numpy_dtype(self.data_type)

    def __call__(self, values: Any) -> Array:
        kind, array = numpy_dtype(self.data_type), np.asarray(values)
        if array.dtype.kind == "f" and kind.kind in "iu":
            with np.errstate(invalid="ignore"):  # what does not fit is undefined in C
                return array.astype(np.int64).astype(kind)
        return array.astype(kind)


@dataclass(frozen=True, slots=True)
class OneHot:
    """Encode a class number, or `n` of them, as `[num_classes]` or `[n, num_classes]`.

    Args:
        num_classes: number of classes.
        smoothing_rate: the share that is spread over all classes.

    Raises:
        SpecError: an argument is out of range.
        SampleError: when called: these are not numbers from 0 to `num_classes` - 1.
    """

    num_classes: int
    smoothing_rate: float = 0.0

    def __post_init__(self) -> None:
        whole_number("num_classes", self.num_classes, 1, "give the number of classes")
        check(
            0 <= self.smoothing_rate <= 1,
            f"`smoothing_rate` must be 0 to 1, got {self.smoothing_rate}; 0.1 is usual",
        )

    def __call__(self, labels: Any) -> Array:
        array, count = np.asarray(labels), self.num_classes
        whole = array.dtype.kind in "iu" and array.ndim < 2 and array.size
        if not whole or array.min() < 0 or array.max() >= count:
            raise SampleError(
                f"OneHot({count}) takes an int, or ints [n], from 0 to {count - 1}, got"
                f" {array.dtype} {[*array.shape]} {array!s:.40}; raise `num_classes`,"
                " or number the classes from 0"
            )
        vectors: Array = (np.arange(count) == array[..., None]).astype(array.dtype)
        if self.smoothing_rate:
            vectors = vectors * (1 - self.smoothing_rate) + self.smoothing_rate / count
        return vectors


def by_python(operation: Any) -> bool:
    """Whether MindSpore computes an operator in Python, whatever the image is."""
    return (
        isinstance(operation, vision.PYTHONS)
        or getattr(operation, "to_pil", False)
        or getattr(operation, "interpolation", None) is Inter.ANTIALIAS
        or any(map(by_python, getattr(operation, "transforms", ())))
    )


@dataclass(frozen=True, slots=True)
class Composed:
    """What `Compose` returns: calls operators one after another.

    Like MindSpore's, it returns a tuple if one of them is computed in Python or the
    input is an image of Pillow, and otherwise the array.
    """

    transforms: tuple[Operation, ...]

    def __call__(self, *values: Any) -> Any:
        return self.through(values, chosen_rng(None))

    def through(self, values: tuple[Any, ...], rng: Rng) -> Any:
        """Return what the last one makes, and give those that draw a generator."""
        as_tuple = by_python(self) or (len(values) == 1 and is_picture(values[0]))
        for operation in self.transforms:
            result = called(operation, values, rng)
            values = result if isinstance(result, tuple) else (result,)
        return values if as_tuple or len(values) > 1 else values[0]


class RandomComposed(Composed, RandomOperator):
    """What `Compose` returns if one of the operators draws random numbers."""

    __slots__ = ()

    def __call__(self, *values: Any, rng: Rng | None = None) -> Any:
        return self.through(values, chosen_rng(rng))

    def drawn(self, image: Any, rng: Rng) -> Any:
        return self.through((image,), rng)


def Compose(transforms: Sequence[Operation]) -> Composed:
    """Return one operator that calls several, one after another.

    Args:
        transforms: operators of `vision` and `transforms`, and functions.

    Raises:
        SpecError: there are none, or one cannot be called.
    """
    check_operations(transforms)
    draws = any(isinstance(operation, RandomOperator) for operation in transforms)
    return (RandomComposed if draws else Composed)(tuple(transforms))


def check_operations(operations: Any) -> None:
    """Check that operators are a list of what can be called.

    Raises:
        SpecError: they are not.
    """
    check(
        isinstance(operations, list | tuple)
        and len(operations)
        and all(map(callable, operations)),
        f"`transforms` must be a list of operators or functions, got {operations!r};"
        " [vision.Decode(), vision.Resize(224)] is an example",
    )


@dataclass(frozen=True, slots=True)
class RandomApply(RandomOperator):
    """Apply all of some operators with probability `prob`, or none.

    Args:
        transforms: the operators.
        prob: the probability.

    Raises:
        SpecError: an argument is out of range.
    """

    transforms: Sequence[Operation]
    prob: float = 0.5

    def __post_init__(self) -> None:
        check_operations(self.transforms)
        check_probability(self.prob)

    def drawn(self, image: Any, rng: Rng) -> Any:
        if rng.random() >= self.prob:
            return image
        return in_order(image, self.transforms, rng)


@dataclass(frozen=True, slots=True)
class RandomChoice(RandomOperator):
    """Apply one of some operators.

    Args:
        transforms: the operators.

    Raises:
        SpecError: there are none, or one cannot be called.
    """

    transforms: Sequence[Operation]

    def __post_init__(self) -> None:
        check_operations(self.transforms)

    def drawn(self, image: Any, rng: Rng) -> Any:
        operation = self.transforms[int(rng.integers(len(self.transforms)))]
        return in_order(image, [operation], rng)


def in_order(image: Any, operations: Sequence[Operation], rng: Rng) -> Any:
    """Return what operators make of an image, one after another."""
    for operation in operations:
        result = called(operation, (image,), rng)
        image = result[0] if isinstance(result, tuple) and len(result) == 1 else result
    return image
