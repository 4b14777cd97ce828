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
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, repeat
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

from .digest import Undigestible, begun, digest, rule_of, said_fingerprint
from .walk import Walk

__all__ = [
    "Fingerprint",
    "Keys",
    "file_fingerprints",
    "fingerprint",
    "url_fingerprints",
]

FORMAT = "penstock cache 2"
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

CHANGING = frozenset(("epoch", "step", "strength"))
"""What a `ctx` has another of in a later epoch; its image size is in the key."""
DRAWS = re.compile(
    r"rand|shuffle|bernoulli|multinomial|uuid|secrets|time\.|now", re.IGNORECASE
)
"""Names of what libraries draw by, or tell the time."""

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
    reads: tuple[str, ...] = ()
    """What the functions read of `ctx` that is another in a later epoch, as `epoch`."""
    draws: tuple[str, ...] = ()
    """What they reach that may be random, as `numpy.random.rand`."""


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
    walks = [Walk(name, rule_of) for name in ("dataset", *(n for n, _ in functions))]
    samples, because, parts = None, None, [said or b""]
    try:
        samples = per_sample(dataset) if said is None else None
        # of what is told sample by sample the rest may change from run to run
        source = dataset if samples is None else type(dataset)
        if said is None:
            parts = [begun(source, walks[0])]
        for walk, (_, function) in zip(walks[1:], functions, strict=True):
            walk.in_code = True
            parts.append(begun(function, walk))
    except Undigestible as error:
        because = f"{error.path} ({error.what})"
    length = length_of(dataset) if said is None and samples is None else None
    whole = [FORMAT, version, length, said is None, *parts]
    found = os.urandom(16) if because else digest(whole, "cache")
    reads = {word for walk in walks[1:] for word in read_of_ctx(walk)}
    draws = {name for walk in walks for name in walk.libraries if DRAWS.search(name)}
    return Fingerprint(found, because, samples, (*sorted(reads),), (*sorted(draws),))


def read_of_ctx(walk: Walk) -> frozenset[str]:
    """Return what of a `ctx` changes and is read; where it is passed on, perhaps."""
    return CHANGING & (walk.ctx | (walk.words if "" in walk.ctx else set()))


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
    found = by_threads(state, paths)
    times = Counter(each[8:16] for each in found)
    common = max(2, COMMON * len(paths))
    given = [
        at
        for at, each in enumerate(found)
        if times[each[8:16]] >= common or -1 < FILE.unpack(each[:16])[1] <= BOGUS_NS
    ]
    contents = by_threads(content_of, [paths[at] for at in given])
    for at, content in zip(given, contents, strict=True):
        found[at] += content
    folders = cache(os.path.realpath)  # but for this once: links may change
    parts = ((folders(folder), name) for folder, name in map(os.path.split, paths))
    names = (xxh3_128_digest(os.fsencode(os.path.join(*each))) for each in parts)
    return hashed(map(add, names, found), len(paths), labels)


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
    return hashed((store + os.fsencode(path) for path in paths), len(paths), labels)


def hashed(
    names: Iterable[bytes], length: int, labels: Sequence[Any] | None
) -> PerSample:
    """Return xxh3_128 of names and labels."""
    found = bytearray()
    ends = repeat(b"", length) if labels is None else map(spelled, labels)
    for name, end in zip(names, ends, strict=True):
        found += xxh3_128_digest(xxh3_128_digest(name) + end)
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def spelled(label: Any) -> bytes:
    """Return what tells a label: for the usual ones, at a tenth of a digest's cost."""
    if type(label) in (int, str):
        return repr(label).encode(errors="surrogatepass")
    return digest(label, "label")


def by_threads(look: Callable[[str], bytes], paths: Sequence[str]) -> list[bytes]:
    """Look at files; by threads if each look is a wait."""

    def several(chunk: Sequence[str]) -> list[bytes]:
        return [look(path) for path in chunk]

    chunks = [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)]
    start_s = time.perf_counter()
    first = several(paths[:CHUNK])
    if time.perf_counter() - start_s < SLOW_STAT_S * len(first):
        return [*first, *several(paths[CHUNK:])]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        return [*first, *chain.from_iterable(pool.map(several, chunks[1:]))]


def state(path: str) -> bytes:
    """Return a file's size and time of change, 16 bytes, and where a link leads."""
    try:
        status = os.stat(path)
        leads_to = os.path.realpath(path) if os.path.islink(path) else ""
    except OSError:
        return FILE.pack(-1, -1)
    return FILE.pack(status.st_size, status.st_mtime_ns) + os.fsencode(leads_to)


def content_of(path: str) -> bytes:
    """Return the digest of what a file holds, 16 bytes; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, xxh3_128).digest()
    except OSError:
        return b""
