"""Shards are shuffled first, then the samples of a few of them at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.plan import Order, group_shuffle
from penstock.errors import SpecError
from support.work_counts import bytecodes

sizes_of = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any)


def shuffled(sizes: Any, seed: int = 0, window: int = 3) -> Order:
    order = Order.sequential(int(np.sum(sizes)))
    return order.then(group_shuffle(order, sizes, seed, window))


def epoch_of(order: Order, epoch: int) -> list[int]:
    indices: list[int] = order.rows(epoch, 0, order.epoch_length).indices.tolist()
    return indices


@given(sizes=sizes_of, window=st.integers(1, 8), data=st.data())
def test_an_epoch_has_each_sample_once_and_a_window_has_a_few_groups(
    sizes: list[int], window: int, data: st.DataObject
) -> None:
    order = shuffled(sizes, window=window)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    for epoch in range(2):
        indices = epoch_of(order, epoch)
        assert sorted(indices) == [*range(sum(sizes))]
        groups: list[int] = list(dict.fromkeys(group_of[indices].tolist()))
        # Groups leave for good, at most `window` after they came.
        for place, group in enumerate(groups):
            last = max(
                at for at, index in enumerate(indices) if group_of[index] == group
            )
            later = {int(group_of[index]) for index in indices[:last]}
            assert len(later - set(groups[:place])) <= window
        places = data.draw(st.permutations(range(len(indices))))[:20]
        rows = order.at(epoch, np.array(places, np.int64))
        assert rows.indices.tolist() == [indices[place] for place in places]


def test_epochs_seeds_and_windows_have_orders_of_their_own() -> None:
    sizes = [7] * 40
    orders = [
        epoch_of(shuffled(sizes, seed, window), epoch)
        for seed in (0, 1)
        for window in (2, 40)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 8


def test_all_groups_in_one_window_are_mixed_evenly() -> None:
    sizes = [100] * 50
    groups = np.array(epoch_of(shuffled(sizes, window=50), 0)) // 100
    counts = np.array(
        [np.bincount(part, minlength=50) for part in np.split(groups, 10)]
    )
    # Of 500 draws each group has 10: a deviation of 5 of the binomial's is 15.
    assert counts.max() < 26


def test_each_pass_is_a_round_of_its_own() -> None:
    sizes = [3, 4, 5]
    twice = shuffled(sizes).repeat(2)
    indices = epoch_of(twice, 1)
    assert indices[:12] == epoch_of(shuffled(sizes), 2)
    assert indices[12:] == epoch_of(shuffled(sizes), 3)


def test_a_place_far_into_a_huge_dataset_is_found_at_once() -> None:
    order = shuffled(np.full(100_000, 10_000), window=16)
    order.at(0, np.array([0]))  # shuffles the groups
    near, far = (
        bytecodes(lambda place=place: order.at(0, np.arange(place, place + 16_384)))  # type: ignore[misc]
        for place in (0, 700_000_000)
    )
    assert far <= 2 * near  # walking there would take a minute


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: group_shuffle(Order.sequential(9), [4, 4], 0, 1), "add up to 9"),
        (lambda: group_shuffle(Order.sequential(9), [10, -1], 0, 1), "add up to 9"),
        (lambda: shuffled([4, 4], window=0), "`window` must be an int >= 1"),
        (
            lambda: group_shuffle(Order.sequential(9).take(8), [4, 4], 0, 1),
            "directly after the source",
        ),
    ],
)
def test_values_that_are_not_groups_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
