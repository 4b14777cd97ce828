"""WebDataset shards: tar files, indexed once, then read by random access.

As in the webdataset package, consecutive files whose names are equal up to the first
dot form one sample.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...errors import SpecError, check
from .paths import Paths, files_here
from .per_process import PerProcess, prints_of_rows
from .source import Source, digest

NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")
"""A key, and the name of a field."""
PICKLES = frozenset(("pkl", "pickle", "pyd", "pth", "pt"))
"""Fields that webdataset unpickles, which would run code in them."""
READS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": lambda data: npy.read_array(io.BytesIO(data), allow_pickle=False),
}
"""Decoders by the suffix of a field's name; other fields stay bytes."""


@dataclass(slots=True)
class Index:
    """The positions of the fields of all samples."""

    names: dict[str, int] = field(default_factory=dict)
    """A number for each field's name."""
    keys: list[str] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)
    """The number of each sample's file."""
    firsts: list[int] = field(default_factory=list)
    """The position in `fields` where each sample's fields begin."""
    fields: list[tuple[int, int, int]] = field(default_factory=list)
    """Number of the name; first byte; bytes."""

    def add(self, shard: int, path: str) -> None:
        """Index a file.

        Raises:
            SpecError: the file is not a tar file, or is compressed.
        """
        last = None
        try:
            for key, name, start, nbytes in members(path):
                if key != last:
                    self.keys.append(key)
                    self.shards.append(shard)
                    self.firsts.append(len(self.fields))
                    last = key
                number = self.names.setdefault(name, len(self.names))
                self.fields.append((number, start, nbytes))
        except tarfile.TarError as error:
            raise SpecError(
                f"`from_webdataset` cannot read {path!r}: {error}; give tar files that"
                " are not compressed: only these can be read at any place"
            ) from error


def members(path: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, field, first byte and bytes of each file in a tar."""
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all members
            match = NAME.fullmatch(member.name)
            if match and member.isreg() and not member.issparse():
                yield match[1], match[2].lower(), member.offset_data, member.size


class OpenTar:
    """An open tar file that any number of threads may read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, fields: Sequence[tuple[str, int, int]]) -> dict[str, bytes]:
        """Return fields by name in one read, given their names, first bytes and sizes.

        They are consecutive in the file, apart from a header each.

        Raises:
            OSError: the file ends before they do.
        """
        if not fields:
            return {}
        begin = min(start for _, start, _ in fields)
        end = max(start + nbytes for _, start, nbytes in fields)
        data = os.pread(self._descriptor, end - begin, begin)
        while len(data) != end - begin:  # Linux reads at most 2 GiB at once
            more = os.pread(
                self._descriptor, end - begin - len(data), begin + len(data)
            )
            if not more:
                raise OSError(
                    f"{self.path} ends within a sample: it was cut off since it was"
                    " indexed"
                )
            data += more
        return {
            name: data[start - begin : start - begin + nbytes]
            for name, start, nbytes in fields
        }

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


OPEN_TARS = 256
"""The open tar files of each process."""


class WebDataset(Source):
    """Sample i is a tuple of fields, or a dict of all fields and `__key__`."""

    KIND: ClassVar[str] = "WebDataset"

    def __init__(
        self, paths: Sequence[str], fields: tuple[str, ...] | None, index: Index
    ) -> None:
        self.paths, self.fields = paths, fields
        self._names = [*index.names]
        self._keys = index.keys
        self._shards = np.array(index.shards, np.int32)
        self._firsts = np.array([*index.firsts, len(index.fields)], np.int64)
        self._fields = np.array(index.fields, np.int64).reshape(-1, 3)
        wanted = self._names if fields is None else fields
        ends = {name: name.rpartition(".")[2] for name in wanted}
        self._reads = {name: READS.get(end, bytes) for name, end in ends.items()}
        self._shard = PerProcess(OpenTar, OPEN_TARS)

    @classmethod
    def find(cls, paths: Paths, fields: Sequence[str] | None = None) -> WebDataset:
        """Index shards.

        Raises:
            SpecError: there is no shard or no sample, or a field would have to be
                unpickled.
        """
        found = files_here("from_webdataset", paths)
        index = Index()
        for shard, path in enumerate(found):
            index.add(shard, path)
        check(index.keys, f"`from_webdataset` found no sample in {found[0]!r}, ...")
        wanted = tuple(index.names if fields is None else fields)
        for name in wanted:
            check(
                name.rpartition(".")[2] not in PICKLES,
                f"`from_webdataset` does not read the field {name!r}: it would have to"
                " be unpickled, which runs what it holds; leave it out,"
                f" fields={harmless(index.names)}, or write it as npy or json",
            )
        return cls(found, None if fields is None else wanted, index)

    @property
    def shown(self) -> tuple[object, ...]:
        several = f"{self.paths[0]}, ..." if len(self.paths) > 1 else self.paths[0]
        return (several,)

    @property
    def group_sizes(self) -> list[int]:
        """The number of samples in each shard, in order."""
        sizes: list[int] = self._counts().tolist()
        return sizes

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        first, last = self._firsts[index], self._firsts[index + 1]
        rows = [
            (self._names[number], start, nbytes)
            for number, start, nbytes in self._fields[first:last].tolist()
            if self._names[number] in self._reads
        ]
        path = self.paths[self._shards[index]]
        found = {
            name: self._reads[name](data)
            for name, data in self._shard(path).read(rows).items()
        }
        if self.fields is None:
            return {"__key__": self._keys[index], **found}
        absent = [name for name in self.fields if name not in found]
        if absent:
            raise KeyError(f"{self._keys[index]} in {path} has no field {absent[0]!r}")
        return tuple(found[name] for name in self.fields)

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each sample: `uint64 [n, 2]`.

        It depends on the shard's path, size and time, and the sample's place in it.
        """
        from ...cache.fingerprint.key import file_fingerprints

        said = bytes.fromhex(digest([repr(self.fields)]))
        salt = np.frombuffer(said, np.uint64).reshape(1, 2)
        return prints_of_rows(file_fingerprints(self.paths), self._counts(), salt)

    def identity(self) -> str:
        """Return the hash of all keys and fields, shard by shard."""
        counts = map(str, self._counts().tolist())
        return digest([*self._keys, *counts, repr(self.fields)])

    def _counts(self) -> NDArray[np.int64]:
        return np.bincount(self._shards, minlength=len(self.paths)).astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = [(name, at, nbytes) for name, at, nbytes in self._fields.tolist()]
        names = {name: number for number, name in enumerate(self._names)}
        shards, firsts = self._shards.tolist(), self._firsts[:-1].tolist()
        make = partial(Index, names, self._keys, shards, firsts, fields)
        return remade, (self.paths, self.fields, make)

    def __repr__(self) -> str:
        return f"<WebDataset: {len(self)} samples in {len(self.paths)} shards>"


def remade(
    paths: Sequence[str], fields: tuple[str, ...] | None, index: Callable[[], Index]
) -> WebDataset:
    """Return the shards again in another process."""
    return WebDataset(paths, fields, index())


def harmless(names: Sequence[str] | dict[str, int]) -> tuple[str, ...]:
    """Return the fields that need no unpickling."""
    return tuple(name for name in names if name.rpartition(".")[2] not in PICKLES)
