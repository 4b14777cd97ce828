"""Documents packed into blocks of one size: a dataset made from a dataset.

Which part of which document goes into which block is planned from the lengths alone. A
plan holds a few numbers per piece. It can list the pieces of any block directly, so
blocks may be read in any order, by any worker.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import SampleError, SpecError, check, whole_number
from .tokens import FROM_ZERO, IDS, MASK, Ids, ids_in, row

# Documents read at a time to measure their lengths.
MEASURED = 1024


class PackedBlocks:
    """Blocks of `size` tokens, packed from documents: a map-style dataset.

    The contents of block i depend on the lengths alone. Blocks may therefore be read in
    any order, by any worker, and a saved state resumes exactly. A sample is a dict of
    arrays `int64 [size]`:

    - `input_ids`: the tokens. Each document ends with `eos_id`, if one is given.
    - `document_ids`: 0, 1, ... for the documents of the block, in order; -1 for
      padding. Tokens may attend to tokens with the same number.
    - `position_ids`: 0, 1, ... within each document's part of the block; 0 for padding.
    - `attention_mask`: 1 for tokens, 0 for padding.

    No token is lost or repeated. A block reads each of its documents completely, even
    if it holds only a part. A document that spans several blocks is read once for each.

    Args:
        documents: a map-style dataset of token ids: lists, arrays or tensors `[n]`, or
            dicts with these as `input_ids`. If it has `__getitems__`, all documents
            that are needed are requested in one call.
        lengths: tokens of each document, without eos. None: read each document once
            now, which takes as long as an epoch.
        size: tokens in a block.
        eos_id: id appended to each document; None: append nothing.
        split: True: documents follow one another in their order, and are cut at the end
            of a block; only the last block has padding. False: a document that fits
            into a block stays whole; longer ones are cut every `size` tokens. The
            pieces are placed by best-fit decreasing (Ding et al. 2024), longest first,
            so the blocks should be shuffled.
        pad_id: id of padding.

    Raises:
        SpecError: an argument is out of range, there is not one length per document, or
            the documents have no tokens.
        SampleError: a document to be measured is not a sequence of ids.
    """

    def __init__(
        self,
        documents: Any,
        lengths: Any = None,
        *,
        size: int,
        eos_id: int | None = None,
        split: bool = True,
        pad_id: int = 0,
    ) -> None:
        self.documents, self.split = documents, split
        self.size = whole_number("size", size, 1, "2048 is usual")
        self.eos_id, self.pad_id = eos_id, pad_id
        whole_number("pad_id", pad_id, 0, FROM_ZERO)
        if eos_id is not None:
            whole_number("eos_id", eos_id, 0, FROM_ZERO)
        if lengths is None:
            lengths = measured_lengths(documents)
        self.lengths = checked_lengths(lengths, len(documents))
        whole = self.lengths + (eos_id is not None)
        check(
            whole.any(),
            f"the {len(whole)} documents have no tokens, so there are no blocks;"
            " look at the code that makes the documents",
        )
        self._plan = (Concatenated if split else best_fitting)(whole, self.size)

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, block: int) -> dict[str, Ids]:
        return self.__getitems__([block])[0]

    def __getitems__(self, blocks: Sequence[int]) -> list[dict[str, Ids]]:
        """Return several blocks; each document that they need is read once.

        Raises:
            IndexError: there is no such block.
            SampleError: a document is not a sequence of ids, or not as long as
                `lengths` says.
        """
        groups = [self._plan.pieces(self._checked(block)) for block in blocks]
        numbers = sorted(set(chain.from_iterable(p.documents.tolist() for p in groups)))
        documents = zip(numbers, read(self.documents, numbers), strict=True)
        tokens = {
            number: self._tokens(number, document) for number, document in documents
        }
        return [self._made(pieces, tokens) for pieces in groups]

    def _checked(self, block: int) -> int:
        try:
            return range(len(self))[block]
        except IndexError:
            raise IndexError(
                f"block {block} is out of range; there are {len(self)} blocks"
            ) from None

    def _tokens(self, number: int, document: Any) -> Ids:
        """Return a document's tokens, eos included."""
        ids = tokens_of(document)
        if len(ids) != self.lengths[number]:
            raise SampleError(
                f"document {number} has {len(ids)} tokens, but `lengths` says "
                f"{self.lengths[number]}, by which blocks are planned; measure the"
                " lengths again, or leave `lengths` out"
            )
        return ids if self.eos_id is None else np.append(ids, self.eos_id)

    def _made(self, pieces: Pieces, tokens: Mapping[int, Ids]) -> dict[str, Ids]:
        """Return the block made of these pieces."""
        lengths = pieces.lengths
        total, count = int(lengths.sum()), len(lengths)
        block = {
            IDS: np.full(self.size, self.pad_id, np.int64),
            "document_ids": np.full(self.size, -1, np.int64),
            "position_ids": np.zeros(self.size, np.int64),
            MASK: np.zeros(self.size, np.int64),
        }
        parts = zip(*(array.tolist() for array in pieces), strict=True)
        ids = [tokens[number][at : at + length] for number, at, length in parts]
        firsts = np.cumsum(lengths) - lengths
        block[IDS][:total] = np.concatenate(ids)
        block["document_ids"][:total] = np.repeat(np.arange(count), lengths)
        block["position_ids"][:total] = np.arange(total) - np.repeat(firsts, lengths)
        block[MASK][:total] = 1
        return block

    def __penstock_fingerprint__(self) -> bytes | None:
        """Return an identity of these blocks, if the documents have one themselves.

        None: they have none, and the caller must fingerprint the contents instead.
        """
        from ...cache.fingerprint import digest, said_fingerprint

        fingerprint = said_fingerprint(self.documents)
        if fingerprint is None:
            return None
        how = (self.size, self.eos_id, bool(self.split), self.pad_id)
        # The number goes up when a release makes other blocks of the same documents.
        return digest(
            ("penstock.text.PackedBlocks 1", fingerprint, how, self.lengths), "blocks"
        )

    def __repr__(self) -> str:
        return (
            f"<PackedBlocks: {len(self)} of {self.size} tokens, of "
            f"{len(self.lengths)} documents ({type(self.documents).__name__})>"
        )


def tokens_of(document: Any) -> Ids:
    """Return the ids of a document, `int64 [n]`: itself, or its `input_ids`.

    Raises:
        SampleError: it is not a sequence of ids.
    """
    return row(ids_in(document) if isinstance(document, Mapping) else document, IDS)


def read(documents: Any, numbers: list[int]) -> Sequence[Any]:
    """Return several documents of a dataset, in one call if it has `__getitems__`.

    Raises:
        SampleError: the call returned more or fewer documents than requested.
    """
    many = getattr(documents, "__getitems__", None)
    if many is None:
        return [documents[number] for number in numbers]
    items = list(many(numbers))
    if len(items) != len(numbers):
        raise SampleError(
            f"`__getitems__` of {type(documents).__name__} got {len(numbers)} indices"
            f" and returned {len(items)} documents; it must return one for each index"
        )
    return items


def measured_lengths(documents: Any) -> Ids:
    """Return the lengths of all documents, `int64 [count]`, by reading them all.

    Raises:
        SampleError: a document is not a sequence of ids.
    """
    numbers = range(len(documents))
    parts = (numbers[at : at + MEASURED] for at in numbers[::MEASURED])
    stream = chain.from_iterable(read(documents, [*part]) for part in parts)
    return np.fromiter((len(tokens_of(document)) for document in stream), np.int64)


def checked_lengths(lengths: Any, count: int) -> Ids:
    """Return a copy of the documents' lengths as `int64 [count]`.

    Raises:
        SpecError: they are not integers >= 0, one per document.
    """
    array = np.asarray(lengths)
    check(
        array.shape == (count,) and (array.dtype.kind in "iu" or not count),
        f"`lengths` must be integers [{count}], one per document, got {array.dtype} "
        f"{[*array.shape]}; leave it out to have the documents measured",
    )
    negative = np.flatnonzero(array < 0).tolist()
    if negative:
        raise SpecError(
            f"`lengths` must be >= 0, got {array[negative[0]]} for document "
            f"{negative[0]}; count the tokens of each document"
        )
    return array.astype(np.int64)


# The plan of the blocks.


class Pieces(NamedTuple):
    """Parts of documents, one after another: three arrays `int64 [k]`."""

    documents: Ids
    """Index of each document in the dataset."""
    starts: Ids
    """Index of each part's first token in its document."""
    lengths: Ids
    """Tokens in each part, > 0."""


class Blocks:
    """The pieces of all blocks, block by block.

    Args:
        pieces: parts of documents, in any order of their blocks.
        blocks: the block of each piece, `int64 [k]`; none is empty.
    """

    def __init__(self, pieces: Pieces, blocks: Ids) -> None:
        order = np.argsort(blocks, kind="stable")
        self._pieces = Pieces(*(array[order] for array in pieces))
        self._ends = np.cumsum(np.bincount(blocks))

    def __len__(self) -> int:
        return len(self._ends)

    def pieces(self, block: int) -> Pieces:
        """Return the pieces of a block, 0 to len - 1."""
        span = slice(self._ends[block - 1] if block else 0, self._ends[block])
        return Pieces(*(array[span] for array in self._pieces))


class Concatenated:
    """All documents in a row, cut every `size` tokens; only the last block is short.

    A block is found by binary search, in O(log n + number of its pieces): a plan of all
    pieces would take five times as long to make, and twice the memory.

    Args:
        lengths: tokens in each document, `int64 [n]`, >= 0.
        size: tokens in a block.
    """

    def __init__(self, lengths: Ids, size: int) -> None:
        self._ends, self._size = np.cumsum(lengths), size
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
        filled = lengths > 0  # the others are empty documents
        documents = np.arange(low, high + 1)
        return Pieces(documents[filled], (inside - begins)[filled], lengths[filled])


def best_fitting(lengths: Ids, size: int) -> Blocks:
    """Return whole documents, packed tightly; those longer than a block are cut first.

    This is best-fit decreasing: from the longest piece to the shortest, each goes into
    the fullest block that still has room for it, or into a new one. Source: Ding et al.
    2024, "Fewer Truncations Improve Language Modeling". It needs at most 11/9 of the
    fewest blocks possible, plus four (Johnson et al. 1974, "Worst-case performance
    bounds for simple one-dimensional packing algorithms").

    Args:
        lengths: tokens in each document, `int64 [n]`, >= 0.
        size: tokens in a block. Documents are cut after every `size` tokens.
    """
    counts = -(-lengths // size)
    documents = np.repeat(np.arange(len(lengths)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - np.repeat(firsts, counts)) * size
    parts = np.minimum(lengths[documents] - starts, size)
    return Blocks(Pieces(documents, starts, parts), best_fit(parts, size))


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
    blocks = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    widths, counts = np.unique(lengths, return_counts=True)
    rooms, begin = Rooms(size), 0
    for width, count in zip(widths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces = order[begin : begin + count]
        begin += count
        while len(pieces):
            numbers = rooms.fill(width, len(pieces))
            blocks[pieces[: len(numbers)]] = numbers
            pieces = pieces[len(numbers) :]
    return blocks


class Rooms:
    """Blocks, grouped by the room left in them, in tokens."""

    def __init__(self, size: int) -> None:
        self._size, self._opened, self._number = size, 0, 0
        # Sorted: the room, a number that sinks with each group, and its blocks. So a
        # group never compares its blocks, and the newest of a room is found first.
        self._groups: list[tuple[Any, ...]] = []

    def fill(self, width: int, count: int) -> NDArray[np.int64]:
        """Place pieces of one width in blocks with the same room.

        Args:
            width: tokens in each piece, 1 to `size`.
            count: number of pieces, at least 1.

        Returns:
            The block of each placed piece, `int64 [m]`, 1 <= m <= `count`. The other
            pieces remain to be placed.
        """
        at = bisect_left(self._groups, (width,))
        if at == len(self._groups):
            block_count = -(-count // (self._size // width))
            blocks = np.arange(self._opened, self._opened + block_count)
            self._groups.append((self._size, 0, blocks))
            self._opened += block_count
        room, _, blocks = self._groups.pop(at)
        per_block = room // width
        block_count = -(-count // per_block)
        blocks, others = blocks[:block_count], blocks[block_count:]
        placed_count = min(count, per_block * len(blocks))
        full, rest = divmod(placed_count, per_block)
        for remaining, group in (
            (room, others),
            (room - per_block * width, blocks[:full]),
            (room - rest * width, blocks[full:]),
        ):
            if remaining and len(group):
                self._number -= 1
                insort(self._groups, (remaining, self._number, group))
        return np.repeat(blocks, per_block)[:placed_count]
