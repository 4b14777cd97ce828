"""The samples that operators on text take: token ids, as lists, arrays or tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import SampleError

Ids: TypeAlias = NDArray[np.int64]
"""Token ids, or other integers."""

FROM_ZERO = "tokenizers number their tokens from 0"

IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
IGNORED = -100
"""The label that `torch.nn.functional.cross_entropy` ignores by default."""


def integers(value: Any, name: str) -> Ids:
    """Return a list, an array or a tensor of integers as an `int64` array.

    Raises:
        SampleError: they are not integers, or are rows of different lengths.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.size == 0 and array.dtype == np.float64:  # from an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in "biu":
        raise SampleError(
            f"`{name}` must be a list, an array or a tensor of integers, got "
            f"{described(value)}; tokenize text first, with ps.text.tokenize"
        )
    return array.astype(np.int64, copy=False)


def row(value: Any, name: str) -> Ids:
    """Return one sequence of integers as `int64 [n]`.

    Raises:
        SampleError: it is not one sequence of integers.
    """
    array = integers(value, name)
    if array.ndim != 1:
        raise SampleError(
            f"`{name}` of a sample must have one dimension, got "
            f"{described(value)}; give one sequence of token ids per sample"
        )
    return array


def without_none(value: Any) -> Any:
    """Return a list with None, fast tokenizers' sign for "no word", replaced by -1."""
    if isinstance(value, list | tuple) and None in value:
        return [-1 if each is None else each for each in value]
    return value


def ids_in(sample: Mapping[str, Any]) -> Any:
    """Return a dict's `input_ids`.

    Raises:
        SampleError: it has none.
    """
    if IDS not in sample:
        raise SampleError(
            f"a dict must have the token ids as `{IDS}`, got the keys "
            f"{sorted(map(str, sample))}; rename them in a map() before this"
        )
    return sample[IDS]


def described(value: object) -> str:
    """Return the kind of `value`; for arrays and tensors, also dtype and shape."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}: {value!r:.60}"
