"""Files by URL, read whole through fsspec: of a disk, a web server, an object store.

fsspec knows some file systems that can wait without a thread. Those are read in the
event loop of their segment (`AsyncFiles`), all others by threads (`Files`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.recipe import Executor
from ..errors import SpecError, check
from ..system.printing import Bare

__all__ = [
    "AsyncFiles",
    "Files",
    "Store",
    "Urls",
    "find_files",
]

Url = str | os.PathLike[str]
Urls = Url | Sequence[Url]
"""Files one by one, or one pattern that matches them."""


@dataclass(frozen=True, slots=True)
class Store:
    """A file system as text: what it takes to open it, anywhere."""

    url: str
    """Of a file on it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What fsspec calls storage options."""

    @property
    def protocol(self) -> str:
        """`file`, `https`, `s3`, ..."""
        from fsspec.utils import get_protocol

        return str(get_protocol(self.url))

    def kind(self) -> Any:
        """Return fsspec's class for it.

        Raises:
            SpecError: there is none, or the package that it needs is missing.
        """
        from fsspec import get_filesystem_class

        try:
            return get_filesystem_class(self.protocol)
        except (ImportError, ValueError) as error:
            text = (
                f"`from_files` cannot read {self.url!r}: {error}; give a path, or a "
                "URL of a protocol that fsspec knows, and install what it asks for"
            )
            raise SpecError(text) from error

    def can_wait(self) -> bool:
        """Whether it can be read in an event loop. A chain of file systems cannot."""
        return "::" not in self.url and bool(self.kind().async_impl)

    def place(self) -> list[Any]:
        """Return what tells it from other stores: host, account, ref; archive; options.

        An archive on this machine is told by path, size and time of change.
        """
        from fsspec.utils import get_protocol

        from ..cache.fingerprint.key import file_fingerprints

        first, _, archive = self.url.partition("::")
        found = [self.protocol, dict(self.options), archive]
        found.append(self.kind()._get_kwargs_from_urls(first))  # noqa: SLF001 see _plain
        last = archive.rpartition("::")[2]
        if last and get_protocol(last) in ("file", "local"):
            from fsspec.implementations.local import LocalFileSystem

            path = str(LocalFileSystem._strip_protocol(last))  # noqa: SLF001 see _plain
            found.append(file_fingerprints([path]))
        return found

    def open(self) -> Any:
        """Return fsspec's instance; it shares one where that is safe for threads."""
        from fsspec.core import url_to_fs

        return url_to_fs(self.url, **self.options)[0]

    def open_in_loop(self) -> Any:
        """Return an instance of the running loop's own."""
        from fsspec.core import url_to_fs

        options = dict(self.options)
        if "https" in self.kind().protocol:
            options.setdefault("get_client", unlimited_client)
        own = {"asynchronous": True, "skip_instance_cache": True}
        return url_to_fs(self.url, **options, **own)[0]


async def unlimited_client(**settings: Any) -> Any:
    """Return an HTTP client that opens a connection for every request in flight.

    How many these are is what `num_parallel_workers` says; aiohttp stops at 100.
    """
    import aiohttp

    if "connector" not in settings:
        settings["connector"] = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(**settings)


class Files:
    """Sample i is the `bytes` of file i, or `(bytes, labels[i])`.

    It travels to other processes as text, and forks: a file system is opened by each
    thread that reads, and never used by another process than the one that opened it.
    """

    def __init__(
        self,
        store: Store,
        paths: Sequence[str],
        labels: Sequence[Any] | None,
        shown: tuple[object, ...],
    ) -> None:
        self.store = store
        self.paths = paths
        self.labels = labels
        self.shown = shown
        """How the arguments that made it print."""
        self._local = threading.local()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self._sample(index, self._here().cat_file(self.paths[index]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.paths, self.labels, self.shown)

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return what tells each file, and its label, from others: `uint64 [n, 2]`.

        Files of this machine are told by path, size and time of change; those of a
        store by their URL alone: to look at each would take a request. Those of an
        archive by it, too.
        """
        from ..cache.fingerprint.key import file_fingerprints, url_fingerprints

        if self.store.protocol in ("file", "local"):
            return file_fingerprints(self.paths, labels=self.labels)
        return url_fingerprints(self.paths, self.store.place(), labels=self.labels)

    def _here(self) -> Any:
        process, files = getattr(self._local, "opened", (None, None))
        if process != os.getpid():
            files = self.store.open()
            self._local.opened = os.getpid(), files
        return files

    def _sample(self, index: int, content: bytes) -> Any:
        return content if self.labels is None else (content, self.labels[index])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.store.protocol}: {len(self)} files>"


class AsyncFiles(Files):
    """The same samples, awaited: `await files[i]`, in any event loop."""

    def __init__(
        self,
        store: Store,
        paths: Sequence[str],
        labels: Sequence[Any] | None,
        shown: tuple[object, ...],
    ) -> None:
        super().__init__(store, paths, labels, shown)
        self._sessions: dict[asyncio.AbstractEventLoop, Session] = {}

    async def __getitem__(self, index: int) -> Any:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            session = Session(self.store, lambda: self._sessions.pop(loop))
            self._sessions[loop] = session
        files = session.files or await session.begin()
        content = await files._cat_file(self.paths[index])  # noqa: SLF001 its async API
        return self._sample(index, content)


class Session:
    """A file system in use by one loop, from the first read until the loop ends."""

    def __init__(self, store: Store, over: Any) -> None:
        self.files: Any = None
        """fsspec's instance, once it is open."""
        self._store = store
        self._over = over
        self._opening = asyncio.Lock()
        self._held: AsyncGenerator[Any] | None = None

    async def begin(self) -> Any:
        """Open it, unless another read has meanwhile."""
        async with self._opening:
            if self.files is None:
                self._held = self._keep_open()
                self.files = await anext(self._held)
        return self.files

    async def _keep_open(self) -> AsyncGenerator[Any]:
        """Keep the connections open for as long as the loop runs.

        A loop that ends closes its async generators (`loop.shutdown_asyncgens`), so
        whoever owns the loop need not know what was opened in it.
        """
        files = self._store.open_in_loop()
        connect = getattr(files, "set_session", None)
        client = None if connect is None else await connect()
        try:
            yield files
        finally:
            self._over()
            if client is not None:
                await client.close()


def find_files(
    urls: Urls,
    labels: Sequence[Any] | None,
    options: Mapping[str, Any] | None,
    executor: Executor,
) -> Files:
    """Return the files at `urls`, listed now and opened when they are read.

    Raises:
        SpecError: no file; files of several file systems; not a label a file; a file
            system that cannot be read in an event loop, with executor="async".
    """
    if isinstance(urls, (str, os.PathLike)):
        shown: object = os.fspath(urls)
        store = Store(os.fspath(urls), options or {})
        paths = _matches(store)
    else:
        listed = [_text(url) for url in urls]
        check(
            listed,
            "`from_files` needs at least one URL, got an empty sequence; was the "
            'listing that made it right? A pattern such as "photos/**/*.jpg" will do',
        )
        shown = Bare(f"<{len(listed)} urls>")
        store = Store(listed[0], options or {})
        paths = _paths(store, listed)
    check(
        labels is None or len(labels) == len(paths),
        f"`labels` must hold one label a file, got {_count(labels)} labels for "
        f"{len(paths)} files; leave them out, or give one for each in the same order",
    )
    can_wait = store.can_wait()
    check(
        can_wait or executor != "async",
        f'executor="async" needs a file system that fsspec can read in an event loop, '
        f'which {store.protocol!r} is not; leave it out, or use executor="thread"',
    )
    kind = AsyncFiles if can_wait and executor in ("auto", "async") else Files
    given = (shown,) if labels is None else (shown, Bare(f"<{len(labels)} labels>"))
    return kind(store, paths, labels, given)


def _text(url: Any) -> str:
    check(
        isinstance(url, (str, os.PathLike)),
        f"a URL must be a str or a path, got {url!r}; for bytes that are in memory "
        "already use from_dataset",
    )
    return str(os.fspath(url))


def _count(labels: Sequence[Any] | None) -> int:
    return 0 if labels is None else len(labels)


def _matches(store: Store) -> tuple[str, ...]:
    """Return the files that the store's own URL, a pattern, matches; sorted."""
    from fsspec.core import url_to_fs

    store.kind()
    files, pattern = url_to_fs(store.url, **store.options)
    found = files.glob(pattern, detail=True)
    paths = sorted(path for path, info in found.items() if info["type"] == "file")
    check(
        paths,
        f"`from_files` found no file that matches {store.url!r}"
        f"{', only folders' if found else ''}; `*` matches within one folder, `**` "
        'also those below it, as in "photos/**/*.jpg"',
    )
    return tuple(paths)


def _paths(store: Store, urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs as the file system itself calls the files."""
    kind = store.kind()
    if any("::" in url for url in urls):
        return tuple(_chained(store, urls))
    return tuple(_plain(kind, store, urls))


def _plain(kind: Any, store: Store, urls: Iterable[str]) -> Iterable[str]:
    """Without opening it: there may be millions, and the trainer forks later."""
    from fsspec.utils import get_protocol

    own = {kind.protocol} if isinstance(kind.protocol, str) else {*kind.protocol}
    own.add(store.protocol)
    settings_of = kind._get_kwargs_from_urls  # noqa: SLF001 what url_to_fs asks
    settings = settings_of(store.url)
    for url in urls:
        if get_protocol(url) not in own or settings_of(url) != settings:
            raise _mixed(store, url)
        yield kind._strip_protocol(url)  # noqa: SLF001 what url_to_fs asks


def _chained(store: Store, urls: Iterable[str]) -> Iterable[str]:
    from fsspec.core import url_to_fs

    first = store.open()
    for url in urls:
        files, path = url_to_fs(url, **store.options)
        if files != first:
            raise _mixed(store, url)
        yield path


def _mixed(store: Store, url: str) -> SpecError:
    return SpecError(
        "the URLs of one from_files() must be of one file system, got "
        f"{store.protocol!r} ({store.url}) and {Store(url).protocol!r} ({url}); make "
        "one pipeline for each, or from_dataset() of a dataset that reads both"
    )
