"""Rows of Parquet and Arrow files; pyarrow reads them a group of rows at a time."""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ... import config
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
        # Not numpy's search: it lets go of the GIL, which costs threads more than it.
        self._ends = [*itertools.accumulate(self.group_sizes)]
        self._begins = [0, *self._ends]
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
        return self._ends[-1]

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return self.__getitems__((index,))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return some rows; rows of the same group are taken from it at once."""
        group = bisect_right(self._ends, indices[0]) if indices else 0
        begin = self._begins[group]
        if indices and begin <= min(indices) and max(indices) < self._ends[group]:
            return list(self._rows(group, [index - begin for index in indices]))
        found: list[Any] = [None] * len(indices)
        places: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            places.setdefault(bisect_right(self._ends, index), []).append(place)
        for group, within in places.items():
            begin = self._begins[group]
            rows = self._rows(group, [indices[place] - begin for place in within])
            for place, row in zip(within, rows, strict=True):
                found[place] = row
        return found

    def _rows(self, group: int, rows: list[int]) -> Sequence[dict[str, Any]]:
        """Return rows of a group; those in a row need no copy."""
        table, first = self._groups(self._places[group]), rows[0]
        in_a_row = rows == [*range(first, first + len(rows))]
        part = table.slice(first, len(rows)) if in_a_row else table.take(rows)
        taken: list[dict[str, Any]] = part.to_pylist()
        return taken

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

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
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
        return group


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
        return batch if self.columns is None else batch.select([*self.columns])


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
