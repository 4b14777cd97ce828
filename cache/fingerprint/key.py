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
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

from .digest import Undigestible, Walk, digest, said_fingerprint

FORMAT = "penstock cache 4"
"""Goes up when what is digested, or how, is not what it was: old keys match no more."""
SAMPLE = struct.Struct("<q")
STAT_THREADS = 16
CHUNK = 256
SLOW_STAT_S = 50e-6
"""A look takes 2 us on a local disk and 6 us by threads, but 300 us over a network."""
BOGUS_NS = (315_532_800 + 86_400) * 10**9
"""Times of change up to 1980, where DOS begins, are none: archives write them."""
COMMON = 0.1
"""A time of change that so many files of a data set share was given to them."""

DRAWS = re.compile(r"(?i)rand|shuffle|bernoulli|multinomial|uuid|secret|\b(time|now)\b")
"""Names of what draws, or tells the time."""
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
        rows = self.samples
        if rows is not None and not 0 <= index < len(rows):
            raise IndexError(f"there are {len(rows)} samples, none has number {index}")
        own = SAMPLE.pack(index) if rows is None else rows[index]
        return self.namespace(image_size) + xxh3_64_digest(own)


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
    draws = any(DRAWS.search(text) for walk in walks for text in walk.code)
    found = digest([FORMAT, version, *parts], "cache")
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
            f" [{len(dataset)}, 2], one row a sample, got {told.dtype} {[*told.shape]}"
        )
    return told


def file_fingerprints(
    paths: Sequence[str], *, labels: Sequence[Any] | None = None, store: Any = None
) -> PerSample:
    """Return what tells each file from others, and from what it was: `uint64 [n, 2]`.

    That is xxh3_128 of its real path, size, time of its last change, and label; of its
    content, too, where that time was given to it, as archives, images of containers
    and checkouts do: then a file of the same size may take its place and show nothing.
    In a store it is of store, path and label: what changes under them is not noticed.

    Args:
        paths: of the files.
        labels: what else each sample is made of: the number of a class changes when a
            class is added before it, though no file does.
        store: what tells the store of the files from others; None: they are here.

    Raises:
        Undigestible: a label, or a value in `store`, that has no digest.
    """
    place = None if store is None else digest(store, "storage")
    told = looks(paths) if place is None else [(place, path) for path in paths]
    ends = [None] * len(paths) if labels is None else labels
    found = bytearray()
    for each, label in zip(told, ends, strict=True):
        found += xxh3_128_digest(repr(each).encode() + digest(label, "label"))
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def looks(paths: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return each file's real path, size, time, and content if that time was given."""
    # of folders but once; for this call alone: links may change
    found = by_threads(partial(looked_at, cache(os.path.realpath)), paths)
    times = Counter(changed_ns for *_, changed_ns in found)
    common = max(2, COMMON * len(paths))
    stamps = {each for each in times if times[each] >= common or -1 < each <= BOGUS_NS}
    given = [
        path for path, look in zip(paths, found, strict=True) if look[-1] in stamps
    ]
    contents = dict(zip(given, by_threads(content_of, given), strict=True))
    return [
        (*look, contents.get(path)) for path, look in zip(paths, found, strict=True)
    ]


def by_threads(look: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
    """Look at files; by threads if each look is a wait."""
    start_s = time.perf_counter()
    first = [look(path) for path in paths[:CHUNK]]
    rest = paths[CHUNK:]
    if time.perf_counter() - start_s < SLOW_STAT_S * len(first) or not rest:
        return [*first, *map(look, rest)]
    with ThreadPool(STAT_THREADS) as pool:
        return [*first, *pool.map(look, rest)]


def looked_at(real: Callable[[str], str], path: str) -> tuple[str, int, int]:
    """Return a file's real path, size and time of change: -1 if it is not there."""
    folder, name = os.path.split(path)
    where = os.path.join(real(folder), name)
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            where, status = os.path.realpath(where), os.stat(path)
        return where, status.st_size, status.st_mtime_ns
    return where, -1, -1


def content_of(path: str) -> bytes | None:
    """Return the digest of what a file holds; None if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, xxh3_128).digest()
    return None
