"""WebDataset shards: tar files, indexed once, then read by random access.

As in the webdataset package, consecutive files whose names are equal up to the first
dot form one sample. The index needs only headers.

A sample in a store is read as a byte range of its shard: no shard is ever kept. The
indexing reads what lies between headers, too, where that is less than a request costs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...cache.fingerprint import file_fingerprints
from ...engine.recipe import Executor
from ...errors import PenstockError, SpecError, check
from .folder import URL, Paths, files_here, first_of, listed
from .source import PerProcess, Source, digest, prints_of_rows

if TYPE_CHECKING:
    from .files import Store

# A key, and the name of a field.
NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")
# Files about the shard itself, which webdataset skips.
NOTES = re.compile(r"__[^/]*__(/|$)")
# Name, first byte and bytes of a file in a tar.
Member = tuple[str, int, int]


@dataclass(frozen=True, eq=False)
class Index:
    """The places of the fields of all samples."""

    names: tuple[str, ...]
    """The name of each field, by number."""
    keys: list[str]
    shards: NDArray[np.int32]
    """The number of each sample's file, `[n]`."""
    firsts: NDArray[np.int64]
    """The place in `fields` where each sample's fields begin, `[n + 1]`."""
    fields: NDArray[np.int64]
    """Number of the name, first byte and bytes of each field, `[f, 3]`."""

    def only(self, names: set[str]) -> Index:
        """Return the same samples with these fields alone."""
        numbers = [number for number, name in enumerate(self.names) if name in names]
        mask = np.isin(self.fields[:, 0], numbers)
        before = np.concatenate(([0], np.cumsum(mask)))
        return replace(self, firsts=before[self.firsts], fields=self.fields[mask])


def index_of(shards: Iterable[tuple[str, list[Member]]]) -> Index:
    """Return the index of shards, given the path and the members of each.

    Raises:
        SpecError: a field comes twice in one sample.
    """
    names: dict[str, int] = {}
    samples: list[tuple[str, int, int]] = []
    fields: list[tuple[int, int, int]] = []
    for shard, (path, members) in enumerate(shards):
        last, field_names = None, set[str]()
        for member, start, nbytes in members:
            match = NAME.fullmatch(member)
            if match is None or NOTES.match(member):
                continue
            key, name = match[1], match[2].lower()
            if key != last:
                samples.append((key, shard, len(fields)))
                last, field_names = key, set()
            check(
                name not in field_names,
                f"`from_webdataset` found the field {name!r} of sample {key!r} twice in"
                f" {path!r}, and cannot tell which one is meant; write the shard"
                " again with one of them, or with different names",
            )
            field_names.add(name)
            fields.append((names.setdefault(name, len(names)), start, nbytes))
    return Index(
        names=tuple(names),
        keys=[key for key, _, _ in samples],
        shards=np.array([shard for _, shard, _ in samples], np.int32),
        firsts=np.array([*(first for _, _, first in samples), len(fields)], np.int64),
        fields=np.array(fields, np.int64).reshape(-1, 3),
    )


def members_of(path: str, file: Any = None) -> list[Member]:
    """Return the regular files in a tar.

    Args:
        path: where it is, or its name in errors.
        file: reads it at any place; None: it is on this machine.

    Raises:
        SpecError: the file is not a tar file, or is compressed.
        Exception: whatever reading it raises.
    """
    members: list[Member] = []
    try:
        with tarfile.open(path, "r:", file) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                regular = member.isreg() and not member.issparse()
                members += (
                    [(member.name, member.offset_data, member.size)] if regular else []
                )
    except PenstockError:  # of the store: it could not be read
        raise
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise SpecError(
            f"`from_webdataset` cannot read {path!r}: {error}; give tar files that are"
            " not compressed: only these can be read at any place"
        ) from error
    return members


# Fields that webdataset unpickles, which would run code in them.
PICKLES = frozenset(("pkl", "pickle", "pyd", "pth", "pt"))
# Decoders by the suffix of a field's name; other fields stay bytes.
READS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": lambda data: npy.read_array(io.BytesIO(data), allow_pickle=False),
}
# Samples side by side are read at once up to this size. Beyond it, a read takes as long
# as copying its bytes, so larger ones gain nothing.
RUN_BYTES = 1 << 20


class Extent(NamedTuple):
    """Where the fields of a sample lie in its shard."""

    sample: int
    path: str
    """Its shard."""
    begin: int
    """The first byte of its fields."""
    end: int
    """The byte after its fields."""
    fields: list[list[int]]
    """Number of the name, first byte and size of each field, in the shard's order."""


class Shards(Source):
    """Sample i is a tuple of fields, or a dict of all fields and `__key__`."""

    KIND = "WebDataset"

    def __init__(
        self, paths: Sequence[str], fields: tuple[str, ...] | None, index: Index
    ) -> None:
        self.paths, self.fields, self.index = paths, fields, index
        field_names = index.names if fields is None else fields
        ends = {name: name.rpartition(".")[2] for name in field_names}
        self._reads = {name: READS.get(end, bytes) for name, end in ends.items()}
        self._field_index = index.only(set(field_names))

    @property
    def shown(self) -> tuple[object, ...]:
        return (first_of(self.paths),)

    @property
    def group_sizes(self) -> list[int]:
        """The number of samples in each shard, in order."""
        return [*map(int, self._counts())]

    def __len__(self) -> int:
        return len(self.index.keys)

    def _place(self, index: int) -> Extent:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        field_index = self._field_index
        first, after = field_index.firsts[index : index + 2].tolist()
        fields = field_index.fields[first:after].tolist()
        begin, end = (fields[0][1], sum(fields[-1][1:])) if fields else (0, 0)
        path = self.paths[field_index.shards[index]]
        return Extent(sample=index, path=path, begin=begin, end=end, fields=fields)

    def _sample(self, place: Extent, data: bytes, begin: int) -> Any:
        """Return a sample, given bytes of its shard from `begin` on."""
        names, key = self.index.names, self.index.keys[place.sample]
        values = {
            names[number]: self._reads[names[number]](
                data[start - begin : start - begin + nbytes]
            )
            for number, start, nbytes in place.fields
        }
        if self.fields is None:
            return {"__key__": key, **values}
        try:
            return tuple([values[name] for name in self.fields])
        except KeyError as error:
            raise KeyError(
                f"sample {key!r} in {place.path} has no field {error}, only"
                f" {sorted(values)}; correct the name, or leave out samples that lack"
                " the field"
            ) from None

    def _prints_of(self, files: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the fingerprints of samples, given those of shards, `[f, 2]`."""
        return prints_of_rows(files, self._counts(), digest([repr(self.fields)]))

    def identity(self) -> str:
        """Return the hash of all keys and fields, shard by shard."""
        counts = map(str, self._counts().tolist())
        return digest([*self.index.keys, *counts, repr(self.fields)])

    def _counts(self) -> NDArray[np.int64]:
        return np.bincount(self.index.shards, minlength=len(self.paths))

    def __repr__(self) -> str:
        return f"<WebDataset: {len(self)} samples in {len(self.paths)} shards>"


class OpenTar:
    """An open tar file that any number of threads may read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end`.

        Raises:
            OSError: the file ends before.
        """
        data = b""
        while nbytes := end - begin - len(data):  # Linux reads at most 2 GiB at once
            more = os.pread(self._descriptor, nbytes, end - nbytes)
            if not more:
                raise OSError(
                    f"{self.path} ends within a sample: it was cut off since it was"
                    " indexed"
                )
            data += more
        return data

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            close(self._descriptor)


class WebDataset(Shards):
    """Shards on this machine. What lies side by side is read at once."""

    def __init__(
        self, paths: Sequence[str], fields: tuple[str, ...] | None, index: Index
    ) -> None:
        super().__init__(paths, fields, index)
        self._shard = PerProcess(OpenTar, 256)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__((index,))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return some samples; those that lie side by side are read at once."""
        samples: list[Any] = [None] * len(indices)
        for begin, end, run in self._runs(indices):
            data = self._shard(run[0][1].path).read(begin, end)
            for at, place in run:
                samples[at] = self._sample(place, data, begin)
        return samples

    def _runs(
        self, indices: Sequence[int]
    ) -> Iterator[tuple[int, int, list[tuple[int, Extent]]]]:
        """Yield what to read of a shard at once: its first byte and the byte after it.

        The samples that lie there follow, each with its position in `indices`.
        """
        begin, end, run = 0, 0, list[tuple[int, Extent]]()
        for at in sorted(range(len(indices)), key=indices.__getitem__):
            place = self._place(indices[at])
            start, stop = place.begin, place.end
            _, last = run[-1] if run else (0, place)
            near = run and place.path == last.path and place.sample <= last.sample + 1
            if near and begin <= start and stop - begin <= RUN_BYTES:
                end = max(end, stop)
            else:
                if run:
                    yield begin, end, run
                begin, end, run = start, stop, []
            run.append((at, place))
        if run:
            yield begin, end, run

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each sample: `uint64 [n, 2]`.

        It depends on the shard's path, size and time, and the sample's place in it.
        """
        return self._prints_of(file_fingerprints(self.paths))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.paths, self.fields, self.index)


# Shards in a store.

# Read with a header after a gap; as long as headers lie close, each read doubles.
FIRST_BYTES = 1 << 16
MAX_BYTES = 1 << 22


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
    """Reads parts of a file, at mostly ascending places, with some bytes ahead.

    Args:
        read: returns the bytes of a part.
        nbytes: size of the file.
    """

    def __init__(self, read: Callable[[tuple[int, int]], bytes], nbytes: int) -> None:
        self._read, self._nbytes = read, nbytes
        self._begin, self._data, self._step = 0, b"", FIRST_BYTES

    def __call__(self, part: tuple[int, int]) -> bytes:
        """Return the bytes of a part within the file."""
        at, stop = part
        end = self._begin + len(self._data)
        if at < self._begin or stop > end:
            near = 0 <= at - end <= self._step
            self._step = min(2 * self._step, MAX_BYTES) if near else FIRST_BYTES
            after = min(max(stop, at + self._step), self._nbytes)
            self._begin, self._data = at, self._read((at, after))
        return self._data[at - self._begin : stop - self._begin]


def stored_members(store: Store, path: str) -> list[Member]:
    """Return the regular files in a shard, read as far as its headers need.

    Raises:
        SpecError: it is not a tar file, or cannot be read in parts.
    """
    from .files import StoredFile

    try:
        nbytes = store.patience.read(store.open().info, path)["size"]
        check(
            nbytes is not None,
            f"`from_webdataset` cannot read {path!r}: its server does not say how long"
            " it is, so it sends no parts; copy the shards to a disk or object store",
        )
        ahead = ReadAhead(partial(store.read, path), nbytes)
        return members_of(path, StoredFile(ahead, nbytes))
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(
            f"`from_webdataset` cannot index {path!r}: {type(error).__name__}:"
            f" {error}; see that it may be read from here, in parts"
        ) from error


# Either kind.


def find_shards(
    shards: Paths,
    fields: Sequence[str] | None,
    options: Mapping[str, Any] | None,
    executor: Executor,
) -> Shards:
    """Index shards on this machine or in a store.

    Args:
        shards: files, or one pattern that matches them; those of a store are of one
            file system.
        fields: the fields of each sample; None: all.
        options: storage options of fsspec.
        executor: as the user asked for.

    Raises:
        SpecError: there is no shard or no sample, a shard cannot be read in parts, a
            field comes twice in a sample, or it may not be read.
    """
    urls = listed("from_webdataset", shards)
    if not any(map(URL.match, urls)):
        paths: Sequence[str] = files_here("from_webdataset", shards)
        index = index_of((path, members_of(path)) for path in paths)
        return WebDataset(paths, checked_fields(index, fields, paths[0]), index)
    from .files import AsyncFiles, find_files  # only for a store: fsspec takes its time

    locations = urls[0] if len(urls) == 1 and "*" in urls[0] else urls
    files = find_files(locations, None, options, executor)
    with ThreadPoolExecutor(16) as threads:  # the headers of 16 shards side by side
        members = threads.map(partial(stored_members, files.store), files.paths)
        index = index_of(zip(files.paths, members, strict=True))
    field_names = checked_fields(index, fields, files.paths[0])
    kind = AsyncShards if isinstance(files, AsyncFiles) else RemoteShards
    return kind(files.store, files.paths, field_names, index)


def checked_fields(
    index: Index, fields: Sequence[str] | None, first: str
) -> tuple[str, ...] | None:
    """Return the fields to read, as given.

    Raises:
        SpecError: there is no sample, or a field would have to be unpickled.
    """
    check(
        index.keys,
        f"`from_webdataset` found no sample in {first!r}, ..."
        "; give tar files whose members are named key.field",
    )
    harmless = tuple(
        name for name in index.names if name.rpartition(".")[2] not in PICKLES
    )
    for name in index.names if fields is None else fields:
        check(
            name.rpartition(".")[2] not in PICKLES,
            f"`from_webdataset` does not read the field {name!r}: it would have to"
            f" be unpickled, which runs what it holds; leave it out, fields={harmless},"
            " or write it as npy or json",
        )
    return None if fields is None else tuple(fields)
