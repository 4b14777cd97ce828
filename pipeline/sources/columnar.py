"""Rows of Parquet and Arrow files; pyarrow reads them a group of rows at a time."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import LOGGER, SpecError, check
from .folder import Paths, files_here, first_of
from .row_groups import RowGroup, RowGroups, groups_bytes
from .source import PerProcess, Source, digest, prints_of_rows

OPEN_FILES = 256
# Default number of row groups that a process keeps: two windows of 16.
GROUPS = 32


class Columnar(Source):
    """Sample i is row i, a dict by column."""

    QUICK: ClassVar[bool] = True
    """Whether rows are read faster than a cache finds them."""

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
        self._files = PerProcess[Any](self._opened, OPEN_FILES)
        # The system drops pages of a mapped file when it needs memory.
        self._rows = RowGroups(
            self.group_sizes, self._group, groups_in_memory, mapped=self.MAPPED
        )

    @classmethod
    def find(
        cls, paths: Paths, columns: Sequence[str] | None, groups_in_memory: int
    ) -> Self:
        """Return the rows of some files, and count their groups now.

        Raises:
            SpecError: pyarrow is not installed, or there is no file, no row or no such
                column.
        """
        check_groups(cls.KIND, groups_in_memory)
        files = files_here(f"from_{cls.KIND.lower()}", paths)
        names = None if columns is None else tuple(columns)
        sizes = counted(
            cls.KIND, files, lambda path: cls._sizes(cls._opened(path), names)
        )
        return cls(files, names, sizes, groups_in_memory)

    @staticmethod
    @abstractmethod
    def _opened(path: Any) -> Any:
        """Return the open file that groups are read from."""

    @staticmethod
    @abstractmethod
    def _sizes(file: Any, columns: tuple[str, ...] | None) -> list[int]:
        """Return the rows of each group of an open file; `KeyError`: no such column."""

    @abstractmethod
    def _group(self, at: int) -> RowGroup:
        """Return a group of rows, given its number among those of all files."""

    @property
    def shown(self) -> tuple[object, ...]:
        return (first_of(self.paths),)

    @property
    def group_sizes(self) -> list[int]:
        """The number of rows in each group, in order."""
        return [*itertools.chain.from_iterable(self.sizes)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return self._rows.one(index)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Return some rows; rows of the same group are taken from it at once."""
        return self._rows(indices)

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each row: `uint64 [n, 2]`.

        It depends on the file's path, size and time, the row's number, and the columns.
        """
        from ...cache.fingerprint import file_fingerprints

        sizes = np.array([sum(groups) for groups in self.sizes], np.int64)
        files = file_fingerprints(self.paths, store=self._store())
        return prints_of_rows(files, sizes, digest([repr(self.columns)]))

    def _store(self) -> Any:
        """Return what identifies the store of the files; None if they are here."""
        return None

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
    _reads = _rows_read = 0
    """Groups and rows read, about: threads may count at once."""

    @staticmethod
    def _opened(path: Any) -> Any:
        import pyarrow.parquet as pq

        return pq.read_metadata(path)

    @staticmethod
    def _sizes(file: Any, columns: tuple[str, ...] | None) -> list[int]:
        require(columns, file.schema.to_arrow_schema().names)
        return [file.row_group(at).num_rows for at in range(file.num_row_groups)]

    def _group(self, at: int) -> RowGroup:
        import pyarrow.parquet as pq

        path, number = self._places[at]
        metadata = self._files(path)
        # Open the file for this read: threads must not share one, and rows need none.
        source = self._readable(path, metadata.row_group(number))
        with pq.ParquetFile(source, metadata=metadata) as file:
            columns = None if self.columns is None else [*self.columns]
            group = file.read_row_group(number, columns=columns, use_threads=False)
        self._reads += 1
        self._rows_read += len(group)
        asked_rows = self._rows.asked_rows
        # So many reads show whether each group is read once.
        many = max(96, 3 * self.groups_in_memory)
        if self._rows_read > 4 * asked_rows and self._reads > many:
            self._reads = -(1 << 62)  # never warn again
            LOGGER.warning(
                "%s reads %d rows for each one it returns: a row group is read as a"
                " whole, and has left memory before its other rows are wanted. Use"
                " shuffle(window=...) with a window of half the groups that fit, write"
                " smaller row groups, or raise `groups_in_memory` (%d now) and"
                " set_memory_budget(): groups of %d bytes are kept",
                self.shown[0],
                self._rows_read // asked_rows,
                self.groups_in_memory,
                groups_bytes(),
            )
        return RowGroup.of(group, mapped=False)

    def _readable(self, path: str, group: Any) -> Any:  # noqa: ARG002
        """Return what pyarrow reads this group of a file from."""
        return path


class Arrow(Columnar):
    """Rows of memory-mapped Arrow files, or of streams such as Hugging Face writes."""

    KIND = "Arrow"
    MAPPED: ClassVar[bool] = True

    @staticmethod
    def _opened(path: Any) -> Any:
        import pyarrow as pa

        memory_map = pa.memory_map(path)
        try:
            file = pa.ipc.open_file(memory_map)
        except pa.ArrowInvalid:
            memory_map.seek(0)
            return [*pa.ipc.open_stream(memory_map)]
        return [file.get_batch(at) for at in range(file.num_record_batches)]

    @staticmethod
    def _sizes(file: Any, columns: tuple[str, ...] | None) -> list[int]:
        if file:
            require(columns, file[0].schema.names)
        return [batch.num_rows for batch in file]

    def _group(self, at: int) -> RowGroup:
        path, number = self._places[at]
        batch = self._files(path)[number]
        if self.columns is not None:
            batch = batch.select([*self.columns])
        return RowGroup.of(batch, mapped=True)


def check_groups(kind: str, groups_in_memory: int) -> None:
    """Check that pyarrow is there, and the number of groups to keep.

    Raises:
        SpecError: it is not, or the number is too low.
    """
    try:
        import pyarrow as pa  # noqa: F401
    except ImportError as error:
        raise SpecError(
            f"`from_{kind.lower()}` needs the package pyarrow, which cannot be imported"
            f" ({error}); install it: pip install pyarrow"
        ) from error
    check(
        groups_in_memory >= 1,
        f"`groups_in_memory` must be >= 1, got {groups_in_memory}; {GROUPS} is usual",
    )


def counted(
    kind: str, paths: Sequence[str], count: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the number of rows in each group of each file.

    Raises:
        SpecError: a file cannot be read, or there is no row or no such column.
    """
    import pyarrow as pa

    try:
        sizes = [*map(count, paths)]
    except (pa.ArrowInvalid, KeyError) as error:
        raise SpecError(
            f"`from_{kind.lower()}` cannot read {paths[0]!r}, ...: {error}; give {kind}"
            " files, and columns that all of them have"
        ) from error
    check(
        sum(map(sum, sizes)),
        f"`from_{kind.lower()}` found no row in {paths[0]!r}, ...; give files that have"
        " rows",
    )
    return sizes


def require(columns: Sequence[str] | None, names: Sequence[str]) -> None:
    """Raise `KeyError` for the first missing column."""
    for column in columns or ():
        if column not in names:
            raise KeyError(f"no column {column!r}, only {', '.join(names)}")
