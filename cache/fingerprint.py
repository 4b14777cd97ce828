"""What a record is stored under: the data and the code that made it, and the sample.

    key, 16 bytes = namespace, 8 bytes        of fingerprint and image size
                  + xxh3_64 of the sample     its index, or its own fingerprint

All records of one fingerprint and size begin with the same bytes, so that they can be
deleted together. With 64 bits for the sample, the chance that any two of ten million
share a key is 3 in a million (n^2 / 2^65); indices never do. The README of `cache`
says what identifies data and code.
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
"""Increased whenever the digest changes in content or method: old keys then miss."""
SAMPLE = struct.Struct("<q")
STAT_THREADS = 16
CHUNK = 256
SLOW_STAT_S = 50e-6
"""A `stat` takes 2 us on a local disk (6 us by threads), but 300 us over a network."""
BOGUS_NS = (315_532_800 + 86_400) * 10**9
"""Modification times up to 1 January 1980, where DOS time begins, mean nothing:
archives set them."""
COMMON = 0.1
"""A modification time that this share of a dataset's files have was assigned."""

DRAWS = re.compile(r"(?i)rand|shuffle|bernoulli|multinomial|uuid|secret|\b(time|now)\b")
"""Names of functions that draw random values, or tell the time."""
PerSample = NDArray[np.uint64]
"""`uint64 [n, 2]`: 128 bits for each sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """Distinguishes the samples of a cache from those of other data and code."""

    digest: bytes
    """16 bytes; random if the cache is private to this run."""
    private_because: str | None = None
    """The reason why it is private, such as "dataset.handle (TextIOWrapper)"; None if
    later runs can find it."""
    samples: PerSample | None = field(default=None, repr=False)
    """Identity of each sample, if the dataset provides it; None: its index counts."""
    draws: bool = False
    """Whether code names something that may be random, such as `numpy.random.rand`."""

    def namespace(self, image_size: int | None) -> bytes:
        """Return the first 8 bytes of all keys for one image size."""
        size = b"" if image_size is None else SAMPLE.pack(image_size)
        return xxh3_64_digest(self.digest + size)

    def key(self, index: int, image_size: int | None) -> bytes:
        """Return the 16 bytes that a sample is stored under.

        Raises:
            IndexError: the dataset has no such sample.
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
    """Return the fingerprint of a dataset and of the functions applied to it.

    A dataset with a method `sample_fingerprints() -> uint64 [n, 2]` is identified by
    its class and that array, so changing one sample leaves the others in the cache.

    Args:
        dataset: the source of the samples.
        functions: the functions before the cache, in order, with names for errors.
        version: the user's own version; changing it starts a new cache.

    Raises:
        ValueError: `sample_fingerprints()` does not return two numbers per sample.
        TypeError: an identity that one of them declares is neither a str nor bytes.
    """
    try:
        samples = per_sample(dataset)
        # The rest of a dataset that identifies its samples may change between runs.
        source = dataset if samples is None else type(dataset)
        walks = [Walk(each, name) for name, each in (("dataset", source), *functions)]
        parts = [walk.digest() for walk in walks]
    except Undigestible as error:
        return Fingerprint(os.urandom(16), f"{error.path} ({error.what})")
    draws = any(DRAWS.search(text) for walk in walks for text in walk.code)
    found = digest([FORMAT, version, *parts], "cache")
    return Fingerprint(found, None, samples, draws)


def per_sample(dataset: Any) -> PerSample | None:
    """Return the validated fingerprints that a dataset provides, or None.

    Raises:
        ValueError: they are not two numbers per sample.
        TypeError: the identity that the dataset declares is neither a str nor bytes.
    """
    asked = getattr(type(dataset), "sample_fingerprints", None)
    if asked is None or said_fingerprint(dataset) is not None:
        return None
    told = np.ascontiguousarray(asked(dataset))
    if told.dtype != np.uint64 or told.shape != (len(dataset), 2):
        raise ValueError(
            f"`sample_fingerprints()` of {type(dataset).__name__} must be uint64"
            f" [{len(dataset)}, 2], a row per sample, got {told.dtype} {[*told.shape]}"
        )
    return told


def file_fingerprints(
    paths: Sequence[str], *, labels: Sequence[Any] | None = None, store: Any = None
) -> PerSample:
    """Return the identity of each file and its content: `uint64 [n, 2]`.

    This is xxh3_128 of its real path, size, modification time and label. Archives,
    container images and checkouts assign modification times, and another file of the
    same size could then take its place unnoticed. So the content of such a file counts,
    too. Of a file in a store, only store, path and label count: a change to it goes
    unnoticed.

    Args:
        paths: the files' paths.
        labels: what else each sample is made of. The number of a class changes when a
            class is added before it, although no file does.
        store: what identifies the store of the files; None for local files.

    Raises:
        Undigestible: a label, or a value in `store`, has no digest.
    """
    place = None if store is None else digest(store, "storage")
    told = looks(paths) if place is None else [(place, path) for path in paths]
    ends = [None] * len(paths) if labels is None else labels
    found = bytearray()
    for each, label in zip(told, ends, strict=True):
        found += xxh3_128_digest(repr(each).encode() + digest(label, "label"))
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def looks(paths: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return each file's real path, size (bytes), modification time (ns), and content.

    The content is a digest, or None if the time was not assigned.
    """
    # Each folder is resolved once, for this call alone: links may change.
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
    """Return what `look` returns for each path, using threads if each look is slow."""
    start_s = time.perf_counter()
    first = [look(path) for path in paths[:CHUNK]]
    rest = paths[CHUNK:]
    if time.perf_counter() - start_s < SLOW_STAT_S * len(first) or not rest:
        return [*first, *map(look, rest)]
    with ThreadPool(STAT_THREADS) as pool:
        return [*first, *pool.map(look, rest)]


def looked_at(real: Callable[[str], str], path: str) -> tuple[str, int, int]:
    """Return a file's real path, size and modification time (ns); -1 if it is gone."""
    folder, name = os.path.split(path)
    where = os.path.join(real(folder), name)
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            where, status = os.path.realpath(where), os.stat(path)
        return where, status.st_size, status.st_mtime_ns
    return where, -1, -1


def content_of(path: str) -> bytes | None:
    """Return the digest of a file's content; None if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, xxh3_128).digest()
    return None
