"""What can be told of a sample without knowing what it is: its bytes, its look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["describe", "odd_ones", "size_of"]


def size_of(sample: Any) -> int:
    """Bytes a sample holds: arrays, tensors, text and bytes; 64 for anything else."""
    nbytes = getattr(sample, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(sample, (bytes, bytearray, str)):
        return len(sample)
    if isinstance(sample, (tuple, list)):
        return sum(map(size_of, sample))
    if isinstance(sample, dict):
        return sum(map(size_of, sample.values()))
    return 64


def describe(sample: Any) -> str:
    """Say what a sample is, in a few words: `uint8 [3, 4]`, `(float32 [2], int)`."""
    shape = getattr(sample, "shape", None)
    if shape is not None:
        return f"{str(sample.dtype).removeprefix('torch.')} {list(shape)}"
    if isinstance(sample, (tuple, list)):
        return f"({', '.join(map(describe, sample))})"
    if isinstance(sample, dict):
        inner = ", ".join(f"{key}: {describe(value)}" for key, value in sample.items())
        return f"{{{inner}}}"
    return type(sample).__name__


def odd_ones(samples: Mapping[int, Any], indices: NDArray[np.int64] | None) -> str:
    """Name the samples of a batch that differ from most, and the cure: see `spread`."""
    return (
        f"the samples of a batch must be of one shape and type;"
        f" {spread(samples, indices)}. Bring them to one shape in a map(), or give"
        " batch(collate_fn=...) a function that pads"
    )


def spread(samples: Mapping[int, Any], indices: NDArray[np.int64] | None) -> str:
    """Say what most samples of a batch are, and name some that are something else.

    Args:
        samples: by row of the batch.
        indices: of the dataset, by row; None where they are not known.
    """
    looks = {row: describe(sample) for row, sample in samples.items()}
    usual = Counter(looks.values()).most_common(1)[0][0]
    odd = [
        f"sample index {indices[row]}: {look}" if indices is not None else look
        for row, look in looks.items()
        if look != usual
    ][:5]
    return f"most are {usual}, but {'; '.join(odd)}" if odd else f"all are {usual}"
