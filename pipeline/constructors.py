"""The beginning of a pipeline: a class method for each kind of source."""

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
    """Class methods that make a description of one stage, a source."""

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
            root: a folder with one sub-folder of images per class; labels number the
                sub-folders in sorted order. A URL, such as "s3://bucket/train", is
                listed now; its files are read as in `from_files`.
            storage_options: options of the URL's file system, named as in its fsspec
                package.
            num_parallel_workers: the number of readers: n, (lo, hi) or, by default, as
                configured. Readers mostly wait for the storage, so many of them cost
                little.
            executor: "auto", "inline", "thread", "process", "ray", or for a URL
                "async".
            name: the name of this stage in the log.
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: the folder does not exist, or has no images in class folders.
        """
        stage = SourceStage(
            _folder(os.fspath(root), storage_options, executor),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
        )
        return cls._of(stage, shard, schedule)

    @classmethod
    def from_files(  # noqa: PLR0913 all are keyword arguments
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

        An event loop reads from web servers and object stores, so that a waiting read
        costs no thread. Threads read from other file systems.

        Args:
            urls: paths or URLs of one file system, or one pattern that matches them:
                "photos/**/*.jpg", "s3://bucket/train/*.jpg".
            labels: one label per file, in the order of `urls` (for a pattern: sorted).
            storage_options: options of the file system, named as in its fsspec package.
            num_parallel_workers: the number of reads in flight: n, or (lo, hi).
            executor: "auto", "inline", "thread", "process", "async" or "ray".
            name: the name of this stage in the log.
            retries: how often a remote read is retried after an error that may pass: a
                lost connection, a stall of a minute, a short body, or a status of 5xx,
                408, 425 or 429.
            backoff: the longest wait before the first retry, in seconds; it doubles
                with each further retry.
            timeout: seconds that a file may take with all its retries, as for `map`.
            max_bytes: the largest size of a remote file; a body is not read beyond it.
            hedge: whether an event loop repeats a request that takes longer than nearly
                all others; it repeats at most one in twenty, besides the first ten, or
                one a second.
            bandwidth: the most bytes per second that this rank's event loop reads, such
                as "100MB".
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: there is no file, the files are on several file systems, or there
                is not one label per file.
        """
        from .sources.files import find_files
        from .sources.patience import Patience

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
            path: the database: a folder with `data.mdb`, or the file. Each process
                opens it once, for reading.
            keys: the keys of the samples, in order (default: all, in the database's
                order).
            num_parallel_workers: the number of readers: n, (lo, hi) or, by default, as
                configured.
            executor: "auto", "inline", "thread", "process" or "ray".
            name: the name of this stage in the log.
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: there is no database, or it has no key.
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
        storage_options: Mapping[str, Any] | None = None,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read WebDataset tar files by random access; they are indexed now.

        Args:
            shards: paths or URLs, each with braces if you like, or one pattern that
                matches them: "train-*.tar", "s3://bucket/train-{000..146}.tar". The
                headers of shards in a store are read now, side by side; a sample is
                then a request for its bytes.
            fields: the fields of each sample, a tuple: `("jpg", "cls")`. None: samples
                are dicts of all fields and `__key__`. Fields that end in cls, index,
                txt, json or npy are decoded; all others are `bytes`. Nothing is
                unpickled.
            storage_options: options of the URLs' file system, named as in its fsspec
                package.
            num_parallel_workers: the number of readers: n, (lo, hi) or, by default, as
                configured.
            executor: "auto", "inline", "thread", "process", "ray", or for URLs "async".
            name: the name of this stage in the log.
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: a file is not a tar file or is compressed, a field comes twice in
                a sample or would have to be unpickled, or a server sends no parts.
        """
        stage = SourceStage(
            _shards(shards, fields, storage_options, executor),
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
            columns: the columns to read (default: all).
            groups_in_memory: the number of row groups that a process keeps, as far as
                they take an eighth of the memory budget. Use twice the window of
                `shuffle(window=...)`; with fewer, each sample reads a whole group.
            num_parallel_workers: the number of readers: n, (lo, hi) or, by default, as
                configured.
            executor: "auto", "inline", "thread", "process" or "ray".
            name: the name of this stage in the log.
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: pyarrow is not installed, or there is no row or no such column.
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
            columns: the columns to read (default: all).
            num_parallel_workers: the number of readers: n, (lo, hi) or, by default, as
                configured.
            executor: "auto", "inline", "thread", "process" or "ray".
            name: the name of this stage in the log.
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: pyarrow is not installed, or there is no row or no such column.
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
        """Read from a torch dataset, a list or an array, map-style or iterable.

        Args:
            dataset: an object with `__len__` and `__getitem__`, or with `__iter__`.
            num_parallel_workers: n, (lo, hi) or, by default, as configured.
            executor: "auto" (chosen by measurement), "inline", "thread", "process"
                or "ray".
            thread_safe: whether `__getitem__` may run on several threads of a process
                at once. None: they may, unless penstock finds an open file, a database
                or the like a few levels down in it; then "auto" uses processes.
            name: the name of this stage in the log.
            timeout: seconds that a sample may take, as for `map`.
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: `dataset` is not a dataset, or is empty.
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
    """Return the images in class folders on this machine or in a store."""
    if Path(root).is_dir() or not URL.match(root):
        return Folder.scan(root)
    from .sources.files import find_folder

    protocol, path = root.split(":/", 1)
    url = f"{protocol}://{path.removeprefix('/')}"  # a Path drops one of two slashes
    return find_folder(url, options, executor)


def _shards(
    shards: Paths,
    fields: Sequence[str] | None,
    options: Mapping[str, Any] | None,
    executor: Executor,
) -> Source:
    """Return the samples of tar files on this machine or in a store."""
    from .sources.paths import listed
    from .sources.tar_shards import WebDataset

    urls = listed("from_webdataset", shards)
    if not any(map(URL.match, urls)):
        return WebDataset.find(shards, fields)
    from .sources.remote_shards import find_shards

    return find_shards(urls, fields, options, executor)
