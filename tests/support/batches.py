"""Batches of every kind that collate functions may return.

Their types live here, where every process can import them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .datasets import Sample

__all__ = ["COLLATES", "Pair", "Refusing", "Ticked", "same"]


class Pair(NamedTuple):
    """A namedtuple of the user's."""

    values: torch.Tensor
    indices: list[int]


@dataclass
class Ticked:
    """A class of the user's."""

    values: torch.Tensor
    tick: str


class Refusing:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def _values(samples: list[Sample]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(values) for values, _ in samples])


def _tree(samples: list[Sample]) -> Any:
    values = _values(samples)
    return {
        "twice": [values, values],
        "turned": values.T,
        "grown": values[:1].expand(8, -1),
        "half": values.to(torch.bfloat16),
        "none": values[:0],
        "text": [str(index) for _, index in samples],
        ("a", 1): (None, 2.5, b"bytes"),
    }


def _ragged(samples: list[Sample]) -> Any:
    return [torch.ones(index * 7 % 50 + 1) for _, index in samples]


def _arrays(samples: list[Sample]) -> Any:
    large = np.stack([np.repeat(values, 300) for values, _ in samples])
    return large, large.T, np.arange(3), np.array(["some", "words"], object)


def _images(samples: list[Sample]) -> Any:
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5) + samples[0][1]
    return images.to(memory_format=torch.channels_last), images.to_sparse()


def _attributes(samples: list[Sample]) -> Any:
    parameter = torch.nn.Parameter(_values(samples))
    return [parameter, torch.tensor(3), samples[0][1] > 2]


COLLATES = {
    "tree": _tree,
    "ragged": _ragged,
    "arrays": _arrays,
    "images": _images,
    "attributes": _attributes,
    "namedtuple": lambda samples: Pair(_values(samples), [i for _, i in samples]),
    "class": lambda samples: Ticked(_values(samples), "tick"),
    "number": lambda samples: sum(index for _, index in samples),
    "samples": lambda samples: samples,
}
"""Functions that make a batch of samples of `Numbers`, by what is odd about it."""


def same(ours: Any, theirs: Any) -> bool:
    """Whether two batches are alike: types, shapes, bytes; strides, if none repeats."""
    if isinstance(ours, torch.Tensor):
        return _same_tensor(ours, theirs)
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Ticked):
        ours, theirs = vars(ours), vars(theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and same([*ours.values()], [*theirs.values()])
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def _same_tensor(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.layout, ours.dtype) != (theirs.layout, theirs.dtype):
        return False
    if ours.layout is not torch.strided:
        return same(ours.to_dense(), theirs.to_dense())
    strides = ours.stride() == theirs.stride() or 0 in (
        *ours.stride(),
        *theirs.stride(),
    )
    alike = strides and ours.requires_grad == theirs.requires_grad
    return alike and torch.equal(ours, theirs)
