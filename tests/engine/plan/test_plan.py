"""Global batches are one sequence on any number of ranks."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.plan import (
    BatchPlan,
    Change,
    ConstantSchedule,
    Context,
    Order,
    Place,
    Plan,
    Schedule,
    Setting,
    Shard,
    Tail,
)
from penstock.errors import SpecError, StateError
from support.work_counts import bytecodes

WORLDS = (1, 2, 3, 5, 8)


@dataclass(frozen=True)
class Growing:
    """Sizes grow at a sample count; momentum and rate differ at each step."""

    small: int
    large: int
    boundary: int

    def at(self, place: Place) -> Setting:
        early = place.samples < self.boundary
        size, image_size = (self.small, 128) if early else (self.large, 224)
        return Setting(size, image_size, place.step / 100, 1 / (1 + place.step))

    def next_change(self, place: Place) -> Change | None:
        ahead = place.samples < self.boundary
        return Change("samples", self.boundary) if ahead else None

    def describe(self) -> dict[str, object]:
        return {"kind": "growing", "sizes": [self.small, self.large, self.boundary]}


@st.composite
def orders(draw: st.DrawFn) -> Order:
    order = Order.sequential(draw(st.integers(8, 60)))
    if draw(st.booleans()):
        order = order.select(range(0, order.length, draw(st.integers(1, 2))))
    order = order.shuffle(draw(st.integers(0, 9)))
    if draw(st.booleans()):
        order = order.take(draw(st.integers(5, 60)))
    return order.repeat(draw(st.integers(1, 3)))


def schedules() -> st.SearchStrategy[Schedule]:
    sizes = st.integers(8, 30)
    constant = st.builds(Setting, sizes, st.none() | st.just(64)).map(ConstantSchedule)
    return constant | st.builds(Growing, sizes, sizes, st.integers(1, 200))


def ranks(plan: Plan, size: int) -> list[Plan]:
    return [
        Plan(plan.order, plan.schedule, Shard(rank, size), plan.drop_last, plan.tail)
        for rank in range(size)
    ]


def true_rows(plan: Plan, batch: BatchPlan) -> list[tuple[int, int]]:
    rows = plan.rows(batch).part(0, batch.n_local)
    return list(zip(rows.indices.tolist(), rows.rounds.tolist(), strict=True))


def stamp(batch: BatchPlan) -> dict[str, object]:
    """Return the parts of a batch that must be the same on every rank."""
    own = {"n_rows", "n_local", "loss_weight"}
    return {name: v for name, v in batch._asdict().items() if name not in own}


def constant(length: int, size: int, world: int = 1, **options: object) -> list[Plan]:
    order, schedule = Order.sequential(length), ConstantSchedule(Setting(size))
    return [
        Plan(order, schedule, Shard(rank, world), **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]


@given(orders(), schedules(), st.sampled_from(WORLDS), st.data())
def test_any_world_delivers_the_global_batches_of_one_rank(
    order: Order, schedule: Schedule, world: int, data: st.DataObject
) -> None:
    longest = getattr(schedule, "setting", None) or Setting(30)
    drop_last = order.epoch_length >= longest.global_size and data.draw(st.booleans())
    alone = Plan(order, schedule, Shard.single(), drop_last=drop_last)
    together = ranks(alone, world)
    steps = [data.draw(st.integers(0, 300)), *range(alone.first_step(3))]
    for step in steps:
        expected = alone.batch(step)
        batches = [plan.batch(step) for plan in together]
        assert all(stamp(batch) == stamp(expected) for batch in batches)
        rows = [true_rows(p, b) for p, b in zip(together, batches, strict=True)]
        assert list(chain(*rows)) == true_rows(alone, expected)
        assert sum(batch.n_local for batch in batches) == expected.n_global
        assert sum(batch.loss_weight for batch in batches) == pytest.approx(world)
        sizes = [len(p.rows(b)) for p, b in zip(together, batches, strict=True)]
        assert sizes == [batch.n_rows for batch in batches]


@given(orders(), schedules())
def test_an_epoch_delivers_every_position_once(
    order: Order, schedule: Schedule
) -> None:
    plan = Plan(order, schedule, Shard.single())
    for epoch in range(3):
        batches = [
            plan.batch(plan.first_step(epoch) + b) for b in range(plan.steps_in(epoch))
        ]
        rows = list(chain(*(true_rows(plan, batch) for batch in batches)))
        whole = order.rows(epoch, 0, order.epoch_length)
        assert [index for index, _ in rows] == whole.indices.tolist()
        assert [round_ for _, round_ in rows] == whole.rounds.tolist()
        assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [
            True
        ]


@given(orders(), schedules(), st.lists(st.sampled_from(WORLDS), max_size=4), st.data())
def test_a_run_cut_anywhere_goes_on_in_any_world_as_if_uncut(
    order: Order, schedule: Schedule, worlds: list[int], data: st.DataObject
) -> None:
    plan = Plan(order, schedule, Shard.single())
    expected = [true_rows(plan, plan.batch(s)) for s in range(plan.first_step(4))]
    cursor, all_rows = plan.start(0), []
    for world in [*worlds, 1]:
        together = ranks(plan, world)
        cursor = together[-1].restore(json.loads(json.dumps(plan.state(cursor))))
        last = len(expected) if world == 1 else data.draw(st.integers(0, len(expected)))
        while cursor.step < last:
            if cursor.batch == plan.steps_in(cursor.epoch):
                cursor = plan.start(cursor.epoch + 1)
            batches = [
                p.batch(p.first_step(cursor.epoch) + cursor.batch) for p in together
            ]
            rows = [true_rows(p, b) for p, b in zip(together, batches, strict=True)]
            all_rows.append(list(chain(*rows)))
            cursor = together[0].cursor_after(batches[0])
    assert all_rows[: len(expected)] == expected


def test_the_cursor_stays_after_an_epochs_last_batch_until_it_is_moved_on() -> None:
    (plan,) = constant(10, 4)
    end = plan.cursor_after(plan.batch(2))
    assert (end.epoch, end.batch, end.step, end.position) == (0, 3, 3, 10)
    assert plan.restore(plan.state(end)) == end
    assert plan.start(1).step == end.step


def test_a_state_beyond_the_end_of_its_epoch_counts_as_damaged() -> None:
    (plan,) = constant(10, 4)
    end = plan.state(plan.cursor_after(plan.batch(2)))
    beyond = plan.timeline.place(0, 4)
    damaged = {**end, "batch": 4, "step": beyond.step, "position": beyond.position}
    with pytest.raises(StateError, match="the state is damaged"):
        plan.restore(damaged)


def test_with_drop_last_an_epoch_ends_after_the_last_whole_batch() -> None:
    (plan,) = constant(10, 4, drop_last=True)
    assert plan.steps_in(7) == 2
    end = plan.cursor_after(plan.batch(1))
    assert (end.batch, end.position) == (2, 8)
    assert plan.restore(plan.state(end)) == end
    assert plan.batch(2).epoch == 1


def test_a_schedule_sets_size_and_learning_rate_at_the_same_batch() -> None:
    plan = Plan(Order.sequential(100), Growing(10, 20, 115), Shard.single())
    before, after = plan.batch(11), plan.batch(12)
    assert (before.n_global, before.image_size, before.lr_mult) == (10, 128, 0.11)
    assert (after.n_global, after.image_size, after.lr_mult) == (20, 224, 0.12)
    assert (after.epoch, after.batch, after.start) == (1, 2, 20)
    assert after.ctx == Context(epoch=1, step=12, image_size=224)
    assert [plan.steps_in(epoch) for epoch in range(3)] == [10, 6, 5]
    assert [plan.first_step(epoch) for epoch in range(4)] == [0, 10, 16, 21]


def test_a_single_rank_gets_a_short_last_batch() -> None:
    for tail in ("pad_mask", "pad_repeat"):
        (plan,) = constant(10, 8, tail=tail)
        last = plan.batch(1)
        assert (last.n_rows, last.n_local, last.n_global, last.padded) == (2, 2, 2, 0)
        assert last.loss_weight == 1.0


def test_the_tail_of_an_epoch_is_not_a_regime_of_its_own() -> None:
    (plan,) = constant(81, 64)
    assert [plan.batch(step).n_global for step in (0, 1, 2)] == [64, 17, 64]
    assert {plan.regime(step) for step in range(6)} == {"batches of 64"}


def test_masked_padding_repeats_the_start_of_the_batch_and_does_not_count() -> None:
    plans = constant(11, 8, world=4)
    batches = [plan.batch(1) for plan in plans]
    rows = [p.rows(b).indices.tolist() for p, b in zip(plans, batches, strict=True)]
    assert rows == [[8, 9], [10, 8], [9, 10], [8, 9]]
    assert [batch.n_local for batch in batches] == [2, 1, 0, 0]
    assert [batch.padded for batch in batches] == [0, 1, 2, 2]
    assert {batch.n_global for batch in batches} == {3}
    assert [batch.loss_weight for batch in batches] == [8 / 3, 4 / 3, 0, 0]


def test_repeated_padding_counts_like_any_other_row() -> None:
    plans = constant(11, 8, world=4, tail="pad_repeat")
    batches = [plan.batch(1) for plan in plans]
    assert plans[1].rows(batches[1]).indices.tolist() == [10, 8]
    assert {(b.n_global, b.n_local, b.padded, b.loss_weight) for b in batches} == {
        (8, 2, 0, 1.0)
    }


def test_loss_weights_make_the_mean_over_ranks_exact() -> None:
    losses = np.random.default_rng(0).random(37)
    plans = constant(37, 20, world=3)
    for step in range(2):
        batches = [plan.batch(step) for plan in plans]
        own = [
            losses[p.rows(b).indices[: b.n_local]]
            for p, b in zip(plans, batches, strict=True)
        ]
        weighted = [
            b.loss_weight * (o.mean() if o.size else 0.0)
            for b, o in zip(batches, own, strict=True)
        ]
        assert np.mean(weighted) == pytest.approx(np.concatenate(own).mean())


@given(
    orders(),
    schedules(),
    st.sampled_from(WORLDS),
    st.booleans(),
    st.integers(0, 60),
    st.integers(0, 40),
)
def test_batches_planned_at_once_are_those_planned_one_by_one(
    order: Order,
    schedule: Schedule,
    world: int,
    drop_last: bool,  # noqa: FBT001 hypothesis gives it by its place
    start: int,
    count: int,
) -> None:
    drop_last = drop_last and order.epoch_length >= 30
    plan = Plan(order, schedule, shard=Shard(world - 1, world), drop_last=drop_last)
    expected = [plan.batch(step) for step in range(start, start + count)]
    assert list(plan.batches(start, start + count)) == expected


def test_rows_do_not_depend_on_the_order_in_which_batches_are_asked_for() -> None:
    order = Order.sequential(5000).shuffle(0)
    plan = Plan(order, ConstantSchedule(Setting(7)), Shard(1, 2))
    forth = [true_rows(plan, plan.batch(step)) for step in range(300)]
    other = Plan(order, ConstantSchedule(Setting(7)), Shard(1, 2))
    back = [true_rows(other, other.batch(step)) for step in reversed(range(300))]
    assert forth == back[::-1]


def test_threads_may_share_a_plan() -> None:
    order = Order.sequential(10_000).shuffle(0)
    shared, own = (
        Plan(order, ConstantSchedule(Setting(64)), Shard.single()) for _ in "ab"
    )
    expected = [true_rows(own, own.batch(step)) for step in range(300)]
    with ThreadPoolExecutor(4) as threads:
        steps = [step for start in range(4) for step in range(start, 300, 4)]
        results = threads.map(lambda s: (s, true_rows(shared, shared.batch(s))), steps)
        assert all(rows == expected[step] for step, rows in results)


def test_rows_are_read_only() -> None:
    (plan,) = constant(10, 4)
    with pytest.raises(ValueError, match="read-only"):
        plan.rows(plan.batch(0)).indices[0] = 1


def test_a_far_step_of_a_huge_dataset_is_found_at_once() -> None:
    order = Order.sequential(10**12).shuffle(0).repeat(3)
    plan = Plan(order, ConstantSchedule(Setting(1000)), Shard(3, 8))
    near, far = (
        bytecodes(lambda step=step: plan.rows(plan.batch(step)))  # type: ignore[misc]
        for step in (0, 7 * 10**9)
    )
    assert far <= 2 * near  # walking there would take hours
    batch = plan.batch(7 * 10**9)
    rows = plan.rows(batch)
    assert (batch.epoch, batch.batch) == (2, 10**9)
    assert rows.rounds.tolist() == [7] * 125
    assert np.unique(rows.indices).size == 125


def test_the_hash_covers_global_facts_only_and_all_of_them() -> None:
    def hash_of(
        length: int = 50,
        seed: int = 0,
        size: int = 8,
        shard: Shard = Shard.single(),  # noqa: B008 - frozen
        *,
        drop_last: bool = False,
        tail: Tail = "pad_mask",
    ) -> str:
        order = Order.sequential(length).shuffle(seed)
        return Plan(order, ConstantSchedule(Setting(size)), shard, drop_last, tail).hash

    assert hash_of() == hash_of(shard=Shard(1, 4))
    others = [
        hash_of(length=51),
        hash_of(seed=1),
        hash_of(size=9),
        hash_of(drop_last=True),
        hash_of(tail="pad_repeat"),
    ]
    assert len({hash_of(), *others}) == 6


@pytest.mark.parametrize("step", [-1, -(10**9)])
def test_there_is_no_batch_before_the_first_step(step: int) -> None:
    (plan,) = constant(10, 4)
    with pytest.raises(IndexError, match=f"`step` must be >= 0, got {step}"):
        plan.batch(step)


def test_a_global_batch_smaller_than_the_world_is_refused() -> None:
    with pytest.raises(SpecError, match=r"global batch must be >= 4, .* got 3"):
        constant(100, 3, world=4)
    with pytest.raises(SpecError, match=r"got 3 \(in force from epoch 1\)"):
        Plan(Order.sequential(10), Growing(4, 3, 10), Shard(0, 4))


def test_an_epoch_without_a_batch_is_refused() -> None:
    with pytest.raises(SpecError, match="10 samples has no batch of 64"):
        constant(10, 64, drop_last=True)


def test_a_schedule_that_hides_a_change_of_size_is_detected() -> None:
    class Hiding(Growing):
        def next_change(self, place: Place) -> None:
            """Announce nothing."""

    plan = Plan(Order.sequential(100), Hiding(10, 20, 50), Shard.single())
    assert plan.batch(4).n_global == 10
    with pytest.raises(
        SpecError, match=r"gives a global batch size of 20 .* still 10 there"
    ):
        plan.batch(5)
