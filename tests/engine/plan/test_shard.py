"""Ranks share a global batch evenly and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.plan import Shard
from penstock.errors import SpecError


@given(st.integers(0, 10**12), st.integers(1, 200))
def test_shares_follow_each_other_and_differ_by_at_most_one(n: int, size: int) -> None:
    shares = [Shard(rank, size).share(n) for rank in range(size)]
    ends = [first + count for first, count in shares]
    assert [first for first, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == n
    counts = [count for _, count in shares]
    assert max(counts) - min(counts) <= 1


def test_a_single_shard_has_everything() -> None:
    assert Shard.single().share(7) == (0, 7)


@pytest.mark.parametrize(
    ("rank", "size", "told"),
    [(0, 0, "`size` must be >= 1, got 0"), (2, 2, "got 2"), (-1, 2, "got -1")],
)
def test_a_rank_outside_its_world_is_refused(rank: int, size: int, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        Shard(rank, size)
