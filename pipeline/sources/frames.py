"""Tables in memory, and those of Hugging Face's datasets, taken by column.

A data frame of pandas or polars, or pyarrow's table, becomes a dataset of its rows.
Hugging Face's datasets are datasets already; many rows of theirs are read at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from torch.utils.data import StackDataset

from ...engine.batch.array_rows import is_column
from ...errors import check
from .row_groups import Indices, RowGroup, RowGroups


class Frame:
    """A dataset of the rows of a table: dicts by column.

    Args:
        groups: the rows, in memory or in a mapped file.
    """

    QUICK = True
    PER_PROCESS = True
    """Threads share it safely, as they do any source."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self._groups = [group for group in groups if len(group)]
        sizes = [*map(len, self._groups)]
        self._rows = RowGroups(
            sizes, self._groups.__getitem__, len(sizes) or 1, mapped=True
        )

    @classmethod
    def of(cls, table: Any, *, mapped: bool = False) -> Self:
        """Return the rows of a table of pyarrow's."""
        return cls([RowGroup.of(batch, mapped=mapped) for batch in table.to_batches()])

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows.one(index)

    def __getitems__(self, indices: Indices) -> Sequence[dict[str, Any]]:
        """Return some rows."""
        return self._rows(indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._groups,)


def rows_of(data: Any) -> Any:
    """Return the rows of a table as a dataset; anything else as it is.

    A dict of arrays or tensors, one by column, is a table, too, and so is a TensorDict.
    """
    match f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}":
        case "pandas.DataFrame":
            return Frame([_of_pandas(data)])
        case "pyarrow.Table":
            return Frame.of(data)
        case "pyarrow.RecordBatch":
            return Frame([RowGroup.of(data, mapped=False)])
        case "polars.DataFrame":
            return Frame.of(data.to_arrow())
        case "tensordict.TensorDict":
            data = data.to_dict()
    has_names = isinstance(data, Mapping) and data and {*map(type, data)} == {str}
    if has_names and "self" not in data and all(map(is_column, data.values())):
        lengths = {name: len(column) for name, column in data.items()}
        check(
            len({*lengths.values()}) == 1,
            f"`from_dataset` needs columns of one length, got {lengths}; cut them",
        )
        return StackDataset(**data)
    return data


def _of_pandas(frame: Any) -> RowGroup:
    """Return the rows of a data frame, with the values of its `to_dict("records")`."""
    columns: dict[Any, Any] = {}  # of columns with one name, a row has the last one
    for at, (name, column) in enumerate(frame.items()):
        plain = (
            isinstance(column.dtype, np.dtype)
            and column.dtype.kind in "biuf"
            and column.dtype not in (np.uint64, np.float16)
        )
        columns[name] = column.to_numpy(copy=True) if plain else at
    places = {name: at for name, at in columns.items() if isinstance(at, int)}
    numbers = {name: c for name, c in columns.items() if name not in places}
    part = frame.iloc[:, [*places.values()]].set_axis([*places], axis=1)
    rows = part.to_dict("records")
    others = {name: [row[name] for row in rows] for name in places}
    return RowGroup([*columns], numbers, others, len(frame))


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
        kind = type(dataset)
        if (kind.__module__, kind.__name__) != ("datasets.arrow_dataset", "Dataset"):
            return None
        kinds = {type(feature).__name__ for feature in dataset.features.values()}
        return cls(dataset) if kinds <= {"Value", "ClassLabel"} else None

    @cached_property
    def _rows(self) -> Frame:
        return Frame.of(self._dataset.data.table, mapped=True)

    @cached_property
    def _places(self) -> Any:
        """The rows of the table that the dataset has selected; None: all."""
        indices = self._dataset._indices  # noqa: SLF001 there is no public name
        return None if indices is None else np.asarray(indices.column(0), np.int64)

    def __call__(self, indices: Sequence[int]) -> Sequence[Any]:
        data, rows = self._dataset, np.asarray(indices)
        usual = rows.dtype == np.int64 and 0 <= rows.min() <= rows.max() < len(data)
        plain = data.format["type"] is None
        if not (usual and plain and data.format["columns"] == data.column_names):
            return [*data.__getitems__(indices)]
        places = self._places
        return self._rows.__getitems__(rows if places is None else places[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dataset,)
