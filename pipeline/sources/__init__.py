"""Where samples come from.

source.py         Source: what penstock reads itself, and what each process opens for
                  that; the user's datasets
folder.py         class folders of this machine, and what its paths and patterns name
files.py          files anywhere, through fsspec; class folders in a store
lmdb_records.py   values of an LMDB database
shards.py         WebDataset shards, indexed, here or in a store
row_groups.py     rows of a table that comes in groups, taken by column
columnar.py       rows of Parquet and Arrow files
remote_parquet.py rows of Parquet files of a store
frames.py         rows of tables in memory, and of Hugging Face's
patience.py       limits of remote reads: retries, second requests, size
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.recipe import Executor
from .folder import URL, Folder, Paths, listed
from .source import Source

__all__ = ["Paths", "find_folder", "find_parquet"]

# The same kind of source, on this machine or in a store. What reads stores is imported
# only for a store, as fsspec takes its time.


def find_folder(
    root: str | os.PathLike[str], options: Mapping[str, Any] | None, executor: Executor
) -> Source:
    """Return the images in class folders.

    Raises:
        SpecError: the folder does not exist, or has no images in class folders.
    """
    if Path(root).is_dir() or not URL.match(os.fspath(root)):
        return Folder.scan(root)
    from .files import find_remote_folder

    return find_remote_folder(os.fspath(root), options, executor)


def find_parquet(
    files: Paths,
    columns: Sequence[str] | None,
    groups_in_memory: int,
    options: Mapping[str, Any] | None,
) -> Source:
    """Return the rows of Parquet files.

    Raises:
        SpecError: pyarrow is not installed, or there is no file, no row or no such
            column.
    """
    urls = listed("from_parquet", files)
    if any(map(URL.match, urls)):
        from .remote_parquet import RemoteParquet

        return RemoteParquet.find_stored(urls, columns, groups_in_memory, options)
    from .columnar import Parquet

    return Parquet.find(files, columns, groups_in_memory)
