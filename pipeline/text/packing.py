"""Which part of which document stands in which block, planned from lengths alone.

A plan holds a few numbers a document and tells the pieces of any block at once, so
blocks may be asked for in any order, by any worker.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .sample import Ids


class Pieces(NamedTuple):
    """Parts of documents, one behind the other: `int64 [k]` each."""

    documents: Ids
    """Numbers in the dataset."""
    starts: Ids
    """The first token of each part, counted within its document."""
    lengths: Ids
    """Tokens, > 0."""


class PackingPlan(Protocol):
    """Says what blocks are made of."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def pieces(self, block: int) -> Pieces:
        """Return what a block, 0 to len - 1, is made of."""
        ...


class Concatenated:
    """All documents in one line, cut every `size` tokens; only the last block is short.

    A block is found by binary search: O(log n) and what it is made of.

    Args:
        lengths: tokens of each document, `int64 [n]`, >= 0.
        size: tokens of a block.
    """

    def __init__(self, lengths: Ids, size: int) -> None:
        self._ends = np.cumsum(lengths)
        self._size = size
        self._blocks = -(-int(self._ends[-1]) // size)

    def __len__(self) -> int:
        return self._blocks

    def pieces(self, block: int) -> Pieces:
        first = block * self._size
        stop = min(first + self._size, int(self._ends[-1]))
        low, high = np.searchsorted(self._ends, (first, stop - 1), side="right")
        ends = self._ends[low : high + 1]
        begins = np.concatenate(([self._ends[low - 1] if low else 0], ends[:-1]))
        inside = np.maximum(begins, first)
        lengths = np.minimum(ends, stop) - inside
        held = lengths > 0  # others are empty documents
        documents = np.arange(low, high + 1)
        return Pieces(documents[held], (inside - begins)[held], lengths[held])


class BestFit:
    """Whole documents, put where least room is left over; longer ones are cut before.

    Best-fit decreasing: from the longest piece to the shortest, each goes into the
    block with the least room that it fits into, or into a new one. Source: Ding et al.
    2024, "Fewer Truncations Improve Language Modeling"; that it takes no more than 11/9
    of the fewest blocks possible, and four, Johnson et al. 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms".

    Args:
        lengths: tokens of each document, `int64 [n]`, >= 0.
        size: tokens of a block. Documents are cut after each `size` tokens.
    """

    def __init__(self, lengths: Ids, size: int) -> None:
        counts = -(-lengths // size)
        documents = np.repeat(np.arange(len(lengths)), counts)
        firsts = np.cumsum(counts) - counts
        starts = (np.arange(len(documents)) - np.repeat(firsts, counts)) * size
        parts = np.minimum(lengths[documents] - starts, size)
        blocks = best_fit(parts, size)
        order = np.argsort(blocks, kind="stable")
        self._pieces = Pieces(documents[order], starts[order], parts[order])
        self._ends = np.cumsum(np.bincount(blocks))

    def __len__(self) -> int:
        return len(self._ends)

    def pieces(self, block: int) -> Pieces:
        held = slice(self._ends[block - 1] if block else 0, self._ends[block])
        return Pieces(*(each[held] for each in self._pieces))


def best_fit(lengths: Ids, size: int) -> NDArray[np.int64]:
    """Return the block that each piece goes into, by best-fit decreasing.

    Blocks with the same room are interchangeable, and so are pieces of one length. The
    best fit for a piece of length w is a block with the least room r >= w; it stays the
    best until it has taken r // w of them, as its room shrinks but stays the least. So
    all blocks of one room are filled with pieces of one length in one step.

    Cost: sorting n pieces, and steps in Python, at most min(n, d^2) of them where there
    are d <= `size` lengths. A step either fills a group of blocks, or uses up a length,
    which leaves two groups more at most.

    Args:
        lengths: of the pieces, `int64 [n]`, 1 to `size`.
        size: of a block.

    Returns:
        `int64 [n]`; blocks are numbered as they are opened.
    """
    found = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    widths, counts = np.unique(lengths, return_counts=True)
    rooms = Rooms(size)
    begin = 0
    for width, count in zip(widths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces = order[begin : begin + count]
        begin += count
        while len(pieces):
            placed = rooms.fill(width, len(pieces))
            found[pieces[: len(placed)]] = placed
            pieces = pieces[len(placed) :]
    return found


class Rooms:
    """Blocks by the room that is left in them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._opened = 0
        self._blocks: dict[int, list[NDArray[np.int64]]] = {}
        self._sorted: list[int] = []
        """Rooms that blocks have, in order."""

    def fill(self, width: int, count: int) -> NDArray[np.int64]:
        """Place pieces of one width in blocks of one room; return these, one a piece.

        Args:
            width: of each piece, 1 to `size`.
            count: of pieces, at least 1; some may be left over.
        """
        at = bisect_left(self._sorted, width)
        is_new = at == len(self._sorted)
        room = self._size if is_new else self._sorted[at]
        each = room // width
        needed = -(-count // each)
        blocks = self._open(needed) if is_new else self._take(room, needed)
        placed = min(count, each * len(blocks))
        full, rest = divmod(placed, each)
        self._put(room - each * width, blocks[:full])
        self._put(room - rest * width, blocks[full:])
        return np.repeat(blocks, each)[:placed]

    def _open(self, count: int) -> NDArray[np.int64]:
        self._opened += count
        return np.arange(self._opened - count, self._opened)

    def _take(self, room: int, most: int) -> NDArray[np.int64]:
        """Return at most so many blocks of a room, all from one group."""
        groups = self._blocks[room]
        blocks, left = groups[-1][:most], groups[-1][most:]
        if len(left):
            groups[-1] = left
            return blocks
        groups.pop()
        if not groups:
            del self._blocks[room]
            self._sorted.remove(room)
        return blocks

    def _put(self, room: int, blocks: NDArray[np.int64]) -> None:
        if not room or not len(blocks):
            return
        if room not in self._blocks:
            self._blocks[room] = []
            insort(self._sorted, room)
        self._blocks[room].append(blocks)
