"""Plans of blocks against plain loops over tokens and pieces."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.text.blocks import (
    Blocks,
    Concatenated,
    best_fit,
    best_fitting,
)

SAMPLES = 300
Token = tuple[int, int]
"""A document, and a position in it."""

Plan = Blocks | Concatenated


def tokens_of(plan: Plan) -> list[list[Token]]:
    """Return all tokens of a plan, block by block."""
    return [
        [
            (document, start + i)
            for document, start, length in zip(
                *(array.tolist() for array in plan.pieces(block)), strict=True
            )
            for i in range(length)
        ]
        for block in range(len(plan))
    ]


def in_line(lengths: list[int], size: int) -> list[list[Token]]:
    """Put tokens in a line, and begin a block wherever the last one is full."""
    blocks: list[list[Token]] = []
    for document, length in enumerate(lengths):
        for place in range(length):
            if not blocks or len(blocks[-1]) == size:
                blocks.append([])
            blocks[-1].append((document, place))
    return blocks


def cut(lengths: list[int], size: int) -> list[int]:
    """Cut documents every `size` tokens."""
    return [
        min(size, length - start)
        for length in lengths
        for start in range(0, length, size)
    ]


def rooms_by_hand(pieces: list[int], size: int) -> list[int]:
    """Place pieces, longest first, each where it leaves the least room."""
    rooms: list[int] = []
    for piece in sorted(pieces, reverse=True):
        at = bisect_left(rooms, piece)
        room = rooms.pop(at) if at < len(rooms) else size
        insort(rooms, room - piece)
    return rooms


def drawn(rng: np.random.Generator) -> tuple[list[int], int]:
    """Draw lengths of documents, some of them empty, and a block size."""
    size = int(rng.integers(1, 80))
    longest = int(rng.integers(1, 3 * size + 1))
    return rng.integers(0, longest + 1, int(rng.integers(1, 60))).tolist(), size


def test_documents_in_a_line_are_cut_as_in_a_plain_loop() -> None:
    for seed in range(SAMPLES):
        lengths, size = drawn(np.random.default_rng(seed))
        if any(lengths):
            plan = Concatenated(np.array(lengths), size)
            assert tokens_of(plan) == in_line(lengths, size)


def test_best_fit_agrees_with_a_plain_loop() -> None:
    for seed in range(SAMPLES):
        lengths, size = drawn(np.random.default_rng(seed))
        if any(lengths):
            plan = best_fitting(np.array(lengths), size)
            totals = [int(plan.pieces(at).lengths.sum()) for at in range(len(plan))]
            expected = rooms_by_hand(cut(lengths, size), size)
            assert sorted(size - total for total in totals) == expected


lengths_and_size = st.tuples(
    st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any),
    st.integers(1, 40),
)


@given(lengths_and_size)
@pytest.mark.parametrize("plan_of", [Concatenated, best_fitting])
def test_no_token_is_lost_or_repeated(
    plan_of: Callable[..., Plan], drawn: tuple[list[int], int]
) -> None:
    lengths, size = drawn
    plan = plan_of(np.array(lengths), size)
    blocks = tokens_of(plan)
    assert sorted(token for block in blocks for token in block) == [
        (document, place)
        for document, length in enumerate(lengths)
        for place in range(length)
    ]
    for number, block in enumerate(blocks):
        assert 1 <= len(block) <= size
        assert all(length > 0 for length in plan.pieces(number).lengths)


@given(lengths_and_size)
def test_documents_that_fit_stay_whole_and_others_are_cut_every_size_tokens(
    drawn: tuple[list[int], int],
) -> None:
    lengths, size = drawn
    plan = best_fitting(np.array(lengths), size)
    pieces = [
        piece
        for block in range(len(plan))
        for piece in zip(*(array.tolist() for array in plan.pieces(block)), strict=True)
    ]
    assert Counter(pieces) == Counter(
        (document, start, min(size, length - start))
        for document, length in enumerate(lengths)
        for start in range(0, length, size)
    )


@given(st.integers(1, 150), st.integers(2, 60), st.integers(1, 8), st.integers(0, 9999))
def test_best_fit_takes_eleven_ninths_of_the_fewest_blocks_and_four_at_most(
    fewest: int, size: int, most: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pieces: list[int] = []
    for _ in range(fewest):  # whole blocks cut into pieces: no plan can need fewer
        cuts = np.unique(rng.integers(1, size, int(rng.integers(0, most))))
        pieces += np.diff(np.concatenate(([0], cuts, [size]))).tolist()
    assert sum(pieces) == fewest * size
    blocks = best_fit(rng.permutation(pieces), size)
    assert set(blocks.tolist()) == set(range(int(blocks.max()) + 1))
    assert fewest <= blocks.max() + 1 <= 11 / 9 * fewest + 4


def test_realistic_documents_nearly_fill_the_blocks() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 50_000).astype(np.int64) + 1
    fewest = -(-int(lengths.sum()) // 2048)
    assert len(Concatenated(lengths, 2048)) == fewest
    assert fewest <= len(best_fitting(lengths, 2048)) <= 1.01 * fewest
