"""Rows of Parquet and Arrow files; pyarrow reads them a group of rows at a time."""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ... import config
from ...engine.batch.array_rows import TableRows
from ...errors import SpecError, check
from .folder import Paths, files_here, first_of
from .source import PerProcess, Source, digest, prints_of_rows

OPEN_FILES = 256
GROUPS = 32
"""Default number of row groups that a process keeps: two windows of 16."""
SHARE = 8
"""A process keeps row groups of at most this part of the memory budget."""
MANY_READS = 96
"""Row groups read before it shows whether each is read once."""
WASTE = 4
"""Rows read for each one returned, above which the user is warned."""
LOGGER = logging.getLogger("penstock")
WASTED = (
    "%s reads %d rows for each one it returns: a row group is read as a whole, and has"
    " left memory before its other rows are wanted. Use shuffle(window=...) with a"
    " window of half the groups that fit, write smaller row groups, or raise"
    " `groups_in_memory` (%d now) and set_memory_budget(): groups of %d bytes are kept"
)


class RowGroup:
    """The columns of some rows: numbers of one type side by side, others as they are.

    Rows of many columns are taken at once then, which costs numpy one call.

    Args:
        table: a table of pyarrow's, or a record batch.
        mapped: whether its columns are in a mapped file, and stay there.
    """

    def __init__(self, table: Any, *, mapped: bool) -> None:
        self.names: tuple[str, ...] = tuple(table.schema.names)
        self.others: dict[str, Any] = {}
        numbers: dict[object, dict[str, NDArray[Any]]] = {}
        for name, column in zip(self.names, table.columns, strict=True):
            values = numbers_of(column, packed=mapped)
            if values is None:
                self.others[name] = column
            else:
                numbers.setdefault(name if mapped else values.dtype, {})[name] = values
        self.kinds = tuple(map(tuple, numbers.values()))
        """The names of the columns of each block."""
        self.blocks = [
            np.stack([*same.values()], 1)
            if len(same) > 1
            else next(iter(same.values()))[:, None]
            for same in numbers.values()
        ]
        """Numbers: `[rows, columns]`."""
        self.types = [
            (names, b.dtype) for names, b in zip(self.kinds, self.blocks, strict=True)
        ]
        self._held = () if mapped else (*self.blocks, *self.others.values())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(column.nbytes for column in self._held)

    def columns(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return some rows, by column, in this order."""
        return self.named([block[rows] for block in self.blocks], rows)

    def named(
        self, blocks: Sequence[NDArray[Any]], rows: NDArray[np.int64]
    ) -> dict[str, Any]:
        """Return rows of the blocks, and the same of the other columns, by name."""
        found = {
            name: block[:, at]
            for names, block in zip(self.kinds, blocks, strict=True)
            for at, name in enumerate(names)
        }
        others = {name: values_of(each, rows) for name, each in self.others.items()}
        return {
            name: (others if name in others else found)[name] for name in self.names
        }


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
    found: NDArray[Any] = np.asarray(column)
    return found


def values_of(column: Any, rows: NDArray[np.int64]) -> list[Any]:
    """Return rows of a column as Python values; those in a row need no copy."""
    import pyarrow as pa

    first, count = int(rows[0]), len(rows)
    found: list[Any]
    if count == 1 or np.array_equal(rows, np.arange(first, first + count)):
        found = column.slice(first, count).to_pylist()
        return found
    try:
        found = column.take(rows).to_pylist()
    except pa.ArrowNotImplementedError:  # not of views of text, for instance
        found = [column[row].as_py() for row in rows.tolist()]
    return found


def alike(columns: Sequence[NDArray[Any] | list[Any]]) -> bool:
    """Whether all are arrays of one type."""
    types = {c.dtype for c in columns if isinstance(c, np.ndarray)}
    return len(types) == 1 and not any(isinstance(c, list) for c in columns)


def apart(
    shares: Sequence[tuple[RowGroup, NDArray[np.int64]]], order: NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Return rows of groups that do not have the same columns."""
    found: list[dict[str, Any]] = [{} for _ in order]
    places = iter(order.tolist())
    for group, rows in shares:
        made = TableRows(group.columns(rows)) if group.names else [{} for _ in rows]
        for row in made:
            found[next(places)] = row
    return found


def joined(parts: Sequence[Mapping[str, Any]], order: NDArray[np.int64]) -> TableRows:
    """Return parts of the rows as one; the i-th of all is row `order[i]` of it."""
    names, places = parts[0].keys(), order.tolist()
    found: dict[str, Any] = {}
    for name in names:
        columns = [part[name] for part in parts]
        if alike(columns):
            whole = np.concatenate(columns)
            found[name] = np.empty_like(whole)
            found[name][order] = whole
            continue
        values = (c.tolist() if isinstance(c, np.ndarray) else c for c in columns)
        by_place = dict(zip(places, itertools.chain.from_iterable(values), strict=True))
        found[name] = [by_place[place] for place in range(len(places))]
    return TableRows(found)


class Columnar(Source):
    """Sample i is row i, a dict by column."""

    def __init__(
        self,
        paths: Sequence[str],
        columns: tuple[str, ...] | None,
        sizes: Sequence[Sequence[int]],
        groups_in_memory: int,
    ) -> None:
        self.paths, self.columns, self.sizes = paths, columns, sizes
        self.groups_in_memory = groups_in_memory
        self._places = [
            (path, number)
            for path, groups in zip(paths, sizes, strict=True)
            for number in range(len(groups))
        ]
        self._ends = np.cumsum(self.group_sizes, dtype=np.int64)
        self._begins = self._ends - self.group_sizes
        self._files = PerProcess(self._open, OPEN_FILES)
        # The system drops pages of a mapped file when it needs memory.
        weigh = None if self.MAPPED else attrgetter("nbytes")
        self._groups = PerProcess(self._group, groups_in_memory, weigh, groups_bytes)

    @classmethod
    def find(
        cls, paths: Paths, columns: Sequence[str] | None, groups_in_memory: int
    ) -> Self:
        """Return the rows of some files, and count their groups now.

        Raises:
            SpecError: pyarrow is not installed, or there is no file, no row or no such
                column.
        """
        source = f"from_{cls.KIND.lower()}"
        try:
            import pyarrow as pa
        except ImportError as error:
            raise SpecError(
                f"`{source}` needs the package pyarrow, which cannot be imported"
                f" ({error}); install it: pip install pyarrow"
            ) from error
        check(
            groups_in_memory >= 1,
            f"`groups_in_memory` must be >= 1, got {groups_in_memory}; {GROUPS} is"
            " usual",
        )
        found = files_here(source, paths)
        wanted = None if columns is None else tuple(columns)
        try:
            sizes = [cls._sizes(path, wanted) for path in found]
        except (pa.ArrowInvalid, KeyError) as error:
            raise SpecError(
                f"`{source}` cannot read {found[0]!r}, ...: {error}; give {cls.KIND}"
                " files, and columns that all of them have"
            ) from error
        check(
            sum(map(sum, sizes)),
            f"`{source}` found no row in {found[0]!r}, ...; give files that have rows",
        )
        return cls(found, wanted, sizes, groups_in_memory)

    @classmethod
    @abstractmethod
    def _sizes(cls, path: str, columns: tuple[str, ...] | None) -> list[int]:
        """Return the rows of each group of a file; `KeyError`: no such column."""

    @abstractmethod
    def _open(self, path: Any) -> Any:
        """Return the open file that groups are read from."""

    @abstractmethod
    def _group(self, place: Any) -> Any:
        """Return a group of rows, given its file and number."""

    @property
    def shown(self) -> tuple[object, ...]:
        return (first_of(self.paths),)

    @property
    def group_sizes(self) -> list[int]:
        """The number of rows in each group, in order."""
        return [*itertools.chain.from_iterable(self.sizes)]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return self.__getitems__((index,))[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Return some rows; rows of the same group are taken from it at once."""
        wanted = np.asarray(indices, np.int64)
        if not len(wanted):
            return []
        if wanted.min() < 0 or wanted.max() >= len(self):
            outside = next(each for each in indices if not 0 <= each < len(self))
            raise IndexError(f"row {outside} of {len(self)}")
        groups = np.searchsorted(self._ends, wanted, "right")
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
        shares = []
        for places in np.split(order, starts[1:]):
            at = int(groups[places[0]])
            group = self._groups(self._places[at])
            shares.append((group, wanted[places] - self._begins[at]))
        (first, rows), *more = shares
        if not first.names or any(group.names != first.names for group, _ in more):
            return apart(shares, order)
        if not more:
            return TableRows(first.columns(rows))
        if first.others or any(group.types != first.types for group, _ in more):
            return joined([group.columns(rows) for group, rows in shares], order)
        blocks = []
        for at in range(len(first.blocks)):
            whole = np.concatenate([group.blocks[at][rows] for group, rows in shares])
            blocks.append(np.empty_like(whole))
            blocks[-1][order] = whole
        return TableRows(first.named(blocks, order))

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each row: `uint64 [n, 2]`.

        It depends on the file's path, size and time, the row's number, and the columns.
        """
        from ...cache.fingerprint import file_fingerprints

        sizes = np.array([sum(groups) for groups in self.sizes], np.int64)
        read = digest([repr(self.columns)])
        return prints_of_rows(file_fingerprints(self.paths), sizes, read)

    def identity(self) -> str | None:
        """Return the hash of the columns and of the number of rows in each group."""
        return digest([repr(self.columns), *map(repr, self.sizes)])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.paths,
            self.columns,
            self.sizes,
            self.groups_in_memory,
        )

    def __repr__(self) -> str:
        return f"<{self.KIND}: {len(self)} rows in {len(self.paths)} files>"


class Parquet(Columnar):
    """Rows of Parquet files, read and decompressed one row group at a time."""

    KIND = "Parquet"
    _reads = _read = _returned = 0
    """Groups and rows read, and rows returned, about: threads may count at once."""

    @classmethod
    def _sizes(cls, path: str, columns: tuple[str, ...] | None) -> list[int]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            require(columns, file.schema_arrow.names)
            told = file.metadata
            return [told.row_group(at).num_rows for at in range(told.num_row_groups)]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Return some rows, and warn if far more than these are read for them."""
        found = super().__getitems__(indices)
        self._returned += len(found)
        wasteful = self._read > WASTE * self._returned
        if wasteful and self._reads > max(MANY_READS, 3 * self.groups_in_memory):
            self._reads = -(1 << 62)  # never again
            ratio, limit = self._read // self._returned, groups_bytes()
            LOGGER.warning(WASTED, self.shown[0], ratio, self.groups_in_memory, limit)
        return found

    def _open(self, path: Any) -> Any:
        import pyarrow.parquet as pq

        return pq.read_metadata(path)

    def _group(self, place: Any) -> Any:
        import pyarrow.parquet as pq

        path, number = place
        # Open the file for this read: threads must not share one, and rows need none.
        with pq.ParquetFile(path, metadata=self._files(path)) as file:
            columns = None if self.columns is None else [*self.columns]
            group = file.read_row_group(number, columns=columns, use_threads=False)
        self._reads += 1
        self._read += len(group)
        return RowGroup(group, mapped=False)


class Arrow(Columnar):
    """Rows of memory-mapped Arrow files, or of streams such as Hugging Face writes."""

    KIND = "Arrow"
    MAPPED: ClassVar[bool] = True

    @classmethod
    def _sizes(cls, path: str, columns: tuple[str, ...] | None) -> list[int]:
        batches = record_batches(path)
        if batches:
            require(columns, batches[0].schema.names)
        return [batch.num_rows for batch in batches]

    def _open(self, path: Any) -> Any:
        return record_batches(path)

    def _group(self, place: Any) -> Any:
        path, number = place
        batch = self._files(path)[number]
        if self.columns is not None:
            batch = batch.select([*self.columns])
        return RowGroup(batch, mapped=True)


def groups_bytes() -> int:
    """Return the bytes that the row groups of a source may take in a process."""
    return config.memory_bytes() // SHARE


def record_batches(path: str) -> list[Any]:
    """Return the record batches of a file or a stream, memory-mapped."""
    import pyarrow as pa

    mapped = pa.memory_map(path)
    try:
        file = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        return [*pa.ipc.open_stream(mapped)]
    return [file.get_batch(at) for at in range(file.num_record_batches)]


def require(columns: Sequence[str] | None, there: Sequence[str]) -> None:
    """Raise `KeyError` for the first missing column."""
    for column in columns or ():
        if column not in there:
            raise KeyError(f"no column {column!r}, only {', '.join(there)}")
