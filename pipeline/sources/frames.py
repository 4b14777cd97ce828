"""Tables in memory, and those of Hugging Face's datasets, taken by column.

A data frame of pandas or polars, or pyarrow's table, becomes a dataset of its rows.
Hugging Face's datasets are datasets already; many rows of theirs are read at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from torch.utils.data import StackDataset

from ...engine.batch.array_rows import is_column
from .row_groups import RowGroup, RowGroups


class Frame:
    """A dataset of the rows of a table: dicts by column.

    Args:
        groups: the rows, in memory or in a mapped file.
    """

    QUICK = True

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self._groups = [group for group in groups if len(group)]
        sizes = [*map(len, self._groups)]
        self._rows = RowGroups(sizes, self._group, len(sizes) or 1, mapped=True)

    @classmethod
    def of(cls, table: Any, *, mapped: bool = False) -> Self:
        """Return the rows of a table of pyarrow's."""
        return cls([RowGroup.of(each, mapped=mapped) for each in table.to_batches()])

    def _group(self, number: int) -> RowGroup:
        return self._groups[number]

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __getitem__(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = self._rows((index,))[0]
        return found

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Return some rows."""
        return self._rows(indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._groups,)


def rows_of(data: Any) -> Any:
    """Return the rows of a table as a dataset; anything else as it is.

    A dict of arrays or tensors, one by column, is a table, too.
    """
    package = type(data).__module__.partition(".")[0]
    kind = f"{package}.{type(data).__name__}"
    if kind == "pandas.DataFrame":
        return Frame([_of_pandas(data)])
    if kind == "pyarrow.Table":
        return Frame.of(data)
    if kind == "pyarrow.RecordBatch":
        return Frame([RowGroup.of(data, mapped=False)])
    if kind == "polars.DataFrame":
        return Frame.of(data.to_arrow())
    if isinstance(data, Mapping) and data and {*map(type, data)} == {str}:
        columns = all(map(is_column, data.values()))
        return StackDataset(**data) if columns else data
    return data


def _of_pandas(frame: Any) -> RowGroup:
    """Return the rows of a data frame, with the values of its `to_dict("records")`."""
    numbers, others = {}, {}
    for name, column in frame.items():
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf":
            numbers[name] = column.to_numpy()
        else:
            others[name] = column.tolist()
    return RowGroup([*frame.columns], numbers, others, len(frame))


class HubReader:
    """Reads many rows of a Hugging Face dataset at once, as its `__getitems__` would.

    Args:
        dataset: of columns that need no decoding.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @classmethod
    def of(cls, dataset: Any) -> Self | None:
        """Return a reader for this dataset; None if its rows are not plain columns."""
        hub = sys.modules.get("datasets")
        if hub is None or type(dataset) is not hub.Dataset:
            return None
        kinds = {type(feature) for feature in dataset.features.values()}
        return cls(dataset) if kinds <= {hub.Value, hub.ClassLabel} else None

    @cached_property
    def _rows(self) -> Frame:
        return Frame.of(self._dataset.data.table, mapped=True)

    @cached_property
    def _places(self) -> Any:
        """The rows of the table that the dataset has selected; None: all."""
        chosen = self._dataset._indices  # noqa: SLF001 there is no public name
        return None if chosen is None else np.asarray(chosen.column(0), np.int64)

    def __call__(self, indices: Sequence[int]) -> Sequence[Any]:
        form = self._dataset.format
        if form["type"] is not None or form["columns"] != self._dataset.column_names:
            samples: Sequence[Any] = self._dataset.__getitems__(indices)
            return samples
        rows = self._rows
        chosen = indices if self._places is None else self._places[np.asarray(indices)]
        return rows.__getitems__(chosen)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dataset,)
