"""Rows of arrays as samples, copied from the arrays straight into the batch.

If a dataset is an array, a memory map, a tensor, torch's `TensorDataset` or a
`StackDataset` of such, or a `Subset` of one, a single call gathers all rows of a chunk.
A sample is created only if somebody looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import StackDataset, Subset, TensorDataset

# One row per sample, along its first axis.
Column = NDArray[Any] | torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows(Sequence[Any]):
    """Samples that are rows of arrays, or tuples or dicts of a row of each."""

    columns: tuple[Column, ...]
    indices: NDArray[np.int64]
    """Indices of the rows, `int64 [N]`, below the length of the shortest column."""
    single: bool = True
    """Whether a sample is a row of the only column, rather than of several."""
    keys: tuple[Any, ...] | None = None
    """Names of the columns if a sample is a dict; None: it is a tuple."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return list(replace(self, indices=self.indices[at]))
        row = tuple(column[int(self.indices[at])] for column in self.columns)
        return row[0] if self.single else self._sample(row)

    def __iter__(self) -> Iterator[Any]:
        indices = self.indices.tolist()
        rows = [map(column.__getitem__, indices) for column in self.columns]
        return rows[0] if self.single else map(self._sample, zip(*rows, strict=True))

    def _sample(self, row: tuple[Any, ...]) -> Any:
        return row if self.keys is None else dict(zip(self.keys, row, strict=True))

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


class Block(NamedTuple):
    """Columns of a table whose numbers have one type."""

    names: tuple[str, ...]
    values: NDArray[Any]
    """`[rows, columns]`."""


@dataclass(frozen=True, slots=True, eq=False)
class TableRows(Sequence[Any]):
    """Rows of a table: dicts of Python values, which are made only if somebody looks.

    Batches are made of the columns.
    """

    names: tuple[str, ...]
    """All columns, in order."""
    blocks: tuple[Block, ...]
    """Those of numbers."""
    others: dict[str, list[Any]]
    """All others, as Python values."""
    length: int

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any] | list[Any]], length: int) -> Self:
        """Return `length` rows of columns: arrays of numbers, or lists."""
        blocks = tuple(
            Block((name,), column[:, None])
            for name, column in columns.items()
            if isinstance(column, np.ndarray)
        )
        others = {n: c for n, c in columns.items() if isinstance(c, list)}
        return cls(tuple(columns), blocks, others, length)

    @property
    def types(self) -> tuple[tuple[tuple[str, ...], Any], ...]:
        """The names of the columns of each block, with their type."""
        return tuple((names, values.dtype) for names, values in self.blocks)

    def columns(self) -> list[NDArray[Any] | list[Any]]:
        """Return all columns, in order."""
        columns: dict[str, Any] = dict(self.others)
        for names, values in self.blocks:
            columns.update(zip(names, values.T, strict=True))
        return [columns[name] for name in self.names]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            blocks = tuple(Block(names, v[at]) for names, v in self.blocks)
            others = {name: column[at] for name, column in self.others.items()}
            return type(self)(self.names, blocks, others, len(range(self.length)[at]))
        row = (
            column[at] if isinstance(column, list) else column[at].item()
            for column in self.columns()
        )
        return dict(zip(self.names, row, strict=True))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.names:
            return iter([{} for _ in range(self.length)])
        lists = (c if isinstance(c, list) else c.tolist() for c in self.columns())
        return (
            dict(zip(self.names, row, strict=True)) for row in zip(*lists, strict=True)
        )


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
        if type(whole) is Subset:  # its indices may be an object of the user's
            places = np.asarray(indices).tolist()
        while type(whole) is Subset:
            places = [whole.indices[at] for at in places]
            whole = whole.dataset
        columns = columns_of(whole) or ()  # the dataset may have replaced them
        rows = np.array(places)  # the plan's own array is read-only
        if columns and rows.dtype == np.int64 and rows.ndim == 1 and len(rows):
            length = min(map(len, columns))
            if rows.min() >= 0 and rows.max() < length:
                single = not isinstance(whole, TensorDataset | StackDataset)
                members = whole.datasets if type(whole) is StackDataset else None
                keys = tuple(members) if isinstance(members, dict) else None
                return ArrayRows(columns, rows, single, keys)
        return [self.dataset[index] for index in indices]  # one by one, as for any


def columns_of(dataset: Any) -> tuple[Column, ...] | None:
    """Return the arrays whose rows are the samples of a dataset, or None."""
    kind = type(dataset)
    if kind in (TensorDataset, StackDataset):
        members = dataset.tensors if kind is TensorDataset else dataset.datasets
        columns = tuple(members.values() if isinstance(members, dict) else members)
        return columns if columns and all(map(is_column, columns)) else None
    return (dataset,) if is_column(dataset) else None


def is_column(data: Any) -> bool:
    """Whether the samples of a dataset are the rows of an array or a tensor."""
    return type(data) in (np.ndarray, np.memmap, torch.Tensor) and bool(data.ndim)
