"""Which samples were in hand when a worker died, and how often. Pure.

A suspect is run again alone, so a second death tells it from those that only happened
to be in the same process. One that gets through is acquitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..chunk import Chunk

__all__ = ["LIMIT", "Blame"]

LIMIT = 5
"""How many workers a sample may take with it before it is given up."""


class Blame:
    """Suspects by address, `(step, row)`."""

    def __init__(self) -> None:
        self._deaths: dict[tuple[int, int], list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def add(self, chunk: Chunk, offsets: Iterable[int], death: str) -> None:
        """Blame these rows of a chunk for a death, told in words."""
        for offset in offsets:
            at = chunk.step, chunk.first_row + offset
            self._deaths.setdefault(at, []).append(death)

    def acquit(self, chunk: Chunk) -> None:
        """These rows are done."""
        if self._deaths:
            first, step = chunk.first_row, chunk.step
            for row in range(first, first + len(chunk)):
                self._deaths.pop((step, row), None)

    def first(self, chunk: Chunk) -> int | None:
        """Return the offset of the first suspect in a chunk."""
        if not self._deaths:
            return None
        step, first = chunk.step, chunk.first_row
        rows = range(len(chunk))
        return next((at for at in rows if (step, first + at) in self._deaths), None)

    def verdict(self, chunk: Chunk) -> str | None:
        """Return the last death of a chunk's first row, if that is to be given up."""
        deaths = self._deaths.get((chunk.step, chunk.first_row), [])
        return deaths[-1] if len(deaths) >= LIMIT else None
