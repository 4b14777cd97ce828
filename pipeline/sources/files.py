"""Whole files by URL through fsspec, from a disk, a web server or an object store.

Some of fsspec's file systems can wait without a thread. The event loop of a segment
reads these (`AsyncFiles`); threads read all others (`Files`). A read that fails for a
reason that may pass is repeated (`Patience`). Class folders of images in a store are
listed once, and then read as any files.
"""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from fsspec import get_filesystem_class
from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol
from numpy.typing import NDArray

from ...cache.fingerprint import file_fingerprints
from ...config import MAX_COROUTINES
from ...engine.recipe import Executor
from ...errors import SpecError, check
from ...system.printing import Bare
from .folder import SUFFIXES, Paths, is_image
from .patience import PATIENCE, HedgedReads, Patience, ShortBodyError
from .source import Source, digest

# The first byte of a part of a file, and the byte after its last one.
Part = tuple[int, int]


# Seconds without data after which a connection is dropped and the read retried.
STALLED_S = 60.0


@dataclass(frozen=True, slots=True)
class Store:
    """A file system, which threads and event loops read.

    It can be sent to other processes as text, and survives a fork: each thread that
    reads opens the file system, and only the process that opened it uses it.
    """

    url: str
    """The URL of a file on it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The storage options of fsspec."""
    patience: Patience = PATIENCE
    _local: threading.local = field(
        default_factory=threading.local, init=False, repr=False, compare=False
    )
    _sessions: dict[asyncio.AbstractEventLoop, Session] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def protocol(self) -> str:
        """`file`, `https`, `s3`, ..."""
        return str(get_protocol(self.url))

    def kind(self) -> Any:
        """Return fsspec's class for it.

        Raises:
            SpecError: there is no such class, or the package that it needs is missing.
        """
        try:
            return get_filesystem_class(self.protocol)
        except (ImportError, ValueError) as error:
            raise SpecError(
                f"penstock cannot read {self.url!r}: {error}; give a path, or a URL "
                "of a protocol that fsspec knows, and install what it asks for"
            ) from error

    def is_web(self) -> bool:
        """Whether the store is read by HTTP."""
        return "::" not in self.url and "https" in self.kind().protocol

    def is_remote(self) -> bool:
        """Whether a read may fail for temporary reasons."""
        return self.protocol not in ("file", "local", "memory")

    def place(self) -> list[Any]:
        """Return what identifies the store: host, account, ref; archive; options.

        An archive on this machine is identified by path, size and time of change.
        """
        first, _, archive = self.url.partition("::")
        settings = self.kind()._get_kwargs_from_urls(first)  # noqa: SLF001 see _paths
        identity = [self.protocol, dict(self.options), archive, settings]
        last = archive.rpartition("::")[2]
        if last and get_protocol(last) in ("file", "local"):
            path = str(LocalFileSystem._strip_protocol(last))  # noqa: SLF001 see _paths
            identity.append(file_fingerprints([path]))
        return identity

    def open(self, **own: Any) -> Any:
        """Return fsspec's instance, a shared one if that is safe for threads."""
        options = self.options
        if self.is_web():
            options = {"get_client": unlimited_client, **options}
        elif self.protocol in ("s3", "s3a"):
            # Each object is one request; by default s3fs would first ask for the size,
            # to read parts side by side. botocore stops at 10 connections by default,
            # whatever `num_parallel_workers` says. What the user says wins.
            # It has no "unlimited".
            config = {"max_pool_connections": MAX_COROUTINES}
            config |= options.get("config_kwargs") or {}
            options = {"max_concurrency": 1, **options, "config_kwargs": config}
        return url_to_fs(self.url, **options, **own)[0]

    def read(self, path: str, part: Part | None = None) -> bytes:
        """Return a file, or a part of it."""
        if not self.is_remote():
            return self._read(part, path)
        content = self.patience.read(partial(self._read, part), path)
        self.patience.check_size(len(content), path)
        return content

    async def wait_for(self, path: str, part: Part | None = None) -> bytes:
        """Return a file, or a part of it, in any event loop."""
        loop, patience = asyncio.get_running_loop(), self.patience
        session = self._sessions.get(loop)
        if session is None:
            session = Session(self, lambda: self._sessions.pop(loop))
            self._sessions[loop] = session
        files = session.files or await session.begin()
        read = partial(self._fetched, files, part)
        if patience.hedge and self.is_remote():
            read = partial(session.hedged.read, read)
        content = await patience.await_read(read, path)
        patience.check_size(len(content), path)
        return content

    def _read(self, part: Part | None, path: str) -> bytes:
        files: Any
        process, files = getattr(self._local, "process_and_files", (None, None))
        if process != os.getpid():
            files = self.open()
            self._local.process_and_files = os.getpid(), files
        if self.is_web():
            return cast("bytes", sync(files.loop, self._fetched, files, part, path))
        return whole_part(files.cat_file(path, **parted(part)), part, path)

    async def _fetched(self, files: Any, part: Part | None, path: str) -> bytes:
        """Return a file, or a part of it, by an open file system that can wait."""
        reading = (
            download(files, self.patience, part, path)
            if self.is_web()
            else files._cat_file(path, **parted(part))  # noqa: SLF001
        )
        return whole_part(await reading, part, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url, self.options, self.patience)


async def unlimited_client(**settings: Any) -> Any:
    """Return an HTTP client that opens one connection for each request in flight.

    `num_parallel_workers` limits the number of requests; aiohttp would stop at 100. A
    large file may take any time, as long as data keeps coming.
    """
    import aiohttp

    if "connector" not in settings:
        settings["connector"] = aiohttp.TCPConnector(limit=0)
    limits = aiohttp.ClientTimeout(sock_connect=STALLED_S, sock_read=STALLED_S)
    return aiohttp.ClientSession(**{"timeout": limits, **settings})


async def download(
    files: Any, patience: Patience, part: Part | None, url: str
) -> bytes:
    """Read a file from a web server, but never more than the allowed size.

    Args:
        files: fsspec's HTTP file system.
        patience: limits the size of a file.
        part: of the file; None: all of it.
        url: URL of the file.

    Raises:
        ShortBodyError: the body is shorter than the server announced.
        BudgetError: the file is too large.
        SpecError: the server sends no parts.
    """
    session = await files.set_session()
    settings = dict(files.kwargs)
    if part is not None:
        headers = {"Range": f"bytes={part[0]}-{part[1] - 1}"}
        settings["headers"] = {**settings.get("headers", {}), **headers}
    async with session.get(files.encode_url(url), **settings) as response:
        files._raise_not_found_for_status(response, url)  # noqa: SLF001 as its own reads
        check(
            part is None or response.status == 206,
            f"{url} came whole (status {response.status}), and only a part was asked"
            " for; give a server that sends byte ranges, as object stores do, or copy"
            " the file to a disk",
        )
        # With an encoding it is the length of the compressed body, not of the content.
        encoded = "Content-Encoding" in response.headers
        length = None if encoded else response.content_length
        patience.check_size(length or 0, url)
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            patience.check_size(len(content), url)
    whole = 200 if part is None else 206
    if response.status in {204, 206} - {whole} or length not in (None, len(content)):
        raise ShortBodyError(
            f"the body of {url} was cut short: {len(content)} bytes came, and the"
            f" server announced {length} (status {response.status}); check the server"
            " and the connection, or raise `retries`"
        )
    return bytes(content)


class Files(Source):
    """Sample i is the `bytes` of file i, or `(bytes, labels[i])`.

    Args:
        store: the file system.
        paths: its own names of the files.
        labels: one for each file; None: samples have none.
        shown: the arguments of this source as code.
        kind: what `KIND` says, as class folders are files as well.
    """

    def __init__(
        self,
        store: Store,
        paths: Sequence[str],
        labels: Sequence[Any] | None,
        shown: tuple[object, ...],
        kind: str = "Files",
    ) -> None:
        self.store, self.paths, self.labels = store, paths, labels
        self._shown, self.KIND = shown, kind

    @property
    def shown(self) -> tuple[object, ...]:
        return self._shown

    def identity(self) -> str:
        """Return the hash of the names of all files."""
        return digest(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        return self._sample(index, self.store.read(self.paths[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.paths, self.labels, self.shown, self.KIND)

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each file and its label: `uint64 [n, 2]`.

        Path, size and time of change identify files on this machine. The URL alone
        identifies files of an archive, and files of a store, because more would take a
        request for each file.
        """
        is_here = self.store.protocol in ("file", "local")
        place = None if is_here else self.store.place()
        return file_fingerprints(self.paths, labels=self.labels, store=place)

    def _sample(self, index: int, content: bytes) -> Any:
        return content if self.labels is None else (content, self.labels[index])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.store.protocol}: {len(self)} files>"


class AsyncFiles(Files):
    """The samples of `Files`, awaited: `await files[i]`, in any event loop."""

    async def __getitem__(self, index: Any) -> Any:
        return self._sample(index, await self.store.wait_for(self.paths[index]))

    def in_threads(self) -> Files:
        """Return the same files, for threads to read."""
        return Files(*self.__reduce__()[1])


class Session:
    """A file system that one loop uses, from the first read until the loop ends."""

    def __init__(self, store: Store, over: Any) -> None:
        # fsspec's instance, once the file system is open.
        self.files: Any = None
        self.hedged = HedgedReads()
        self._store, self._over = store, over
        # The first reads of a loop begin together: one opens, and the others wait.
        self._opening = asyncio.Lock()
        self._connections: AsyncGenerator[Any] | None = None

    async def begin(self) -> Any:
        """Open the file system, unless another read has opened it meanwhile."""
        async with self._opening:
            if self.files is None:
                self._connections = self._keep_open()
                self.files = await anext(self._connections)
        return self.files

    async def _keep_open(self) -> AsyncGenerator[Any]:
        """Keep the connections open for as long as the loop runs.

        A loop closes its async generators when it ends (`loop.shutdown_asyncgens`), so
        its owner does not need to know what was opened in it.
        """
        # An instance of its own, as the loop is not fsspec's.
        files = self._store.open(asynchronous=True, skip_instance_cache=True)
        connect = getattr(files, "set_session", None)
        client = None if connect is None else await connect()
        try:
            yield files
        finally:
            self._over()
            if client is not None:
                await client.close()


def parted(part: Part | None) -> dict[str, int]:
    """Return a part as the arguments of fsspec's `cat_file`."""
    return {} if part is None else {"start": part[0], "end": part[1]}


def whole_part(content: bytes, part: Part | None, path: str) -> bytes:
    """Return what was read; `ShortBodyError`: it is not the part that was asked for."""
    if part is not None and len(content) != part[1] - part[0]:
        raise ShortBodyError(
            f"{path} gave {len(content)} bytes, and bytes {part[0]} to {part[1]} were"
            " asked for; the file may have changed since it was listed"
        )
    return content


class StoredFile(io.IOBase):
    """A file of which only parts are read.

    Args:
        read: returns the bytes of a part.
        nbytes: size of the file.
        parts: those that are read first, because they are wanted.
    """

    def __init__(
        self, read: Callable[[Part], bytes], nbytes: int, parts: Sequence[Part] = ()
    ) -> None:
        self._read, self._nbytes, self._at = read, nbytes, 0
        self._parts = [(part, memoryview(read(part))) for part in parts]

    def readable(self) -> bool:
        """Return whether it can be read: it can."""
        return True

    def seekable(self) -> bool:
        """Return whether one can go to any place in it: one can."""
        return True

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; return it."""
        self._at = at + (0, self._at, self._nbytes)[whence]
        return self._at

    def read(self, nbytes: int) -> bytes:
        """Return this many bytes; fewer at the end of the file."""
        at, stop = self._at, min(self._at + nbytes, self._nbytes)
        if at >= stop:
            return b""
        blocks = (
            data[at - begin : stop - begin]
            for (begin, end), data in self._parts
            if begin <= at and stop <= end
        )
        block = next(blocks, None)
        self._at = stop
        return self._read((at, stop)) if block is None else bytes(block)


def find_files(
    urls: Paths,
    labels: Sequence[Any] | None,
    options: Mapping[str, Any] | None,
    executor: Executor,
    **limits: Any,
) -> Files:
    """Return the files at `urls`, listed now and opened when they are read.

    `limits` are those of `Patience`.

    Raises:
        SpecError: there is no file; the files are on several file systems; there is not
            one label per file; or executor="async" with a file system that an event
            loop cannot read.
    """
    alone = isinstance(urls, (str, os.PathLike))
    given_urls = [urls] if isinstance(urls, (str, os.PathLike)) else [*urls]
    for url in given_urls:
        check(
            isinstance(url, (str, os.PathLike)),
            f"a URL must be a str or a path, got {url!r}; for bytes that are in memory "
            "already use from_dataset",
        )
    url_list = [str(os.fspath(url)) for url in given_urls]
    check(
        url_list,
        "`from_files` needs at least one URL, got an empty sequence; was the "
        'listing that made it right? A pattern such as "photos/**/*.jpg" will do',
    )
    patience = Patience(**limits)
    store = Store(url_list[0], options or {}, patience)
    paths = _matches(store) if alone else tuple(_paths(store, url_list))
    label_count = len(paths) if labels is None else len(labels)
    check(
        label_count == len(paths),
        f"`labels` must hold one label a file, got {label_count} labels for "
        f"{len(paths)} files; leave them out, or give one for each in the same order",
    )
    labels_text = "" if labels is None else f"<{len(labels)} labels>"
    urls_text = url_list[0] if alone else Bare(f"<{len(url_list)} urls>")
    arguments = map(Bare, filter(None, (labels_text, str(patience))))
    return kind_of(store, executor)(store, paths, labels, (urls_text, *arguments))


def find_remote_folder(
    root: str, options: Mapping[str, Any] | None, executor: Executor
) -> Files:
    """Return the images in class folders below a URL; labels number sorted folders.

    Raises:
        SpecError: there is no image in a class folder; or executor="async" with a file
            system that an event loop cannot read.
    """
    protocol, path = root.split(":/", 1)
    root = f"{protocol}://{path.removeprefix('/')}"  # a Path drops one of two slashes
    store = Store(root, options or {})
    store.kind()
    files, top = url_to_fs(root, **store.options)
    try:
        # `find` skips folders that cannot be listed, even if that is all of them.
        listing = files.find(top) or files.ls(top, detail=False)
    except Exception as error:
        raise SpecError(
            f"`from_folder` could not list {root!r}: {type(error).__name__}: {error};"
            " see that the URL is right and that it may be read from here"
        ) from error
    inside = {
        path: posixpath.relpath(path, top).split("/", 1)
        for path in filter(is_image, listing)
    }
    classes = {path: names[0] for path, names in inside.items() if names[1:]}
    paths = sorted(classes)
    check(
        paths,
        f"`from_folder` found no image in class folders below {root!r}, and"
        f" {len(inside)} in none; give the folder that holds one sub-folder per class,"
        f" with files ending in {' '.join(sorted(SUFFIXES))}",
    )
    numbers = {name: number for number, name in enumerate(sorted({*classes.values()}))}
    labels = [numbers[classes[path]] for path in paths]
    return kind_of(store, executor)(store, tuple(paths), labels, (root,), kind="Folder")


def kind_of(store: Store, executor: Executor) -> type[Files]:
    """Return what an event loop or threads read; `SpecError`: it cannot but should."""
    can_wait = "::" not in store.url and store.kind().async_impl  # no chain can wait
    check(
        can_wait or executor != "async",
        f'executor="async" needs a file system that fsspec can read in an event loop, '
        f'which {store.protocol!r} is not; leave it out, or use executor="thread"',
    )
    return AsyncFiles if can_wait and executor in ("auto", "async") else Files


def _matches(store: Store) -> tuple[str, ...]:
    """Return the files that match the store's own URL, a pattern, sorted."""
    store.kind()
    files, pattern = url_to_fs(store.url, **store.options)
    matches = files.glob(pattern, detail=True)
    paths = sorted(path for path, info in matches.items() if info["type"] == "file")
    check(
        paths,
        f"penstock found no file that matches {store.url!r}"
        f"{', only folders' if matches else ''}; `*` matches within one folder, `**` "
        'also those below it, as in "photos/**/*.jpg"',
    )
    return tuple(paths)


def _paths(store: Store, urls: Sequence[str]) -> Iterable[str]:
    """Yield the file system's own names of the files at `urls`.

    URLs are stripped without opening the store: there are many, and a fork follows. A
    chain of file systems has to be opened.
    """
    kind = store.kind()
    chain = store.open() if any("::" in url for url in urls) else None
    own = {kind.protocol} if isinstance(kind.protocol, str) else {*kind.protocol}
    own.add(store.protocol)
    settings_of = kind._get_kwargs_from_urls  # noqa: SLF001 what url_to_fs asks
    settings = settings_of(store.url)
    for url in urls:
        if chain is None:
            is_own = get_protocol(url) in own and settings_of(url) == settings
            path = kind._strip_protocol(url)  # noqa: SLF001 what url_to_fs asks
        else:
            files, path = url_to_fs(url, **store.options)
            is_own = files == chain
        if not is_own:
            raise SpecError(
                "the URLs of one source must be of one file system, got "
                f"{store.protocol!r} ({store.url}) and {Store(url).protocol!r}"
                f" ({url}); make one pipeline for each, or from_dataset() of a dataset"
                " that reads both"
            )
        yield path
