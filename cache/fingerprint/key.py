"""What a record is stored under: the data and the code that made it, and which sample.

    key, 16 bytes = namespace, 8 bytes        of fingerprint and image size
                  + xxh3_64 of the sample     its number, or its own fingerprint

All records of one fingerprint and size begin with the same bytes, so that they can be
deleted together. With 64 bits for the sample, the chance that any two of ten million
share a key is 3 in a million (n^2 / 2^65); sample numbers never do.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_128_digest

from .digest import Undigestible, digest, said_fingerprint

__all__ = [
    "Fingerprint",
    "Keys",
    "file_fingerprints",
    "fingerprint",
    "url_fingerprints",
]

FORMAT = "penstock cache 1"
"""Goes up when what is digested, or how, is not what it was."""

SAMPLE = struct.Struct("<q")
FILE = struct.Struct("<qq")

STAT_THREADS = 16
CHUNK = 256
SLOW_STAT_S = 50e-6
"""On a local disk a look at a file takes 2 us, and 6 us where threads share the GIL; on
a network file system some 300 us, and almost all of it is a wait."""

PerSample = NDArray[np.uint64]
"""`uint64 [n, 2]`: 128 bits of each sample's own."""


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """What tells the samples that a cache holds from those of other data and code."""

    digest: bytes
    """16 bytes; random if the cache belongs to this run alone."""
    private_because: str | None = None
    """What makes it so: "dataset.handle (TextIOWrapper)"; None: later runs find it."""
    samples: PerSample | None = field(default=None, repr=False)
    """What tells each sample, if the data set says so; None: its number does."""


def fingerprint(
    dataset: Any,
    functions: Sequence[tuple[str, Callable[..., Any]]],
    version: str | int | None = None,
) -> Fingerprint:
    """Return the fingerprint of a data set and what is done to its samples.

    A data set with a method `sample_fingerprints() -> uint64 [n, 2]` is told by its
    class and these, so that a change of one sample leaves the others in the cache.

    Args:
        dataset: what samples come from.
        functions: those before the cache, in their order, and what to call them.
        version: the user's own; another one makes another cache.

    Raises:
        ValueError: `sample_fingerprints()` is not one row of two a sample.
    """
    said = said_fingerprint(dataset)
    samples = None
    try:
        samples = per_sample(dataset) if said is None else None
        # of what is told sample by sample the rest may change from run to run
        source = dataset if samples is None else type(dataset)
        parts = [digest(source, "dataset") if said is None else said]
        parts += [digest(function, name) for name, function in functions]
    except Undigestible as error:
        because = f"{error.path} ({error.what})"
        return Fingerprint(os.urandom(16), because, samples)
    length = length_of(dataset) if said is None and samples is None else None
    whole = [FORMAT, version, length, said is None, *parts]
    return Fingerprint(digest(whole, "cache"), None, samples)


def per_sample(dataset: Any) -> PerSample | None:
    """Return what a data set says of each sample, checked, or None."""
    asked = getattr(type(dataset), "sample_fingerprints", None)
    if asked is None:
        return None
    told = np.ascontiguousarray(asked(dataset))
    if told.dtype != np.uint64 or told.shape != (len(dataset), 2):
        raise ValueError(
            f"`sample_fingerprints()` of {type(dataset).__name__} must be uint64"
            f" [{len(dataset)}, 2], one row a sample, got {told.dtype}"
            f" {[*told.shape]}"
        )
    return told


def length_of(dataset: Any) -> int | None:
    """Return the length of a data set that has one."""
    try:
        return len(dataset)
    except (NotImplementedError, TypeError):
        return None


class Keys:
    """The keys of a fingerprint's samples. May be pickled, and shared by threads."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.digest = fingerprint.digest
        self._namespaces: dict[int | None, bytes] = {}
        # hashed once: 8 bytes a sample, and nothing left to do but look
        samples = fingerprint.samples
        rows = None if samples is None else map(bytes, samples)
        self._hashes = None if rows is None else b"".join(map(xxh3_64_digest, rows))

    def namespace(self, image_size: int | None) -> bytes:
        """Return the first 8 bytes of all keys of one image size."""
        found = self._namespaces.get(image_size)
        if found is None:
            size = b"" if image_size is None else SAMPLE.pack(image_size)
            found = self._namespaces[image_size] = xxh3_64_digest(self.digest + size)
        return found

    def of(self, index: int, image_size: int | None) -> bytes:
        """Return the 16 bytes that a sample is stored under.

        Raises:
            IndexError: the data set has no such sample.
        """
        if self._hashes is None:
            own = xxh3_64_digest(SAMPLE.pack(index))
        else:
            own = self._hashes[8 * index : 8 * index + 8] if index >= 0 else b""
        if len(own) != 8:
            held = len(self._hashes or b"") // 8
            raise IndexError(f"there are {held} samples, and none has number {index}")
        return self.namespace(image_size) + own


def file_fingerprints(
    paths: Sequence[str], *, root: str = "", labels: Sequence[Any] | None = None
) -> PerSample:
    """Return what tells each file from others, and from what it was: `uint64 [n, 2]`.

    That is xxh3_128 of its path, size, time of its last change, and label. A file that
    is not there has size -1: it fails when it is read.

    Args:
        paths: of the files.
        root: where paths count from, so that the folder may move as a whole.
        labels: what else each sample is made of: the number of a class changes when a
            class is added before it, though no file does.

    Raises:
        Undigestible: a label that has no digest.
    """
    folder = os.fsencode(os.path.join(root, "")) if root else b""
    names = (os.fsencode(path).removeprefix(folder) for path in paths)
    return hashed(map(add, states(paths), names), len(paths), labels)


def url_fingerprints(
    paths: Sequence[str], place: str, *, labels: Sequence[Any] | None = None
) -> PerSample:
    """Return what tells each object of a store from others: `uint64 [n, 2]`.

    That is xxh3_128 of `place`, which tells the store from others, its path, and label:
    an object that changes under its path is not noticed.

    Raises:
        Undigestible: a label that has no digest.
    """
    store = xxh3_128_digest(place.encode())
    return hashed((store + os.fsencode(path) for path in paths), len(paths), labels)


def hashed(
    names: Iterable[bytes], length: int, labels: Sequence[Any] | None
) -> PerSample:
    """Return xxh3_128 of names, which hold no zero byte after the 16th, and labels."""
    found = bytearray()
    ends = repeat(b"", length) if labels is None else map(spelled, labels)
    for name, end in zip(names, ends, strict=True):
        found += xxh3_128_digest(b"%b\0%b" % (name, end))
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def spelled(label: Any) -> bytes:
    """Return what tells a label: for the usual ones, at a tenth of a digest's cost."""
    if type(label) in (int, str):
        return repr(label).encode(errors="surrogatepass")
    return digest(label, "label")


def states(paths: Sequence[str]) -> list[bytes]:
    """Return size and time of change of files; by threads if each look is a wait."""
    chunks = [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)]
    start_s = time.perf_counter()
    first = look(paths[:CHUNK])
    if time.perf_counter() - start_s < SLOW_STAT_S * len(first):
        return [*first, *look(paths[CHUNK:])]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        return [*first, *chain.from_iterable(pool.map(look, chunks[1:]))]


def look(paths: Sequence[str]) -> list[bytes]:
    """Return size and time of change of files, 16 bytes each."""
    return [state(path) for path in paths]


def state(path: str) -> bytes:
    """Return them of one file."""
    try:
        status = os.stat(path)
    except OSError:
        return FILE.pack(-1, 0)
    return FILE.pack(status.st_size, status.st_mtime_ns)
