"""Schedules take effect at the exact batch, on any number of ranks, across resumes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from support.functions import sized
from support.work_counts import bytecodes, peak_bytes

LENGTH = 103
WORLDS = (1, 2, 3, 5, 8)
SCHEDULES = [
    {
        "global_batch_size": ps.schedule.steps({0: 16, 1: 8, 1.5: 24}),
        "image_size": ps.schedule.steps({0: 4, 0.7: 8}),
        "coupling": "linear",
    },
    {
        "global_batch_size": ps.schedule.linear(8, 32, end=2, multiple_of=8),
        "momentum": ps.schedule.cosine(0.8, 0.9, end=2),
    },
    {
        "global_batch_size": ps.schedule.steps({0: 9, 5: 20, 11: 8}, "steps"),
        "image_size": ps.schedule.linear(4, 12, end=150, unit="samples", multiple_of=4),
    },
    {"global_batch_size": ps.schedule.function(lambda e: 8 * (e + 1), until=2)},
    {"global_batch_size": 13, "image_size": 6, "strength": lambda epoch: epoch / 2},
]
Seen = list[tuple[Any, ...]]


def described(rank: int, world: int, schedule: Any, *, workers: int = 1) -> ps.Pipeline:
    return (
        ps.Pipeline.from_dataset(
            np.arange(LENGTH),
            shard=ps.Shard(rank, world),
            schedule=ps.schedule.of(**schedule),
        )
        .shuffle(seed=5)
        .map(sized, executor="thread", num_parallel_workers=workers)
        .batch()
    )


def ranks(world: int, schedule: Any, **how: Any) -> list[ps.Pipeline]:
    return [described(rank, world, schedule, **how) for rank in range(world)]


def epochs(pipes: list[ps.Pipeline], count: int) -> Iterator[tuple[Any, ...]]:
    """Yield the stamp and the ids, in order, of each global batch of these epochs."""
    for _ in range(count):
        for parts in zip(*pipes, strict=True):
            plans = [pipe.plan for pipe in pipes]
            yield seen(plans, [part[: p.n_local] for part, p in zip(parts, plans)])  # type: ignore[union-attr] # noqa: B905


def seen(plans: list[Any], parts: list[torch.Tensor]) -> tuple[Any, ...]:
    stamps = {
        (p.epoch, p.step, p.n_global, p.image_size, p.lr_mult, p.momentum, p.strength)
        for p in plans
    }
    (stamp,) = stamps  # the same on every rank
    assert sum(p.n_local for p in plans) == plans[0].n_global
    weights = sum(p.loss_weight for p in plans) / len(plans)
    assert weights == pytest.approx(1)
    return *stamp, *torch.cat(parts).flatten().tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_global_batches_are_the_same_on_any_number_of_ranks(schedule: Any) -> None:
    alone = list(epochs(ranks(1, schedule), 2))
    assert len({row[2] for row in alone}) > 1 or schedule is SCHEDULES[-1]
    for world, workers in ((3, 8), (8, 1)):
        assert list(epochs(ranks(world, schedule, workers=workers), 2)) == alone


@settings(max_examples=20, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    worlds=st.lists(st.sampled_from(WORLDS), min_size=3, max_size=3),
    cuts=st.lists(st.integers(0, 12), min_size=2, max_size=2),
)
def test_plans_resume_on_other_ranks_at_any_step(
    schedule: Any, worlds: list[int], cuts: list[int]
) -> None:
    def plans(world: int) -> list[Any]:
        pipes = ranks(world, schedule)
        return [pipe._compiled().planned for pipe in pipes]  # noqa: SLF001

    def row(of: list[Any], step: int) -> tuple[Any, ...]:
        stamps = [plan.batch(step) for plan in of]
        parts = [
            torch.from_numpy(plan.rows(stamp).indices[: stamp.n_local].copy())
            for plan, stamp in zip(of, stamps, strict=True)
        ]
        return seen(stamps, parts)

    (whole,) = plans(1)
    steps = whole.steps_in(0) + whole.steps_in(1)
    expected = [row([whole], step) for step in range(steps)]
    rows, step = [], 0
    state: Any = whole.state(whole.start(0))
    for world, cut in zip(worlds, [*cuts, steps], strict=True):
        here = plans(world)
        cursors = {plan.restore(state) for plan in here}
        (cursor,) = cursors
        stop = min(cursor.step + cut, steps)
        rows += [row(here, step) for step in range(cursor.step, stop)]
        step = max(stop - 1, 0)
        last = here[0].batch(step)
        after = here[0].cursor_after(last) if stop else cursor
        states = [plan.state(after) for plan in here]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert rows == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_resume_on_other_ranks(schedule: Any) -> None:
    expected = list(epochs(ranks(1, schedule), 1))
    batches: Seen = []
    state = None
    for world, cut in ((2, 3), (5, 2), (3, 100)):
        pipes = ranks(world, schedule, workers=world)
        for pipe in pipes:
            if state is not None:
                pipe.load_state_dict(state)
        batches += islice(epochs(pipes, 1), cut)
        states = [pipe.state_dict() for pipe in pipes]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert batches == expected


@pytest.mark.parametrize("prefetch", [1, 64])
def test_sizes_change_at_the_exact_batch_however_much_is_prefetched(
    prefetch: int,
) -> None:
    before = ps.config.get_prefetch_size()
    ps.config.set_prefetch_size(prefetch)
    try:
        pipe = described(0, 1, SCHEDULES[0], workers=4)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        ps.optim.follow(optimizer, pipe)
        for _ in range(2):
            for batch in pipe:
                assert pipe.plan is not None
                place = pipe.plan.epoch + pipe.plan.start / LENGTH
                size = 16 if place < 1 else 8 if place < 1.5 else 24
                image = 4 if place < 0.7 else 8
                assert batch.shape[1] == image
                assert pipe.plan.n_global == min(size, LENGTH - pipe.plan.start)
                lr = optimizer.param_groups[0]["lr"]
                assert lr == pytest.approx(0.1 * size / 16)
    finally:
        ps.config.set_prefetch_size(before)


def test_a_changed_schedule_is_an_error_that_can_be_overridden() -> None:
    pipe = described(0, 1, SCHEDULES[0])
    next(iter(pipe))
    state = pipe.state_dict()
    other = described(0, 1, SCHEDULES[4])
    with pytest.raises(ps.StateError, match=r"schedule: saved .*override=True"):
        other.load_state_dict(state)
    other.load_state_dict(state, override=True)
    next(iter(other))
    assert other.plan is not None
    assert other.plan.start <= 16 < other.plan.start + other.plan.n_global


def test_sizes_per_rank_in_another_world_are_an_error_that_shows_both() -> None:
    def policy(world: int) -> ps.Pipeline:
        shard = ps.Shard(0, world)
        schedule = ps.schedule.policy("1:8-4,2:16-8")
        return ps.Pipeline.from_dataset(range(90), shard=shard, schedule=schedule)

    state = policy(2).batch().state_dict()
    with pytest.raises(ps.StateError, match=r"\[0.0,8\].* now .*\[0.0,12\]"):
        policy(3).batch().load_state_dict(state)


def test_a_resume_at_a_far_step_costs_what_one_at_a_near_step_does() -> None:
    def described_at(world: int) -> ps.Pipeline:
        schedule = ps.schedule.of(
            global_batch_size=ps.schedule.steps({0: 512, 0.25: 1024, 0.5: 2048})
        )
        shard = ps.Shard(1, world)
        data = ps.Pipeline.from_dataset(
            range(10**9), executor="inline", shard=shard, schedule=schedule
        )
        return data.shuffle(seed=1).batch()

    def resume(step: int) -> None:
        with described_at(8) as pipe:
            pipe.load_state_dict(states[step])
            next(iter(pipe))
            assert pipe.plan is not None
            assert pipe.plan.step == step + 1

    plan = described_at(2)._compiled().planned  # noqa: SLF001
    near, far = 5 * 10**5 + 1, 10**6  # past the same boundaries of the schedule
    states = {
        step: plan.state(plan.cursor_after(plan.batch(step))) for step in (near, far)
    }
    assert bytecodes(lambda: resume(far)) < 2 * bytecodes(lambda: resume(near))
    assert peak_bytes(lambda: resume(far)) < 2 * peak_bytes(lambda: resume(near))


def test_microbatches_are_equal_parts_of_a_batch() -> None:
    pipe = ps.Pipeline.from_dataset([(i, -i) for i in range(50)], shard=ps.Shard(0, 2))
    parts = next(iter(pipe.batch(8, microbatches=4)))
    assert [[c.tolist() for c in part] for part in parts] == [
        [[0, 1], [0, -1]],
        [[2, 3], [-2, -3]],
        [[4, 5], [-4, -5]],
        [[6, 7], [-6, -7]],
    ]
    with pytest.raises(ps.SpecError, match="3 microbatches on 2 ranks"):
        len(pipe.batch(8, microbatches=3))
    with pytest.raises(ps.SpecError, match="drop_last=True"):
        len(ps.Pipeline.from_dataset(range(9)).batch(2, microbatches=2))
    text = ps.Pipeline.from_dataset(list("ab"))
    texts = iter(text.batch(2, drop_last=True, microbatches=2))
    with pytest.raises(ps.SpecError, match="this batch has a str"):
        next(texts)


@pytest.mark.parametrize("lr_in_velocity", [False, True])
def test_the_optimiser_follows_while_a_scheduler_keeps_its_own_rate(
    *, lr_in_velocity: bool
) -> None:
    schedule = {"global_batch_size": 8, "lr_mult": ps.schedule.steps({0: 2, 0.5: 4})}
    pipe = described(0, 1, schedule)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ps.optim.follow(optimizer, pipe, lr_in_velocity=lr_in_velocity)
    for _ in pipe:
        assert pipe.plan is not None
        rate = 0.5**pipe.plan.step * pipe.plan.lr_mult
        assert optimizer.param_groups[0]["lr"] == rate
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        decay.step()


def test_each_run_multiplies_the_base_rate_that_is_saved_with_the_optimiser() -> None:
    saved: dict[str, Any] | None = None
    for loads_first in (False, True, False):
        pipe = described(0, 1, {"global_batch_size": 8, "lr_mult": 2.0})
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        if not loads_first:
            ps.optim.follow(optimizer, pipe)
        if saved is not None:
            optimizer.load_state_dict(saved)
        if loads_first:
            ps.optim.follow(optimizer, pipe)
        for _ in pipe:
            optimizer.step()
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["lr"] == 0.2


def test_a_parameter_group_that_is_added_later_follows_too() -> None:
    pipe = described(0, 1, {"global_batch_size": 8, "lr_mult": 2.0})
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    ps.optim.follow(optimizer, pipe)
    for _ in pipe:
        if pipe.plan is not None and pipe.plan.batch == 1:
            layer = torch.nn.Linear(1, 1)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 3.0})
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 6.0]


def test_a_velocity_of_steps_is_corrected_by_the_rates_of_the_batches() -> None:
    pipe = described(0, 1, {"global_batch_size": 8, "lr_mult": 2.0})
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ps.optim.follow(optimizer, pipe, lr_in_velocity=True)
    velocities = []
    for _ in pipe:
        if state := optimizer.state[weight]:
            velocities.append(state["momentum_buffer"].item())
        weight.grad = torch.tensor(0.0 if velocities else 1.0)
        optimizer.step()
        decay.step()
    assert velocities == [0.5**step for step in range(1, 1 + len(velocities))]


def test_an_optimiser_that_is_detached_is_left_alone() -> None:
    pipe = described(0, 1, SCHEDULES[0])
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    following = ps.optim.follow(optimizer, pipe)
    for _ in pipe:
        pass
    following.detach()
    for _ in pipe:  # its second epoch begins with batches of half the size
        assert optimizer.param_groups[0]["lr"] == 1.0


def test_users_can_check_their_own_pipeline_for_exact_resumes() -> None:
    def make() -> ps.Pipeline:
        return described(0, 1, SCHEDULES[0], workers=2)

    ps.testing.assert_exact_resume(make, epochs=2, every=3)

    def forgets() -> ps.Pipeline:
        noise = iter(range(10**6))
        return make().options(host="trainer") if next(noise) else spoilt()

    def spoilt() -> ps.Pipeline:
        stamp = time.perf_counter_ns()
        return (
            ps.Pipeline.from_dataset(range(20))
            .map(lambda index: index + stamp, executor="inline")
            .batch(4)
        )

    with pytest.raises(AssertionError, match="differs"):
        ps.testing.assert_exact_resume(forgets)


def test_the_tuner_knows_of_a_boundary_before_the_trainer_gets_there() -> None:
    sizes = ps.schedule.of(batch_size=ps.schedule.steps({0: 4, 6: 8}, "steps"))
    source = ps.Pipeline.from_dataset(np.arange(400), schedule=sizes)
    with source.map(float, executor="thread", num_parallel_workers=1).batch() as pipe:
        batches = iter(pipe)
        for _ in range(6):
            next(batches)
        while pipe.stats().regime != "batches of 8":  # type: ignore[union-attr]
            os.sched_yield()
        assert pipe.plan is not None
        assert pipe.plan.n_global == 4
