"""WebDataset shards on a web server or in an object store.

They are indexed by their headers, and a sample is then read as a byte range of its
shard: no shard is ever kept. The indexing reads what lies between headers, too, where
that is less than a request costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cache.fingerprint import file_fingerprints
from ...engine.recipe import Executor
from ...errors import SpecError, check
from .files import AsyncFiles, Store, find_files
from .tar_shards import Index, Member, Shards, checked_fields, indexed, members_of

FIRST_BYTES = 1 << 16
"""Read with a header after a gap; as long as headers lie close, each read doubles."""
MAX_BYTES = 1 << 22
INDEXED_AT_ONCE = 16
"""Shards whose headers are read side by side."""


class RemoteShards(Shards):
    """Shards whose samples threads read as byte ranges."""

    def __init__(
        self,
        store: Store,
        paths: Sequence[str],
        fields: tuple[str, ...] | None,
        index: Index,
    ) -> None:
        super().__init__(paths, fields, index)
        self.store = store

    def __getitem__(self, index: Any) -> Any:
        place = self._place(index)
        part = place.begin, place.end
        data = self.store.read(place.path, part) if place.begin < place.end else b""
        return self._sample(place, data, place.begin)

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each sample: `uint64 [n, 2]`.

        It depends on the shard's URL, the sample's place in it, and the whole index.
        """
        places = hashlib.blake2b(self.index.fields.tobytes(), digest_size=16)
        store = [*self.store.place(), self.identity(), places.hexdigest()]
        return self._prints_of(file_fingerprints(self.paths, store=store))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.paths, self.fields, self.index)


class AsyncShards(RemoteShards):
    """Shards whose samples are awaited as byte ranges in an event loop."""

    async def __getitem__(self, index: Any) -> Any:
        place = self._place(index)
        part, is_empty = (place.begin, place.end), place.begin == place.end
        data = b"" if is_empty else await self.store.wait_for(place.path, part)
        return self._sample(place, data, place.begin)

    def in_threads(self) -> RemoteShards:
        """Return the same shards, for threads to read."""
        return RemoteShards(*self.__reduce__()[1])


class ReadAhead:
    """A file, read at mostly ascending places, with some bytes ahead.

    Args:
        read: returns the bytes of a part.
        nbytes: size of the file.
    """

    def __init__(self, read: Callable[[tuple[int, int]], bytes], nbytes: int) -> None:
        self._read, self._nbytes = read, nbytes
        self._at, self._begin, self._data = 0, 0, b""
        self._step = FIRST_BYTES

    def seek(self, at: int) -> None:
        """Go to a place."""
        self._at = at

    def tell(self) -> int:
        """Return the place where the next read begins."""
        return self._at

    def read(self, nbytes: int) -> bytes:
        """Return this many bytes; fewer at the end of the file."""
        at, stop = self._at, min(self._at + nbytes, self._nbytes)
        if at >= stop:
            return b""
        end = self._begin + len(self._data)
        if at < self._begin or stop > end:
            near = 0 <= at - end <= self._step
            self._step = min(2 * self._step, MAX_BYTES) if near else FIRST_BYTES
            after = min(max(stop, at + self._step), self._nbytes)
            self._begin, self._data = at, self._read((at, after))
        self._at = stop
        return self._data[at - self._begin : stop - self._begin]


def find_remote_shards(
    urls: Sequence[str],
    fields: Sequence[str] | None,
    options: Mapping[str, Any] | None,
    executor: Executor,
) -> RemoteShards:
    """Index shards in a store.

    Args:
        urls: shards of one file system, or one pattern that matches them.
        fields: the fields of each sample; None: all.
        options: storage options of fsspec.
        executor: as the user asked for.

    Raises:
        SpecError: there is no shard or no sample, a shard cannot be read in parts, or a
            field may not be read.
    """
    given = urls[0] if len(urls) == 1 and "*" in urls[0] else urls
    files = find_files(given, None, options, executor)
    with ThreadPoolExecutor(INDEXED_AT_ONCE) as threads:
        found = threads.map(partial(members, files.store), files.paths)
        index = indexed(zip(files.paths, found, strict=True))
    wanted = checked_fields(index, fields, files.paths[0])
    kind = AsyncShards if isinstance(files, AsyncFiles) else RemoteShards
    return kind(files.store, files.paths, wanted, index)


def members(store: Store, path: str) -> list[Member]:
    """Return the regular files in a shard, read as far as its headers need.

    Raises:
        SpecError: it is not a tar file, or cannot be read in parts.
    """
    try:
        nbytes = store.patience.read(store.open().info, path)["size"]
        check(
            nbytes is not None,
            f"`from_webdataset` cannot read {path!r}: its server does not say how long"
            " it is, so it sends no parts; copy the shards to a disk or object store",
        )
        return members_of(path, ReadAhead(partial(store.read, path), nbytes))
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(
            f"`from_webdataset` cannot index {path!r}: {type(error).__name__}:"
            f" {error}; see that it may be read from here, in parts"
        ) from error
