"""Rows of arrays as samples, copied from the arrays straight into the batch.

If a dataset is an array, a memory map, a tensor or torch's `TensorDataset`, or a
`Subset` of one, a single call gathers all rows of a chunk. A sample is created only if
somebody looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset

Column = NDArray[Any] | torch.Tensor
"""One row per sample, along its first axis."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows(Sequence[Any]):
    """Samples that are rows of arrays, or tuples of a row of each."""

    columns: tuple[Column, ...]
    indices: NDArray[np.int64]
    """Indices of the rows, `int64 [N]`, below the length of the shortest column."""
    single: bool = True
    """Whether a sample is a row of the only column, rather than a tuple."""

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return list(ArrayRows(self.columns, self.indices[at], self.single))
        row = tuple(column[int(self.indices[at])] for column in self.columns)
        return row[0] if self.single else row

    def __iter__(self) -> Iterator[Any]:
        indices = self.indices.tolist()
        rows = [map(column.__getitem__, indices) for column in self.columns]
        return rows[0] if self.single else zip(*rows, strict=True)

    def apart(self) -> list[Self]:
        """Return the rows of each column."""
        return [type(self)((column,), self.indices) for column in self.columns]

    def write(self, memory: torch.Tensor) -> None:
        """Gather the rows of the only column into memory of their type and shape."""
        (column,) = self.columns
        if isinstance(column, torch.Tensor):
            torch.index_select(column, 0, torch.from_numpy(self.indices), out=memory)
        else:  # mode="clip": to check the indices, numpy would make a copy first
            np.take(column, self.indices, 0, memory.numpy(), mode="clip")


@dataclass(frozen=True, slots=True, eq=False)
class TableRows(Sequence[Any]):
    """Rows of a table: dicts of Python values, which are made only if somebody looks.

    Batches are made of the columns.
    """

    columns: dict[str, NDArray[Any] | list[Any]]
    """By name: numbers `[n]`, or a list of n Python values."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> dict[str, Any] | Self:
        found = {name: column[at] for name, column in self.columns.items()}
        if isinstance(at, slice):
            return type(self)(found)
        return {name: _python(value) for name, value in found.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lists = (
            c if isinstance(c, list) else c.tolist() for c in self.columns.values()
        )
        return (
            dict(zip(self.columns, row, strict=True))
            for row in zip(*lists, strict=True)
        )


def _python(value: Any) -> Any:
    """Return a value of a column as Python's own type."""
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True, slots=True)
class ArrayRowReader:
    """Reads many samples of a dataset at once, as its `__getitems__` would."""

    dataset: Any

    @classmethod
    def of(cls, dataset: Any) -> ArrayRowReader | None:
        """Return a reader for this dataset; None if its samples are not array rows."""
        whole = dataset
        while type(whole) is Subset:
            whole = whole.dataset
        return None if columns_of(whole) is None else cls(dataset)

    def __call__(self, indices: Sequence[int]) -> Sequence[Any]:
        whole, places = self.dataset, indices
        while type(whole) is Subset:
            places = [whole.indices[at] for at in places]
            whole = whole.dataset
        columns = columns_of(whole) or ()  # the dataset may have replaced them
        wanted = np.asarray(places)
        if columns and wanted.dtype == np.int64 and wanted.ndim == 1 and len(wanted):
            length = min(map(len, columns))
            if wanted.min() >= 0 and wanted.max() < length:
                single = type(whole) is not TensorDataset
                return ArrayRows(columns, wanted, single)
        return [self.dataset[index] for index in indices]  # one by one, as for any


def columns_of(dataset: Any) -> tuple[Column, ...] | None:
    """Return the arrays whose rows are the samples of a dataset, or None."""
    kind = type(dataset)
    if kind is TensorDataset:
        tensors = dataset.tensors
        plain = all(type(each) is torch.Tensor and each.ndim for each in tensors)
        return tuple(tensors) if plain else None
    if kind in (np.ndarray, np.memmap, torch.Tensor) and dataset.ndim:
        return (dataset,)
    return None
