"""The rows of a chunk while they are worked on: samples, failures, who watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .chunk import Chunk, Failure
from .randomness import SampleRandom

__all__ = ["Sink", "Watch", "Work"]


class Sink(Protocol):
    """Takes the rows of a batch."""

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        """Put one sample into each of `rows`; return the bytes they take."""
        ...


class Watch(Protocol):
    """Is told of each sample as it is taken in hand."""

    def each(self, items: Iterable[Any], rows: Sequence[int]) -> Iterator[Any]:
        """Hand `items` through, noting the row each belongs to as it is taken."""
        ...


@dataclass(slots=True)
class Work:
    """The rows of a chunk on their way through a program."""

    chunk: Chunk
    random: SampleRandom
    samples: list[Any]
    offsets: list[int] | None = None
    """Which rows of the chunk `samples` are for; None: all."""
    failures: list[Failure] | None = None
    dropped: int = 0
    ended: bool = False
    watch: Watch | None = None

    def watched(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return `items`, one a sample, watched as they are taken."""
        if self.watch is None:
            return items
        return self.watch.each(items, self.offsets or range(len(self.chunk)))

    def rows(self) -> Sequence[int]:
        """Return the row of the batch each sample belongs to."""
        first = self.chunk.first_row
        if self.offsets is None:
            return range(first, first + len(self.chunk))
        return [first + offset for offset in self.offsets]

    def keep(self, samples: list[Any], kept: Iterable[bool]) -> None:
        """Go on with those of `samples` that are `kept`."""
        flags = list(kept)
        if all(flags):
            self.samples = samples
            return
        before: Sequence[int] = self.offsets or range(len(flags))
        self.offsets = [at for at, flag in zip(before, flags, strict=True) if flag]
        self.samples = [s for s, flag in zip(samples, flags, strict=True) if flag]

    def take(self, results: list[Any], failed: set[int]) -> None:
        """Go on with `results`, but for those that failed."""
        if failed:
            self.keep(results, (at not in failed for at in range(len(results))))
        else:
            self.samples = results

    def fail(self, at: int, error: BaseException, stage: str) -> None:
        """Note that the sample `at` (counted within `samples`) raised."""
        offset = at if self.offsets is None else self.offsets[at]
        stage = getattr(error, "penstock_stage", stage)  # of several that are one
        failure = Failure(
            error, stage, int(self.chunk.indices[offset]), self.chunk.first_row + offset
        )
        self.failures = [*(self.failures or ()), failure]

    def fail_all(self, error: BaseException, stage: str) -> None:
        """Note that none of the rows could be begun."""
        self.samples, self.offsets = [], None
        for at in range(len(self.chunk)):
            self.fail(at, error, stage)
        self.offsets = []
