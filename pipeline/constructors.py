"""Where a pipeline begins: a class method for each kind of source."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..engine.plan import Shard
from ..engine.recipe import Executor
from ..system.resources import parse_bytes
from .sources.datasets import is_iterable
from .sources.folder import URL, Folder
from .sources.source import Source
from .stages import SourceStage, Workers

if TYPE_CHECKING:
    from .schedule import Scheduled
    from .sources.files import Urls
    from .sources.paths import Paths


class Constructors(ABC):
    """Makes descriptions of one stage, a source."""

    @classmethod
    @abstractmethod
    def _of(
        cls, stage: SourceStage, shard: Shard | None, schedule: Scheduled | None
    ) -> Self:
        """Return the description of a source."""

    @classmethod
    def from_folder(
        cls,
        root: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read images from class sub-folders: samples are `(bytes, label)`.

        Args:
            root: a folder with one sub-folder of images per class; labels number these
                in sorted order. A URL, as of "s3://bucket/train", is listed now, and
                its files are read as those of `from_files`.
            storage_options: for the URL's file system, as its fsspec package names
                them.
            num_parallel_workers: readers: n, or (lo, hi), or as configured. They wait
                for the storage, so many are cheap.
            executor: "auto", "inline", "thread", "process", or of a URL "async".
            name: what the log calls this stage.
            shard: this rank's share of the global batches (default: as found: see
                `Shard.found`).
            schedule: what changes while training; `.batch()` then takes no size.

        Raises:
            SpecError: no such folder, or no images in class folders in it.
        """
        stage = SourceStage(
            _folder(os.fspath(root), storage_options, executor),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
        )
        return cls._of(stage, shard, schedule)

    @classmethod
    def from_files(  # noqa: PLR0913 all are said by name
        cls,
        urls: Urls,
        labels: Sequence[Any] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        retries: int = 4,
        backoff: float = 0.5,
        timeout: float | None = None,
        max_bytes: int | str = "1GiB",
        hedge: bool = True,
        bandwidth: int | str | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read whole files through fsspec: samples are `bytes`, or `(bytes, label)`.

        Web servers and object stores are read in one event loop, where a waiting read
        costs no thread; other file systems by threads.

        Args:
            urls: paths or URLs of one file system, or one pattern that matches them:
                "photos/**/*.jpg", "s3://bucket/train/*.jpg".
            labels: one a file, in the order of `urls` (of a pattern: sorted).
            storage_options: for the file system, as its fsspec package names them.
            num_parallel_workers: reads in flight: n, or (lo, hi).
            executor: "auto", "inline", "thread", "process" or "async".
            name: what the log calls this stage.
            retries: how often a remote read is tried again where that may help: after
                a lost connection, a stall of a minute, a short body, a status of 5xx,
                408, 425 or 429.
            backoff: seconds up to which is waited before the first of these, twice as
                long before each further one.
            timeout: seconds a file may take with all its retries, as for `map`.
            max_bytes: of a remote file: a body is not read beyond it.
            hedge: whether a read in an event loop is asked for once more where it takes
                longer than nearly all others; at most one in twenty is.
            bandwidth: bytes a second that this rank's event loop reads, or "100MB".
            shard: this rank's share of the global batches (default: as found: see
                `Shard.found`).
            schedule: what changes while training; `.batch()` then takes no size.

        Raises:
            SpecError: no file, files of several file systems, or not a label a file.
        """
        from .sources.files import Patience, find_files

        rate = None if bandwidth is None else parse_bytes(bandwidth)
        patience = Patience(retries, backoff, parse_bytes(max_bytes), hedge, rate)
        stage = SourceStage(
            find_files(urls, labels, storage_options, executor, patience),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
            timeout=timeout,
        )
        return cls._of(stage, shard, schedule)

    @classmethod
    def from_lmdb(
        cls,
        path: str | os.PathLike[str],
        keys: Sequence[bytes] | None = None,
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read the values of an LMDB database: samples are `bytes`.

        Args:
            path: the database: a folder with `data.mdb`, or the file. It is opened to
                be read, once a process.
            keys: of the samples, in their order (default: all, in the database's
                order).
            num_parallel_workers: readers: n, or (lo, hi), or as configured.
            executor: "auto", "inline", "thread" or "process".
            name: what the log calls this stage.
            shard: this rank's share of the global batches (default: as found: see
                `Shard.found`).
            schedule: what changes while training; `.batch()` then takes no size.

        Raises:
            SpecError: no database, or no key.
        """
        from .sources.lmdb_records import Lmdb

        stage = SourceStage(
            Lmdb.find(path, keys),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
        )
        return cls._of(stage, shard, schedule)

    @classmethod
    def from_webdataset(
        cls,
        shards: Paths,
        fields: Sequence[str] | None = None,
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read WebDataset tar files at any place; they are indexed now.

        Args:
            shards: paths, or one pattern that matches them: "train-*.tar".
            fields: samples are tuples of these: `("jpg", "cls")`. None: dicts of all
                fields, and their `__key__`. What ends in cls, index, txt, json or npy
                is read as such; all else is `bytes`. Nothing is unpickled.
            num_parallel_workers: readers: n, or (lo, hi), or as configured.
            executor: "auto", "inline", "thread" or "process".
            name: what the log calls this stage.
            shard: this rank's share of the global batches (default: as found: see
                `Shard.found`).
            schedule: what changes while training; `.batch()` then takes no size.

        Raises:
            SpecError: no tar, a compressed one, or a field that would be unpickled.
        """
        from .sources.tar_shards import WebDataset

        stage = SourceStage(
            WebDataset.find(shards, fields),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
        )
        return cls._of(stage, shard, schedule)

    @classmethod
    def from_parquet(
        cls,
        files: Paths,
        columns: Sequence[str] | None = None,
        *,
        groups_in_memory: int = 32,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read the rows of Parquet files: samples are dicts by column.

        Args:
            files: paths, or one pattern that matches them: "train-*.parquet".
            columns: those that are read (default: all).
            groups_in_memory: row groups that a process keeps; twice the window of
                `shuffle(window=...)`, or each sample reads a whole group.
            num_parallel_workers: readers: n, or (lo, hi), or as configured.
            executor: "auto", "inline", "thread" or "process".
            name: what the log calls this stage.
            shard: this rank's share of the global batches (default: as found: see
                `Shard.found`).
            schedule: what changes while training; `.batch()` then takes no size.

        Raises:
            SpecError: pyarrow is not installed; no row, or no such column.
        """
        from .sources.columnar import Parquet

        stage = SourceStage(
            Parquet.find(files, columns, groups_in_memory),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
        )
        return cls._of(stage, shard, schedule)

    @classmethod
    def from_arrow(
        cls,
        files: Paths,
        columns: Sequence[str] | None = None,
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read the rows of Arrow files: samples are dicts by column.

        Args:
            files: paths, or one pattern that matches them: "train-*.arrow".
            columns: those that are read (default: all).
            num_parallel_workers: readers: n, or (lo, hi), or as configured.
            executor: "auto", "inline", "thread" or "process".
            name: what the log calls this stage.
            shard: this rank's share of the global batches (default: as found: see
                `Shard.found`).
            schedule: what changes while training; `.batch()` then takes no size.

        Raises:
            SpecError: pyarrow is not installed; no row, or no such column.
        """
        from .sources.columnar import GROUPS, Arrow

        stage = SourceStage(
            Arrow.find(files, columns, GROUPS),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
        )
        return cls._of(stage, shard, schedule)

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        thread_safe: bool | None = None,
        name: str | None = None,
        timeout: float | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read from a torch dataset, a list, an array: map-style or iterable.

        Args:
            dataset: has `__len__` and `__getitem__`, or `__iter__`.
            num_parallel_workers: n, or (lo, hi), or as configured.
            executor: "auto" (as measured), "inline", "thread" or "process".
            thread_safe: whether `__getitem__` may run on several threads of a process
                at once. None: not if it is seen to hold an open file, a database or
                the like, a few levels down; then "auto" uses processes.
            name: what the log calls this stage.
            timeout: seconds a sample may take, as for `map`.
            shard: this rank's share of the global batches (default: as found: see
                `Shard.found`).
            schedule: what changes while training; `.batch()` then takes no size.

        Raises:
            SpecError: not a dataset, or an empty one.
        """
        stage = SourceStage(
            dataset,
            iterable=is_iterable(dataset),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            thread_safe=thread_safe,
            name=name,
            timeout=timeout,
        )
        return cls._of(stage, shard, schedule)


def _folder(root: str, options: Mapping[str, Any] | None, executor: Executor) -> Source:
    """Return the images in class folders of this machine, or of a store."""
    if Path(root).is_dir() or not URL.match(root):
        return Folder.scan(root)
    from .sources.files import PATIENCE
    from .sources.remote_folder import find_folder

    protocol, path = root.split(":/", 1)
    url = f"{protocol}://{path.removeprefix('/')}"  # a Path has one slash of two
    return find_folder(url, options, executor, PATIENCE)
