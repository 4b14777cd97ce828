"""Each rank reads its own part of the data; batches do not depend on the world."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.plan import (
    Buckets,
    Change,
    ConstantSchedule,
    Order,
    Place,
    Plan,
    Schedule,
    Setting,
    Shard,
    group_shuffle,
    shuffled_by_part,
)
from penstock.engine.plan.buckets import Lengths
from penstock.errors import SpecError


class TwoSizes:
    """Batches of one size up to a step, then of another."""

    def __init__(self, first: int, then: int, step: int) -> None:
        self.sizes, self.step = (first, then), step

    def at(self, place: Place) -> Setting:
        return Setting(self.sizes[place.step >= self.step], None)

    def next_change(self, place: Place) -> Change | None:
        return Change("steps", self.step) if place.step < self.step else None

    def describe(self) -> dict[str, object]:
        return {"sizes": self.sizes, "step": self.step}


def order_of(length: int, parts: int, window: int | None, group: int = 3) -> Order:
    """Return samples shuffled in parts, or in parts of groups if there is a window."""
    order = Order.sequential(length)
    sizes = [min(group, length - start) for start in range(0, length, group)]
    within = None if window is None else group_shuffle(order, sizes, 5, window)
    return shuffled_by_part(order, 5, parts, within)


def plan_of(order: Order, schedule: Schedule | int, rank: int, ranks: int) -> Plan:
    if isinstance(schedule, int):
        schedule = ConstantSchedule(Setting(schedule, None))
    return Plan(order, schedule, Shard(rank, ranks))


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [*chain.from_iterable(batches)]


def read_by(plan: Plan, epoch: int) -> list[list[int]]:
    """Return the samples of each batch of an epoch that count, for one rank."""
    batches = (
        plan.batch(plan.first_step(epoch) + n) for n in range(plan.steps_in(epoch))
    )
    return [plan.rows(batch).indices[: batch.n_local].tolist() for batch in batches]


@given(
    per_part=st.integers(1, 4),
    parts=st.sampled_from([1, 2, 4, 6]),
    length=st.integers(24, 150),
    window=st.none() | st.integers(1, 4),
    then=st.none() | st.just(5),
    ranks=st.sampled_from([2, 3, 4, 6]),
)
def test_global_batches_are_the_same_for_all_worlds(
    per_part: int,
    parts: int,
    length: int,
    window: int | None,
    then: int | None,
    ranks: int,
) -> None:
    order = order_of(length, parts, window)
    size = per_part * parts
    schedule: Schedule | int = size if then is None else TwoSizes(size, parts * then, 3)
    whole = [read_by(plan_of(order, schedule, 0, 1), epoch) for epoch in range(2)]
    for epoch in range(2):
        assert sorted(flat(whole[epoch])) == [*range(length)]
    ranks = min(ranks, size)
    plans = [plan_of(order, schedule, rank, ranks) for rank in range(ranks)]
    for epoch in range(2):
        dealt = zip(*(read_by(plan, epoch) for plan in plans), strict=True)
        assert [flat(batch) for batch in dealt] == whole[epoch]


@given(parts=st.sampled_from([2, 4, 8]), window=st.none() | st.integers(1, 9))
def test_a_rank_reads_the_same_samples_in_each_epoch(
    parts: int, window: int | None
) -> None:
    order = order_of(64 * parts, parts, window)
    plan = plan_of(order, 8 * parts, rank=1, ranks=2)
    first, second = (read_by(plan, epoch) for epoch in range(2))
    assert sorted(flat(first)) == sorted(flat(second))
    assert first != second


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_rank_reads_at_most_a_tenth_more_than_its_share_of_groups(
    ranks: int,
) -> None:
    group, length = 100, 64_000
    order = order_of(length, 16, window=4, group=group)
    for rank in range(ranks):
        samples = np.array(flat(read_by(plan_of(order, 512, rank, ranks), 0)))
        n_samples = np.unique(samples // group).size * group
        assert n_samples <= 1.1 * length / ranks
        # Each is read once: a group is needed within a few batches, and never again.
        for number in np.unique(samples // group)[:20]:
            places = np.flatnonzero(samples // group == number)
            assert np.ptp(places) <= 4 * group * max(1, 16 // ranks)


def test_a_part_holds_a_random_sample_of_the_data() -> None:
    plan = plan_of(order_of(10_000, 10, None), 100, rank=0, ranks=10)
    samples = np.array(flat(read_by(plan, 0)))
    counts, _ = np.histogram(samples, bins=10, range=(0, 10_000))
    assert counts.min() > 60
    assert counts.max() < 140


def test_a_state_resumes_on_another_world() -> None:
    order = order_of(100, 4, 2)
    before = plan_of(order, 12, 0, 2)
    state = before.state(before.cursor_after(before.batch(3)))
    for ranks in (1, 3, 4):
        after = plan_of(order, 12, ranks - 1, ranks)
        assert after.restore(state).batch == 4


def plan_with(order: Order, size: int = 8) -> Plan:
    return plan_of(order, size, 0, 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: order_of(9, 10, None), "from 1 to 9"),
        (lambda: order_of(9, 0, None), "from 1 to 9"),
        (lambda: plan_with(order_of(90, 3, None)), "a multiple of 3, got [8]"),
        (lambda: plan_with(order_of(90, 4, None).take(8)), "nothing may"),
        (lambda: plan_with(order_of(90, 4, None).repeat(2)), "nothing may"),
        (lambda: by_length(order_of(90, 4, None)), "leave `lengths` out"),
    ],
)
def test_impossible_parts_are_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(SpecError) as caught:
        make()
    assert says in str(caught.value)


def by_length(order: Order) -> Plan:
    lengths: Sequence[int] = [*range(1, 91)]
    buckets = Buckets(order, Lengths.of(lengths), 8, tokens=None, parts=1, window=3)
    return plan_with(order.then(buckets))
