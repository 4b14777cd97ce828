"""The common interface of all sources that penstock reads itself.

A source is a map-style dataset: it knows its length, and returns sample i in any
thread and process. It opens files in the process that reads them, so only a description
of it is sent to other processes. `docs/sources.md` shows how to write one.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray


class Source(ABC):
    """A dataset on a disk or in a store.

    It waits for its storage, so it is best read by workers of its own. It may also
    have:

    - `__getitems__(indices) -> list`: many samples at once, if that costs less;
    - `group_sizes`: samples of each shard or row group, in order, for
      `shuffle(window=...)`.
    """

    KIND: str
    """The name of the source in the log; `Pipeline.from_<kind>` makes the source."""
    MAPPED: ClassVar[bool] = False
    """Whether it reads a memory map: it only waits for pages that are not in memory. If
    nothing else is done to its samples, it starts in the trainer, as any dataset does,
    and gets workers where they pay."""
    PER_PROCESS: ClassVar[bool] = True
    """Whether all that changes in it is what each process opens or keeps for itself, so
    that no process makes other samples than another."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples there are."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """Return a sample."""

    @property
    @abstractmethod
    def shown(self) -> tuple[object, ...]:
        """The arguments of this source as code."""

    @abstractmethod
    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each sample, `uint64 [n, 2]`.

        A cache keeps the result for a sample as long as this is the same. So the
        fingerprint has to change with the bytes, as far as that shows without reading
        them: by path, size and time of change, or by URL and offset.
        """

    @abstractmethod
    def identity(self) -> str | None:
        """Return 32 hex digits that identify the dataset; None: only its length does.

        A state is checked against it, so a copy in another place has the same identity.
        """


def digest(names: Sequence[str]) -> str:
    """Return the hash of names, each ended by a zero byte: 32 hex digits."""
    found = hashlib.blake2b(digest_size=16)
    for name in names:
        found.update(os.fsencode(name) + b"\0")
    return found.hexdigest()


def prints_of_rows(
    files: NDArray[np.uint64], sizes: NDArray[np.int64], salt: str
) -> NDArray[np.uint64]:
    """Return the fingerprints of the rows of some files, `uint64 [n, 2]`.

    Args:
        files: fingerprint of each file, `[f, 2]`.
        sizes: number of rows of each file, `[f]`; n in total.
        salt: 32 hex digits that identify what is read of all rows.
    """
    salts = np.frombuffer(bytes.fromhex(salt), np.uint64).reshape(1, 2)
    starts = np.cumsum(sizes) - sizes
    rows = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
    found = np.repeat(files ^ salts, sizes, axis=0)
    # An odd factor maps each row to a different number; the sums in a file differ, too.
    found[:, 0] += rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return found
