"""What is digested in tests: datasets, transforms and functions of many kinds."""

from __future__ import annotations

import enum
import functools
import linecache
import math
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from penstock.cache.fingerprint import digest

__all__ = [
    "Color",
    "Compose",
    "Handles",
    "Point",
    "Row",
    "Scale",
    "Squares",
    "Stamped",
    "digests",
    "even",
    "loaded",
    "things",
]

FACTOR = 3


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Row(NamedTuple):
    path: str
    label: int = 0


@dataclass
class Point:
    x: float
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Vocabulary:
    """Its docstring is its own; that of `Tags` is made of its fields."""

    words: frozenset[str] = frozenset(("p", "q", "r"))


@dataclass(frozen=True)
class Tags:
    words: frozenset[str] = frozenset(("p", "q", "r"))


class Scale:
    """A transform with a setting."""

    __slots__ = ("__by", "offset")

    def __init__(self, by: float, offset: float = 0.0) -> None:
        self.__by = by
        self.offset = offset

    def __call__(self, value: Any) -> Any:
        return value * self.__by + self.offset


class Compose:
    """As torchvision's: transforms in a list."""

    def __init__(self, transforms: Iterable[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for each in self.transforms:
            value = each(value)
        return value


class Squares(Dataset[Any]):
    def __init__(self, length: int, transform: Callable[[Any], Any]) -> None:
        self.values = torch.arange(length)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.values[index] ** 2)


class Stamped:
    """Defines its own fingerprint."""

    def __init__(self, said: Any, path: str = "") -> None:
        self.said = said
        self.lock = threading.Lock()
        self.path = path

    def __penstock_fingerprint__(self) -> Any:
        return self.said

    def __len__(self) -> int:
        return 3


class Handles:
    """Holds an object that exists only in this process."""

    def __init__(self, file: Any) -> None:
        self.files = {"train": [file]}


def even(number: int) -> bool:
    return number == 0 or odd(number - 1)


def odd(number: int) -> bool:
    return number != 0 and even(number - 1)


@functools.cache
def remembered(value: float) -> float:
    return math.sqrt(value) * FACTOR


def numbers(values: set[str]) -> Iterator[int]:
    for value in sorted(values):
        if value in {"one", "two", "three"}:
            yield len(value)


def closure() -> Callable[[int], int]:
    offset = {"a": 1, "b": 2}

    def count(value: int) -> int:
        return count(value - 1) + offset["a"] if value else 0

    return count


def loaded(
    patch: pytest.MonkeyPatch, code: str, name: str = "users_tools"
) -> types.ModuleType:
    """Load code as a user's module, always under the same name."""
    module = types.ModuleType(name)
    patch.setitem(sys.modules, name, module)
    file = f"<{name}>"
    lines = code.splitlines(keepends=True)
    patch.setitem(linecache.cache, file, (0, None, lines, file))
    source = compile(code, file, "exec")
    exec(source, vars(module))  # noqa: S102 - as an import would
    return module


def things() -> dict[str, Any]:
    """Return one of each kind."""
    tangled: list[Any] = [1]
    tangled.append([tangled, tangled])
    return {
        "arrays": [np.arange(6).reshape(2, 3), np.float32(1), np.dtype("i4"), b"x"],
        "bound": Compose([]).__call__,
        "builtins": [len, math.sqrt, "a".upper, np.add, np.mean, torch.relu],
        "classes": [Color, Compose, Point, Row, Scale, Squares, Tags, Vocabulary, dict],
        "closure": closure(),
        "cycles": [even, tangled],
        "dataset": Squares(4, Compose([Scale(2.0), functools.partial(max, 3)])),
        "generators": [np.random.default_rng(1), torch.Generator().manual_seed(1)],
        "images": [Image.new("RGB", (2, 3), "red"), Image.new("P", (2, 3))],
        "lambda": lambda x: [y + FACTOR for y in x if y not in {"p", "q", "r"}],
        "names": [numbers, remembered, re.compile("a+", re.IGNORECASE)],
        "paths": {Path("a/b"): Color.RED, "c": Row("p", 1), None: Point(1.0, ["t"])},
        "sets": [{"a", "b", "c"}, frozenset(["x", "y", 1, None])],
        "tensors": {"a": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "times": [date(2020, 1, 2), datetime(2020, 1, 2, tzinfo=UTC), timedelta(1)],
        "types": [
            torch.float16,
            torch.device("cpu"),
            torch.Size([1]),
            1j,
            ...,
            range(3),
        ],
    }


def digests() -> dict[str, str]:
    """Return the digest of each."""
    return {name: digest(value, name).hex() for name, value in things().items()}
