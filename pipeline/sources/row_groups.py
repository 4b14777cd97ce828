"""Rows of a table that comes in groups, taken by column.

A group of rows is read as a whole: a row group of a Parquet file, a record batch of
Arrow's. Its columns stay what they are until somebody wants rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ... import config
from ...engine.batch.array_rows import Block, TableRows
from .source import PerProcess

Indices = Sequence[int] | NDArray[np.int64]
# A process keeps groups of at most this part of the memory budget.
SHARE = 8
# Groups are joined if they take at most one of so many parts of that.
PARTS = 2


def groups_bytes() -> int:
    """Return the bytes that the groups of a table may take in a process."""
    return config.memory_bytes() // SHARE


class RowGroup:
    """The columns of some rows.

    Args:
        names: of all columns, in order.
        numbers: arrays `[rows]`, by name.
        others: columns of pyarrow's, or lists, by name.
        length: the number of rows.
    """

    def __init__(
        self,
        names: Sequence[str],
        numbers: Mapping[str, NDArray[Any]],
        others: Mapping[str, Any],
        length: int,
    ) -> None:
        self.names, self.numbers, self.others = tuple(names), numbers, others
        self._length = length

    @classmethod
    def of(cls, table: Any, *, mapped: bool) -> Self:
        """Return the rows of a table of pyarrow's, or of a record batch.

        Args:
            table: the rows.
            mapped: whether its columns are in a mapped file, and stay there.
        """
        # Of columns with one name, a row has the last one.
        columns = dict(zip(table.schema.names, table.columns, strict=True))
        numbers = {
            name: values
            for name, column in columns.items()
            if (values := numbers_of(column, packed=mapped)) is not None
        }
        others = {name: columns[name] for name in columns if name not in numbers}
        return cls([*columns], numbers, others, table.num_rows)

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes that its columns take, in memory or in a mapped file."""
        return sum(c.nbytes for c in (*self.numbers.values(), *self.others.values()))

    @property
    def types(self) -> tuple[object, ...]:
        """The names and types of all columns."""
        numbers = ((name, column.dtype) for name, column in self.numbers.items())
        return self.names, *numbers, *(c.type for c in self.others.values())

    def row(self, at: int) -> dict[str, Any]:
        """Return one row."""
        numbers, others = self.numbers, self.others
        return {
            name: numbers[name][at].item()
            if name in numbers
            else _one(others[name], at)
            for name in self.names
        }

    def rows(self, rows: NDArray[np.int64]) -> TableRows:
        """Return some rows, in this order."""
        blocks = tuple(
            Block(names, np.stack([self.numbers[n].take(rows) for n in names], 1))
            for names in self.kinds()
        )
        others = {name: values_of(c, rows) for name, c in self.others.items()}
        return TableRows(self.names, blocks, others, len(rows))

    def kinds(self) -> list[tuple[str, ...]]:
        """Return the names of the columns of numbers, those of a type together."""
        names: dict[object, list[str]] = {}
        for name, column in self.numbers.items():
            names.setdefault(column.dtype, []).append(name)
        return [tuple(alike) for alike in names.values()]


class JoinedGroups:
    """Several groups of the same columns as one, from which batch after batch is taken.

    The numbers of a row are side by side: one call takes them all.

    Args:
        groups: by their number in the source.
        count: of the source's groups.

    Raises:
        ArrowException: columns of some type cannot be joined.
    """

    def __init__(self, groups: Mapping[int, RowGroup], count: int) -> None:
        import pyarrow as pa

        first, *_ = parts = [*groups.values()]
        sizes = [len(part) for part in parts]
        stops = np.cumsum(sizes)
        # By number of a group: its first row here, or -1.
        self.begins = np.full(count, -1, np.int64)
        self.begins[[*groups]] = stops - sizes
        self.names, self.blocks = first.names, []
        for names in first.kinds():
            shape = int(stops[-1]), len(names)
            block = Block(names, np.empty(shape, first.numbers[names[0]].dtype))
            for part, rows in zip(
                parts, np.split(block.values, stops[:-1]), strict=True
            ):
                np.stack([part.numbers[name] for name in names], 1, out=rows)
            self.blocks.append(block)
        self.others = {
            name: pa.concat_arrays(
                [
                    chunk
                    for column in (part.others[name] for part in parts)
                    for chunk in getattr(column, "chunks", (column,))
                ]
            )
            for name in first.others
        }

    def rows(self, rows: NDArray[np.int64]) -> TableRows:
        """Return some rows, in this order."""
        blocks = (Block(names, v.take(rows, 0)) for names, v in self.blocks)
        others = {name: values_of(c, rows) for name, c in self.others.items()}
        return TableRows(self.names, tuple(blocks), others, len(rows))


def numbers_of(column: Any, *, packed: bool) -> NDArray[Any] | None:
    """Return a column of numbers as an array; None if it has others, or gaps.

    Bits stay `packed` in a mapped file: to unpack them would read all of the column.
    """
    import pyarrow as pa

    kind = column.type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    odd = kind in (pa.uint64(), pa.float16()) or column.null_count
    if odd or not (numbers or (pa.types.is_boolean(kind) and not packed)):
        return None
    return np.asarray(column)


def _one(column: Any, row: int) -> Any:
    return column[row] if isinstance(column, list) else column[row].as_py()


def values_of(column: Any, rows: NDArray[np.int64]) -> list[Any]:
    """Return rows of a column as Python values; those in a row need no copy."""
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    import pyarrow as pa

    first, count = int(rows[0]), len(rows)
    if count == 1 or np.array_equal(rows, np.arange(first, first + count)):
        return [*column.slice(first, count).to_pylist()]
    try:
        return [*column.take(rows).to_pylist()]
    except pa.ArrowNotImplementedError:  # not of views of text, for instance
        return [column[row].as_py() for row in rows.tolist()]


def mixed(parts: Sequence[TableRows], order: NDArray[np.int64]) -> Sequence[Any]:
    """Return rows of several groups; number i of all is row `order[i]` of them."""
    ranks, names = np.argsort(order), parts[0].names
    if any(part.names != names for part in parts):
        return reordered(parts, ranks)
    if any(part.types != parts[0].types for part in parts):
        parts = unified(parts)
    blocks = tuple(
        Block(kind, np.concatenate([p.blocks[at].values for p in parts]).take(ranks, 0))
        for at, (kind, _) in enumerate(parts[0].blocks)
    )
    others = {
        name: reordered([part.others[name] for part in parts], ranks)
        for name in parts[0].others
    }
    return TableRows(names, blocks, others, len(order))


def reordered(parts: Iterable[Iterable[Any]], ranks: NDArray[np.int64]) -> list[Any]:
    """Return values of all parts; the i-th of the result is number `ranks[i]`."""
    values = [*itertools.chain.from_iterable(parts)]
    return [values[rank] for rank in ranks.tolist()]


def unified(parts: Sequence[TableRows]) -> list[TableRows]:
    """Return the same rows; a column of different types has Python values."""
    tables: list[dict[str, Any]] = [{} for _ in parts]
    columns = zip(*(part.columns() for part in parts), strict=True)
    for name, shares in zip(parts[0].names, columns, strict=True):
        types = {getattr(share, "dtype", list) for share in shares}
        for table, share in zip(tables, shares, strict=True):
            as_list = isinstance(share, np.ndarray) and len(types) > 1
            table[name] = share.tolist() if as_list else share
    return [
        TableRows.of(table, len(part))
        for table, part in zip(tables, parts, strict=True)
    ]


class RowGroups:
    """Rows of a table, by index.

    Args:
        sizes: the number of rows in each group.
        load: returns a group, given its number.
        count: groups that a process keeps.
        mapped: whether groups are in mapped files, or in memory anyway: they take no
            memory of their own.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        load: Callable[[int], RowGroup],
        count: int,
        *,
        mapped: bool,
    ) -> None:
        # Rows that somebody wanted, about: threads may count at once.
        self.asked_rows = 0
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._begins = self._ends - sizes
        self._groups: PerProcess[RowGroup] = PerProcess(
            load, count, None if mapped else attrgetter("nbytes"), groups_bytes
        )
        # Two sets of groups: some threads begin a window, others end one.
        self._joined_groups = PerProcess(self._join, 2)
        # The groups of the last rows that were in several.
        self._last_groups: frozenset[int] = frozenset()
        # Those to be taken from as one, and whether each group is one of them.
        self._together = frozenset[int](), np.zeros(len(self._ends), np.bool_)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def one(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        self.asked_rows += 1
        at = int(np.searchsorted(self._ends, index, "right"))
        return self._groups(at).row(index - int(self._begins[at]))

    def __call__(self, indices: Indices) -> Sequence[dict[str, Any]]:
        """Return some rows; rows of the same group are taken from it at once.

        Raises:
            IndexError: there is no such row.
        """
        positions = np.asarray(indices, np.int64)
        if not len(positions):
            return []
        if positions.min() < 0 or positions.max() >= len(self):
            outside = next(index for index in indices if not 0 <= index < len(self))
            raise IndexError(f"row {outside} of {len(self)}")
        self.asked_rows += len(positions)
        groups = np.searchsorted(self._ends, positions, "right")
        rows = positions - self._begins[groups]
        together, members = self._together
        if groups.min() < groups.max() and members[groups].all():
            joined_groups = self._joined_groups(together)
            if joined_groups is not None:
                return joined_groups.rows(joined_groups.begins[groups] + rows)
        return self._of_groups(groups, rows)

    def _of_groups(
        self, groups: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Sequence[dict[str, Any]]:
        """Return rows of some groups, given the number of each in its group."""
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
        numbers = groups[order[starts]].tolist()
        row_groups = self._groups.all(numbers)
        if len(row_groups) == 1:
            return row_groups[0].rows(rows)
        before, self._last_groups = self._last_groups, frozenset(numbers)
        both = before | self._last_groups
        # Nearly the same groups as before are joined, unless they are large.
        if (
            len(before & self._last_groups) >= 0.9 * len(both)
            and sum(group.nbytes for group in row_groups) <= groups_bytes() // PARTS
        ):
            members = np.zeros(len(self._ends), np.bool_)
            members[[*both]] = True
            self._together = both, members
        pairs = zip(row_groups, np.split(rows[order], starts[1:]), strict=True)
        return mixed([group.rows(share) for group, share in pairs], order)

    def _join(self, group_numbers: Any) -> JoinedGroups | None:
        """Join the groups of these numbers; return None if that is not possible."""
        numbers = sorted(group_numbers)
        try:
            groups = self._groups.all(numbers)
            if any(group.types != groups[0].types for group in groups):
                return None
            groups_by_number = dict(zip(numbers, groups, strict=True))
            return JoinedGroups(groups_by_number, len(self._ends))
        except Exception:  # noqa: BLE001 rows of a group that fails show why, alone
            return None
