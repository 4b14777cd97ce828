"""What every source has in common that penstock reads itself.

A source is a map-style data set: it knows its length, and gives sample i, from any
thread and in any process. It opens what it reads where it reads it, so it travels to
other processes as a description. `docs/sources.md` shows how to write one.
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
    """A data set on a disk or in a store.

    It may also have:

    - `__getitems__(indices) -> list`: many samples at once, where that costs less;
    - `group_sizes`: samples of each shard or row group, in order, for
      `shuffle(window=...)`.
    """

    KIND: ClassVar[str]
    """As the log names it; `Pipeline.from_<kind>` makes it."""
    WAITS: ClassVar[bool] = True
    """Whether it waits for its storage, and so is best read by workers of its own."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples there are."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """Return a sample."""

    @property
    @abstractmethod
    def shown(self) -> tuple[object, ...]:
        """How the arguments that made it print."""

    @abstractmethod
    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return what tells each sample from others, `uint64 [n, 2]`.

        A cache keeps what was made of a sample for as long as this is the same. So it
        changes with the bytes, as far as can be told without reading them: by path,
        size and time of change, by URL and offset.
        """

    @abstractmethod
    def identity(self) -> str | None:
        """Return 32 hex digits of which data set it is; None: only its length tells.

        A state is held against it. So a copy in another place is the same.
        """


def digest(names: Sequence[str]) -> str:
    """Return the hash of names, each ended by a zero byte: 32 hex digits."""
    found = hashlib.blake2b(digest_size=16)
    for name in names:
        found.update(os.fsencode(name) + b"\0")
    return found.hexdigest()
