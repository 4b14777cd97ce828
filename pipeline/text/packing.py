"""Which part of which document goes into which block, planned from lengths alone.

A plan holds a few numbers per document. It can list the pieces of any block directly,
so blocks may be read in any order, by any worker.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .sample import Ids


class Pieces(NamedTuple):
    """Parts of documents, one after another: three arrays `int64 [k]`."""

    documents: Ids
    """Index of each document in the dataset."""
    starts: Ids
    """Index of each part's first token in its document."""
    lengths: Ids
    """Tokens in each part, > 0."""


class Concatenated:
    """All documents in a row, cut every `size` tokens; only the last block is short.

    A block is found by binary search, in O(log n + number of its pieces).

    Args:
        lengths: tokens in each document, `int64 [n]`, >= 0.
        size: tokens in a block.
    """

    def __init__(self, lengths: Ids, size: int) -> None:
        self._ends = np.cumsum(lengths)
        self._size = size
        self._blocks = -(-int(self._ends[-1]) // size)

    def __len__(self) -> int:
        return self._blocks

    def pieces(self, block: int) -> Pieces:
        """Return the pieces of a block, 0 to len - 1."""
        first = block * self._size
        stop = min(first + self._size, int(self._ends[-1]))
        low, high = np.searchsorted(self._ends, (first, stop - 1), side="right")
        ends = self._ends[low : high + 1]
        begins = np.concatenate(([self._ends[low - 1] if low else 0], ends[:-1]))
        inside = np.maximum(begins, first)
        lengths = np.minimum(ends, stop) - inside
        held = lengths > 0  # the others are empty documents
        documents = np.arange(low, high + 1)
        return Pieces(documents[held], (inside - begins)[held], lengths[held])


class BestFit:
    """Whole documents, packed tightly; those longer than a block are cut first.

    This is best-fit decreasing: from the longest piece to the shortest, each goes into
    the fullest block that still has room for it, or into a new one. Source: Ding et al.
    2024, "Fewer Truncations Improve Language Modeling". It needs at most 11/9 of the
    fewest blocks possible, plus four (Johnson et al. 1974, "Worst-case performance
    bounds for simple one-dimensional packing algorithms").

    Args:
        lengths: tokens in each document, `int64 [n]`, >= 0.
        size: tokens in a block. Documents are cut after every `size` tokens.
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
        """Return the pieces of a block, 0 to len - 1."""
        held = slice(self._ends[block - 1] if block else 0, self._ends[block])
        return Pieces(*(each[held] for each in self._pieces))


def best_fit(lengths: Ids, size: int) -> NDArray[np.int64]:
    """Return the block that each piece goes into, by best-fit decreasing.

    Blocks with the same room are interchangeable, and so are pieces of the same length.
    The best fit for a piece of length w is a block with the least room r >= w. As its
    room shrinks, it remains the block with the least room, so it stays the best fit
    until it has taken r // w such pieces. All blocks with the same room can therefore
    be filled with pieces of the same length in one step.

    Cost: sorting n pieces, and at most min(n, d^2) steps in Python if there are d <=
    `size` different lengths. A step either fills up a group of blocks, or uses up a
    length, which adds at most two groups.

    Args:
        lengths: tokens in each piece, `int64 [n]`, 1 to `size`.
        size: tokens in a block.

    Returns:
        `int64 [n]`; blocks are numbered in the order in which they are opened.
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
    """Blocks, grouped by the room left in them, in tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._opened = 0
        self._blocks: dict[int, list[NDArray[np.int64]]] = {}
        self._sorted: list[int] = []
        """The rooms for which there are blocks, in ascending order."""

    def fill(self, width: int, count: int) -> NDArray[np.int64]:
        """Place pieces of one width in blocks with the same room.

        Args:
            width: tokens in each piece, 1 to `size`.
            count: number of pieces, at least 1.

        Returns:
            The block of each placed piece, `int64 [m]`, 1 <= m <= `count`. The other
            pieces remain to be placed.
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
        """Remove and return at most `most` blocks with this room, from one group."""
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
