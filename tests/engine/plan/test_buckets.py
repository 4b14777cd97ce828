"""Batches of samples of about the same length: planned, the same on every rank."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.plan import (
    Buckets,
    ConstantSchedule,
    Lengths,
    Order,
    Plan,
    Setting,
    Shard,
)
from penstock.errors import SpecError, StateError

ONE = ConstantSchedule(Setting(global_size=1))


def planned(
    order: Order,
    lengths: Any,
    *,
    size: int | None = None,
    tokens: int | None = None,
    parts: int = 1,
    window: int = 4,
) -> Plan:
    """A plan whose order is sorted by length."""
    lengths = Lengths.of(lengths)
    order = order.then(Buckets(order, lengths, size, tokens, parts, window))
    schedule = ConstantSchedule(Setting(global_size=size)) if size else ONE
    return Plan(order, schedule, Shard(0, 1))


def ranks(plan: Plan, world: int) -> list[Plan]:
    return [Plan(plan.order, plan.schedule, Shard(r, world)) for r in range(world)]


def true_rows(plan: Plan, step: int) -> list[int]:
    batch = plan.batch(step)
    return plan.rows(batch).indices[: batch.n_local].tolist()


def epoch_of(plan: Plan, epoch: int) -> list[list[int]]:
    """Return the samples of each batch of an epoch."""
    first = plan.first_step(epoch)
    steps = range(first, first + plan.steps_in(epoch))
    return [true_rows(plan, step) for step in steps]


lengths_of = st.lists(st.integers(0, 60), min_size=1, max_size=150)


@st.composite
def orders(draw: st.DrawFn, length: int) -> Order:
    order = Order.sequential(length)
    if draw(st.booleans()):
        order = order.take(draw(st.integers(1, length)))
    if draw(st.booleans()):
        order = order.shuffle(draw(st.integers(0, 9)))
    if draw(st.booleans()):
        order = order.repeat(2)
    return order


@given(lengths=lengths_of, data=st.data(), window=st.integers(1, 5))
def test_an_epoch_has_every_position_once_in_batches_within_the_budget(
    lengths: list[int], data: st.DataObject, window: int
) -> None:
    order = data.draw(orders(len(lengths)))
    tokens = data.draw(st.integers(60, 400))
    plan = planned(order, lengths, tokens=tokens, window=window)
    for epoch in range(2):
        batches = epoch_of(plan, epoch)
        expected = order.rows(epoch, 0, order.epoch_length).indices
        assert sorted(chain(*batches)) == sorted(expected.tolist())
        for batch in batches:
            longest = max(1, *(lengths[index] for index in batch))
            assert longest * len(batch) <= tokens
        last = plan.first_step(epoch + 1) - 1
        assert plan.batch(last).last
        assert plan.batch(last) == plan.batch(
            plan.first_step(epoch) + plan.steps_in(epoch) - 1
        )
        assert {plan.regime(step) for step in range(last)} <= {""}


@given(
    lengths=lengths_of,
    data=st.data(),
    world=st.sampled_from([2, 3, 8]),
)
def test_the_batches_are_the_same_for_any_number_of_ranks(
    lengths: list[int], data: st.DataObject, world: int
) -> None:
    order = data.draw(orders(len(lengths)))
    alone = planned(order, lengths, tokens=data.draw(st.integers(60, 400)))
    plans = ranks(alone, world)
    assert len({plan.hash for plan in (alone, *plans)}) == 1
    assert len({plan.steps_in(1) for plan in (alone, *plans)}) == 1
    for step in range(alone.first_step(2)):
        dealt = [true_rows(plan, step) for plan in plans]
        assert [*chain(*dealt)] == true_rows(alone, step)
        batches = [plan.batch(step) for plan in plans]
        weight = sum(b.loss_weight for b in batches)
        assert weight == pytest.approx(world)
        assert all(len(p.rows(b)) == b.n_rows >= 1 for p, b in zip(plans, batches))  # noqa: B905


@given(
    lengths=lengths_of,
    data=st.data(),
    worlds=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3),
)
def test_a_run_cut_anywhere_goes_on_in_any_world(
    lengths: list[int], data: st.DataObject, worlds: list[int]
) -> None:
    order = data.draw(orders(len(lengths)))
    tokens = data.draw(st.integers(60, 400))
    whole = planned(order, lengths, tokens=tokens)
    expected = [true_rows(whole, step) for step in range(whole.first_step(3))]
    step, batches = 0, []
    cursor = whole.start(0)
    for world in worlds:
        plans = ranks(planned(order, lengths, tokens=tokens), world)
        (cursor,) = {
            p.restore(pickle.loads(pickle.dumps(p.state(cursor))))  # noqa: S301 ours
            for p in plans
        }
        assert cursor.step == step
        for _ in range(data.draw(st.integers(0, 2 * len(expected)))):
            if step == len(expected):
                break
            batches.append([*chain(*(true_rows(plan, step) for plan in plans))])
            cursor = plans[0].cursor_after(plans[0].batch(step))
            step += 1
    assert batches == expected[:step]


@given(lengths=lengths_of, data=st.data(), window=st.integers(1, 5))
def test_batches_of_one_size_hold_every_position_once(
    lengths: list[int], data: st.DataObject, window: int
) -> None:
    order = data.draw(orders(len(lengths)))
    size = data.draw(st.integers(1, 20))
    plan = planned(order, lengths, size=size, window=window)
    batches = epoch_of(plan, 1)
    assert {len(batch) for batch in batches[:-1]} <= {size}
    expected = order.rows(1, 0, order.epoch_length).indices
    assert sorted(chain(*batches)) == sorted(expected.tolist())


def lognormal(n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return lengths distributed like those of sentences."""
    lengths = np.random.default_rng(0).lognormal(4.0, 0.6, n)
    return np.clip(lengths.astype(np.int64), 4, 512)


def padding(batches: list[list[int]], lengths: Any) -> float:
    """Return the share of a padded epoch that is padding."""
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    return float(1 - sum(lengths[batch].sum() for batch in batches) / padded)


def test_the_plan_pads_less_than_buckets_with_fixed_bounds() -> None:
    """The rival yields a batch when a bucket between two bounds is full."""
    lengths = lognormal(20_000)
    bounds, buckets = [32, 64, 96, 128, 192, 256, 512], {}  # type: ignore[var-annotated]
    rival: list[list[int]] = []
    for index in np.random.default_rng(1).permutation(lengths.size).tolist():
        bucket = buckets.setdefault(np.searchsorted(bounds, lengths[index]), [])
        bucket.append(index)
        if len(bucket) == 64:
            rival.append(bucket[:])
            bucket.clear()
    assert padding(rival, lengths) > 0.15
    order = Order.sequential(lengths.size).shuffle(2)
    budget = planned(order, lengths, tokens=4096, window=100)
    assert padding(epoch_of(budget, 0), lengths) < 0.05
    sized = planned(order, lengths, size=64, window=100)
    assert padding(epoch_of(sized, 0), lengths) < 0.06


def test_batches_are_shuffled_if_the_order_is_and_otherwise_get_shorter() -> None:
    lengths = lognormal(2000)
    still = planned(Order.sequential(2000), lengths, tokens=1024, window=10_000)
    longest = [lengths[batch].max() for batch in epoch_of(still, 0)]
    assert longest == sorted(longest, reverse=True)
    mixed = planned(Order.sequential(2000).shuffle(1), lengths, tokens=1024, window=9)
    first, second = (epoch_of(mixed, epoch) for epoch in (0, 1))
    assert first != second
    longest = [lengths[batch].max() for batch in first]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))
    starts = [batch[0] for batch in first]
    assert np.corrcoef(np.arange(len(starts)), lengths[starts])[0, 1] < 0.2


def test_parts_of_a_batch_are_equal_in_size_and_within_the_budget() -> None:
    lengths = lognormal(3000)
    order = Order.sequential(3000).shuffle(0)
    plans = ranks(planned(order, lengths, tokens=1024, parts=4), 4)
    for step in range(plans[0].steps_in(0)):
        sizes = {plan.batch(step).n_rows for plan in plans}
        for plan in plans:
            rows = plan.rows(plan.batch(step)).indices
            assert lengths[rows].max() * rows.size <= 1024
        # Sizes differ in the last batch of a window.
        assert len(sizes) == 1 or max(sizes) - min(sizes) == 1


@pytest.mark.long
def test_threads_may_share_a_plan_and_ask_in_any_order() -> None:
    lengths = lognormal(600)
    order = Order.sequential(600).shuffle(0)
    expected = planned(order, lengths, tokens=700, window=5)
    steps = np.random.default_rng(0).permutation(expected.first_step(2)).tolist()
    plan = planned(order, lengths, tokens=700, window=5)
    with ThreadPoolExecutor(8) as pool:
        rows = [*pool.map(lambda step: true_rows(plan, step), steps)]
    in_order = [true_rows(expected, step) for step in range(len(steps))]
    assert rows == [in_order[step] for step in steps]


def test_a_false_state_counts_as_damaged() -> None:
    plan = planned(Order.sequential(500).shuffle(0), lognormal(500), tokens=600)
    state = plan.state(plan.cursor_after(plan.batch(7)))
    for change in (
        {"position": 3},
        {"batch": 9},
        {"step": 6},
        {"batch": 10_000},
        {"epoch": 4, "step": 3, "batch": 8},
    ):
        again = planned(Order.sequential(500).shuffle(0), lognormal(500), tokens=600)
        with pytest.raises(StateError, match="damaged"):
            again.restore({**state, **change})


def test_a_state_is_read_whatever_step_a_damaged_one_had() -> None:
    plan, again = (
        planned(Order.sequential(500).shuffle(0), lognormal(500), tokens=600)
        for _ in range(2)
    )
    state = plan.state(plan.start(2))
    again.restore({**state, "step": plan.first_step(2) + 5})  # nobody has counted it
    assert again.restore(state) == plan.start(2)
    assert [again.first_step(epoch) for epoch in (1, 3)] == [
        plan.first_step(epoch) for epoch in (1, 3)
    ]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1.5, 2.0], "must be integers"),
        ([[1], [2]], r"got int64 \[2, 1\]"),
        ([3, -1], "must be >= 0, got -1 for sample 1"),
        ([3], "one number per sample, got 1 for 2"),
        ([3, 101], "sample 1 alone has 101"),
    ],
)
def test_wrong_lengths_are_refused(lengths: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        planned(Order.sequential(2), lengths, tokens=100)
