"""What a record is stored under: the data and the code that made it, and which sample.

    key, 16 bytes = namespace, 8 bytes        of fingerprint and image size
                  + xxh3_64 of the sample     its number, or its own fingerprint

All records of one fingerprint and size begin with the same bytes, so that they can be
deleted together. With 64 bits for the sample, the chance that any two of ten million
share a key is 3 in a million (n^2 / 2^65); sample numbers never do.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

from .digest import Undigestible, Walk, digest, said_fingerprint

FORMAT = "penstock cache 3"
"""Goes up when what is digested, or how, is not what it was: old keys match no more."""

SAMPLE = struct.Struct("<q")
FILE = struct.Struct("<qq")

STAT_THREADS = 16
CHUNK = 256
SLOW_STAT_S = 50e-6
"""On a local disk a look at a file takes 2 us, and 6 us where threads share the GIL; on
a network file system some 300 us, and almost all of it is a wait."""

BOGUS_NS = (315_532_800 + 86_400) * 10**9
"""Times of change up to 1980, where DOS begins, are none: archives write them."""
COMMON = 0.1
"""A time of change that so many files of a data set share was given to them."""

DRAWS = re.compile(
    r"rand|shuffle|bernoulli|multinomial|uuid|secrets|\btime\b|\bnow\b", re.IGNORECASE
)
"""Names of what draws, or tells the time."""

T = TypeVar("T")
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
    draws: bool = False
    """Whether code names what may be random, as `numpy.random.rand`."""

    def namespace(self, image_size: int | None) -> bytes:
        """Return the first 8 bytes of all keys of one image size."""
        size = b"" if image_size is None else SAMPLE.pack(image_size)
        return xxh3_64_digest(self.digest + size)

    def key(self, index: int, image_size: int | None) -> bytes:
        """Return the 16 bytes that a sample is stored under.

        Raises:
            IndexError: the data set has no such sample.
        """
        if self.samples is None:
            return self.namespace(image_size) + xxh3_64_digest(SAMPLE.pack(index))
        if not 0 <= index < len(self.samples):
            held = len(self.samples)
            raise IndexError(f"there are {held} samples, and none has number {index}")
        return self.namespace(image_size) + xxh3_64_digest(self.samples[index])


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
    try:
        samples = per_sample(dataset)
        # of what is told sample by sample the rest may change from run to run
        source = dataset if samples is None else type(dataset)
        walks = [Walk(each, name) for name, each in (("dataset", source), *functions)]
        parts = [walk.digest() for walk in walks]
    except Undigestible as error:
        return Fingerprint(os.urandom(16), f"{error.path} ({error.what})")
    found = digest([FORMAT, version, *parts], "cache")
    draws = any(DRAWS.search(text) for walk in walks for text in walk.code)
    return Fingerprint(found, None, samples, draws)


def per_sample(dataset: Any) -> PerSample | None:
    """Return what a data set says of each sample, checked, or None."""
    asked = getattr(type(dataset), "sample_fingerprints", None)
    if asked is None or said_fingerprint(dataset) is not None:
        return None
    told = np.ascontiguousarray(asked(dataset))
    if told.dtype != np.uint64 or told.shape != (len(dataset), 2):
        raise ValueError(
            f"`sample_fingerprints()` of {type(dataset).__name__} must be uint64"
            f" [{len(dataset)}, 2], one row a sample, got {told.dtype}"
            f" {[*told.shape]}"
        )
    return told


def file_fingerprints(
    paths: Sequence[str], *, labels: Sequence[Any] | None = None
) -> PerSample:
    """Return what tells each file from others, and from what it was: `uint64 [n, 2]`.

    That is xxh3_128 of its real path, size, time of its last change, and label; of its
    content, too, where that time was given to it, as archives, images of containers
    and checkouts do: then a file of the same size may take its place and show nothing.
    A file that is not there has size -1: it fails when it is read.

    Args:
        paths: of the files.
        labels: what else each sample is made of: the number of a class changes when a
            class is added before it, though no file does.

    Raises:
        Undigestible: a label that has no digest.
    """
    # of folders but once; for this call alone: links may change
    looks = by_threads(partial(looked_at, cache(os.path.realpath)), paths)
    times = Counter(changed_ns for _, changed_ns in looks)
    common = max(2, COMMON * len(paths))
    found = [look for look, _ in looks]
    given = [
        at
        for at, (_, changed_ns) in enumerate(looks)
        if times[changed_ns] >= common or -1 < changed_ns <= BOGUS_NS
    ]
    contents = by_threads(content_of, [paths[at] for at in given])
    for at, content in zip(given, contents, strict=True):
        found[at] += content
    return hashed(found, labels)


def url_fingerprints(
    paths: Sequence[str], place: Any, *, labels: Sequence[Any] | None = None
) -> PerSample:
    """Return what tells each object of a store from others: `uint64 [n, 2]`.

    That is xxh3_128 of `place`, which tells the store from others, its path, and label:
    an object that changes under its path is not noticed.

    Raises:
        Undigestible: a label, or a value in `place`, that has no digest.
    """
    store = digest(place, "storage")
    return hashed([store + os.fsencode(path) for path in paths], labels)


def hashed(names: Sequence[bytes], labels: Sequence[Any] | None) -> PerSample:
    """Return xxh3_128 of names and labels."""
    found = bytearray()
    ends = [None] * len(names) if labels is None else labels
    for name, label in zip(names, ends, strict=True):
        found += xxh3_128_digest(xxh3_128_digest(name) + digest(label, "label"))
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def by_threads(look: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """Look at files; by threads if each look is a wait."""
    start_s = time.perf_counter()
    first = [look(path) for path in paths[:CHUNK]]
    rest = paths[CHUNK:]
    if time.perf_counter() - start_s < SLOW_STAT_S * len(first) or not rest:
        return [*first, *map(look, rest)]
    with ThreadPool(STAT_THREADS) as pool:
        return [*first, *pool.map(look, rest)]


def looked_at(real: Callable[[str], str], path: str) -> tuple[bytes, int]:
    """Return what tells a file, and its time of change; `real` finds real paths."""
    folder, name = os.path.split(path)
    where = os.path.join(real(folder), name)
    size = changed_ns = -1
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            where, status = os.path.realpath(where), os.stat(path)
        size, changed_ns = status.st_size, status.st_mtime_ns
    told = xxh3_128_digest(os.fsencode(where)) + FILE.pack(size, changed_ns)
    return told, changed_ns


def content_of(path: str) -> bytes:
    """Return the digest of what a file holds, 16 bytes; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, xxh3_128).digest()
    except OSError:
        return b""
