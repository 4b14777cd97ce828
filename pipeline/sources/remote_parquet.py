"""Rows of Parquet files on a web server or in an object store.

The end of a file says where its row groups are. A group is then read as a byte range:
one request, or a few if only some columns that lie apart are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

from ...errors import check
from .columnar import OPEN_FILES, Parquet, check_groups, counted
from .files import Part, Store, StoredFile, find_files
from .source import PerProcess

# Bytes that are read, too, rather than by a request more.
GAP = 1 << 16


class RemoteParquet(Parquet):
    """Rows of Parquet files in a store.

    Args:
        store: the file system.
        nbytes: the size of each file.
        *table: as for any table of files.
    """

    QUICK = False

    def __init__(self, store: Store, nbytes: Mapping[str, int], *table: Any) -> None:
        super().__init__(*table)
        self.store, self.nbytes = store, nbytes
        self._files = PerProcess(self._end, OPEN_FILES)

    @classmethod
    def find_stored(
        cls,
        urls: Sequence[str],
        columns: Sequence[str] | None,
        groups_in_memory: int,
        options: Mapping[str, Any] | None,
    ) -> Self:
        """Return the rows of some files, and count their groups now.

        Args:
            urls: files of one file system, or one pattern that matches them.
            columns: the columns to read; None: all.
            groups_in_memory: the number of row groups that a process keeps.
            options: storage options of fsspec.

        Raises:
            SpecError: pyarrow is not installed, or there is no file, no row or no such
                column.
        """
        check_groups(cls.KIND, groups_in_memory)
        locations = urls[0] if len(urls) == 1 and "*" in urls[0] else urls
        files = find_files(locations, None, options, "thread")
        store, paths = files.store, tuple(files.paths)
        names = None if columns is None else tuple(columns)
        with ThreadPoolExecutor(16) as threads:  # the ends of 16 files side by side
            ends = {path: threads.submit(end_of, store, path) for path in paths}
            sizes = counted(
                cls.KIND, paths, lambda at: cls._sizes(ends[at].result()[1], names)
            )
        nbytes = {path: end.result()[0] for path, end in ends.items()}
        return cls(store, nbytes, paths, names, sizes, groups_in_memory)

    def _end(self, path: Any) -> Any:
        return metadata_of(self.store, path, self.nbytes[path])

    def _readable(self, path: str, group: Any) -> StoredFile:
        return StoredFile(
            partial(self.store.read, path),
            self.nbytes[path],
            parts_of(group, self.columns),
        )

    def _store(self) -> Any:
        return [*self.store.place(), sorted(self.nbytes.items())]

    def __reduce__(self) -> tuple[Any, ...]:
        kind, table = super().__reduce__()
        return kind, (self.store, self.nbytes, *table)


def end_of(store: Store, path: str) -> tuple[int, Any]:
    """Return the size of a file in a store, and what its end says of its groups.

    Raises:
        SpecError: its server does not say how long it is.
    """
    nbytes = store.patience.read(store.open().info, path)["size"]
    check(
        nbytes is not None,
        f"`from_parquet` cannot read {path!r}: its server does not say how long it is,"
        " so it sends no parts; copy the files to a disk or object store",
    )
    return nbytes, metadata_of(store, path, nbytes)


def metadata_of(store: Store, path: str, nbytes: int) -> Any:
    """Return what the end of a file of this size says of its groups."""
    import pyarrow.parquet as pq

    return pq.read_metadata(StoredFile(partial(store.read, path), nbytes))


def parts_of(group: Any, columns: Sequence[str] | None) -> list[Part]:
    """Return the parts of a file that a group's columns are in, ascending."""
    parts: list[Part] = []
    for chunk in map(group.column, range(group.num_columns)):
        path = chunk.path_in_schema
        if columns is None or any(f"{path}.".startswith(f"{c}.") for c in columns):
            first = chunk.dictionary_page_offset or chunk.data_page_offset
            begin = min(first, chunk.data_page_offset)
            end = begin + chunk.total_compressed_size
            near = parts and begin - parts[-1][1] <= GAP
            # One request brings at most 256 MiB, but for a column that has more.
            if near and end - parts[-1][0] <= 1 << 28:
                begin = parts.pop()[0]
            parts.append((begin, end))
    return parts
