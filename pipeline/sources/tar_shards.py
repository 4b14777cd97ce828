"""WebDataset shards: tar files, indexed once, then read by random access."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...errors import check
from .paths import Paths, files_here, first_of
from .per_process import PerProcess
from .source import Source, digest, prints_of_rows
from .tar_index import Index, Member, indexed, members_of

PICKLES = frozenset(("pkl", "pickle", "pyd", "pth", "pt"))
"""Fields that webdataset unpickles, which would run code in them."""
READS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": lambda data: npy.read_array(io.BytesIO(data), allow_pickle=False),
}
"""Decoders by the suffix of a field's name; other fields stay bytes."""
OPEN_TARS = 256
"""The open tar files of each process."""
RUN_BYTES = 1 << 20
"""Samples side by side are read at once up to this size. Beyond it, a read takes as
long as copying its bytes, so larger ones gain nothing.
"""


class Extent(NamedTuple):
    """Where the fields of a sample lie in its shard."""

    sample: int
    path: str
    """Its shard."""
    fields: list[list[int]]
    """Number of the name, first byte and size of each field, in the shard's order."""

    @property
    def begin(self) -> int:
        """The first byte of its fields."""
        return self.fields[0][1] if self.fields else 0

    @property
    def end(self) -> int:
        """The byte after its fields."""
        return self.fields[-1][1] + self.fields[-1][2] if self.fields else 0


class Shards(Source):
    """Sample i is a tuple of fields, or a dict of all fields and `__key__`."""

    KIND = "WebDataset"

    def __init__(
        self, paths: Sequence[str], fields: tuple[str, ...] | None, index: Index
    ) -> None:
        self.paths, self.fields, self.index = paths, fields, index
        wanted = index.names if fields is None else fields
        ends = {name: name.rpartition(".")[2] for name in wanted}
        self._reads = {name: READS.get(end, bytes) for name, end in ends.items()}
        self._wanted = index.only(set(wanted))

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
        wanted = self._wanted
        first, after = wanted.firsts[index : index + 2].tolist()
        path, fields = self.paths[wanted.shards[index]], wanted.fields[first:after]
        return Extent(index, path, fields.tolist())

    def _sample(self, place: Extent, data: bytes, begin: int) -> Any:
        """Return a sample, given bytes of its shard from `begin` on."""
        names, key = self.index.names, self.index.keys[place.sample]
        found = {
            names[number]: self._reads[names[number]](
                data[start - begin : start - begin + nbytes]
            )
            for number, start, nbytes in place.fields
        }
        if self.fields is None:
            return {"__key__": key, **found}
        try:
            return tuple([found[name] for name in self.fields])
        except KeyError as error:
            text = (
                f"sample {key!r} in {place.path} has no field {error}, only"
                f" {sorted(found)}; correct the name, or leave out samples that lack"
                " the field"
            )
            raise KeyError(text) from None

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
        return data

    def members(self) -> list[Member]:
        """Return the regular files in it; `SpecError`: this is not a tar file."""

        def read(at: int, nbytes: int) -> bytes:
            return os.pread(self._descriptor, nbytes, at)

        return members_of(self.path, read, partial(open, self.path, "rb"))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            close(self._descriptor)


class WebDataset(Shards):
    """Shards on this machine. What lies side by side is read at once."""

    def __init__(
        self, paths: Sequence[str], fields: tuple[str, ...] | None, index: Index
    ) -> None:
        super().__init__(paths, fields, index)
        self._shard = PerProcess(OpenTar, OPEN_TARS)

    @classmethod
    def find(cls, paths: Paths, fields: Sequence[str] | None = None) -> WebDataset:
        """Index shards of this machine.

        Raises:
            SpecError: there is no shard or no sample, a field comes twice in a sample,
                or it would have to be unpickled.
        """
        found = files_here("from_webdataset", paths)
        index = indexed((path, OpenTar(path).members()) for path in found)
        return cls(found, checked_fields(index, fields, found[0]), index)

    def __getitem__(self, index: Any) -> Any:
        place = self._place(index)
        data = self._shard(place.path).read(place.begin, place.end)
        return self._sample(place, data, place.begin)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return some samples; those that lie side by side are read at once."""
        found: list[Any] = [None] * len(indices)
        for begin, end, run in self._runs(indices):
            data = self._shard(run[0][1].path).read(begin, end)
            for at, place in run:
                found[at] = self._sample(place, data, begin)
        return found

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
        from ...cache.fingerprint import file_fingerprints

        return self._prints_of(file_fingerprints(self.paths))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.paths, self.fields, self.index)


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
