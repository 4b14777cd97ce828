"""Coroutine functions as stages: hundreds wait in one thread, the batches are the same.

Reads wait for each other, so that nothing depends on timing.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.engine.observe.observation import Knob
from support.coroutines import hand_on, pipe_of
from support.datasets import KINDS, Counting, Numbers, Sample
from support.functions import augment, digest, indices


async def augment_async(sample: Sample, rng: np.random.Generator) -> Sample:
    """Do what `augment` does, while others draw in between."""
    values, index = sample
    for _ in range(index % 3):
        await asyncio.sleep(0)
    return values + rng.random(values.shape, np.float32), index


class Caller:
    """Callable like a coroutine function, without being one."""

    async def __call__(self, sample: Any) -> Any:
        return await hand_on(sample)


class Crowd:
    """Holds those who enter until this many are inside at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.inside = 0
        self.threads = 0
        """The number of Python threads when the crowd was complete."""
        self._full = asyncio.Event()

    async def enter(self) -> None:
        self.inside += 1
        if self.inside == self.size:
            self.threads = threading.active_count()
            self._full.set()
        await self._full.wait()


class Remote:
    """Sample i is i, read once enough other reads wait too.

    The first `free` samples come without waiting, so that the size of a batch is known,
    and that reads take long enough to be leased one by one.
    """

    def __init__(self, length: int, crowd: Crowd, free: int) -> None:
        self.length = length
        self.crowd = crowd
        self.free = free

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> int:
        if index < self.free:
            await asyncio.sleep(0.02)
        else:
            await self.crowd.enter()
        return index


def executors(pipe: ps.Pipeline) -> list[str]:
    return [stage["executor"] for stage in pipe.explain().to_dict()["stages"]]


def permits_of(pipe: ps.Pipeline) -> Knob:
    run = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
    assert run is not None
    (knob,) = (k for k in run.knobs() if k.name == "num_parallel_workers")
    return knob


# Many wait in one thread


def test_a_thousand_reads_wait_in_one_additional_thread() -> None:
    crowd = Crowd(1000)
    data = Remote(1050, crowd, free=50)
    before = threading.active_count()
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=1000).batch(50)
    with pipe:
        assert [n for batch in pipe for n in batch.tolist()] == list(range(1050))
    assert crowd.threads == before + 1


def test_64_wait_at_once_where_nobody_says_how_many() -> None:
    crowd = Crowd(64)
    with ps.Pipeline.from_dataset(Remote(72, crowd, free=8)).batch(8) as pipe:
        assert len(list(pipe)) == 9
        assert executors(pipe) == ["async"]


# The batches are the same


def two_epochs(first: Mapping[str, Any], *maps: tuple[Any, Mapping[str, Any]]) -> str:
    pipe = ps.Pipeline.from_dataset(Numbers(50), **first).shuffle(seed=3)
    for function, settings in maps:
        pipe = pipe.map(function, **settings)
    with pipe.batch(8) as pipe:
        return digest([*pipe, *pipe])


@pytest.fixture(scope="module")
def expected() -> str:
    inline = KINDS["inline"]
    return two_epochs(inline, (augment, inline), (augment, inline))


@pytest.mark.parametrize("permits", [1, 3, 200, None])
def test_two_epochs_are_byte_identical_to_inline(
    permits: int | None, expected: str
) -> None:
    settings = {"num_parallel_workers": permits}
    stage = (augment_async, settings)
    assert two_epochs({}, stage, stage) == expected


@pytest.mark.parametrize("other", KINDS)
def test_other_workers_before_and_after_pass_on_the_same_bytes(
    other: str, expected: str
) -> None:
    kind, stage = KINDS[other], (augment_async, {})
    assert two_epochs(kind, (augment, kind), stage) == expected
    assert two_epochs(kind, stage, (augment, kind)) == expected


def test_an_iterable_keeps_its_order() -> None:
    pipe = ps.Pipeline.from_dataset(Counting(50)).map(augment_async).batch(8)
    with pipe:
        order = [index for batch in indices(pipe) for index in batch]
    assert order == list(range(50))


def test_a_coroutine_function_may_filter() -> None:
    async def is_even(sample: Sample) -> bool:
        await asyncio.sleep(0)
        return sample[1] % 2 == 0

    with ps.Pipeline.from_dataset(Numbers(40)).filter(is_even).batch(5) as pipe:
        assert list(indices(pipe)) == [
            list(range(at, at + 10, 2)) for at in range(0, 40, 10)
        ]


def test_ctx_is_that_of_the_batch() -> None:
    async def step_of(sample: Any, ctx: Any) -> int:
        return int(ctx.step)

    with pipe_of(step_of, length=32) as pipe:
        assert [batch.tolist() for batch in pipe] == [[step] * 8 for step in range(4)]


def test_the_trainer_may_run_in_an_event_loop_too() -> None:
    async def train() -> list[list[int]]:
        with pipe_of(hand_on, length=16) as pipe:
            return list(indices(pipe))

    assert asyncio.run(train()) == [list(range(8)), list(range(8, 16))]


# Which functions are awaited, and what runs them


@pytest.mark.parametrize("function", [hand_on, Caller(), partial(partial(hand_on))])
def test_auto_chooses_an_event_loop_for_everything_awaited(function: Any) -> None:
    with pipe_of(function, length=16) as pipe:
        assert list(indices(pipe)) == [list(range(8)), list(range(8, 16))]
        assert executors(pipe)[-1] == "async"


def test_adjacent_stages_of_another_kind_stay_separate_and_movable() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(8)).map(hand_on).map(hand_on).map(str)
    with pipe.batch(8) as pipe:
        list(pipe)
        assert executors(pipe) == ["inline", "async", "inline"]


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_other_workers_refuse_a_coroutine_function(executor: Any) -> None:
    source = ps.Pipeline.from_dataset(Numbers(8))
    with pytest.raises(ps.SpecError, match="hand_on is a coroutine.*leave `executor`"):
        source.map(hand_on, executor=executor)


@pytest.mark.parametrize("stage", ["map", "filter"])
def test_an_event_loop_refuses_a_plain_function(stage: str) -> None:
    source = ps.Pipeline.from_dataset(Numbers(8))
    with pytest.raises(ps.SpecError, match="got str, which is a plain one"):
        getattr(source, stage)(str, executor="async")


def test_an_event_loop_refuses_a_plain_dataset_and_an_iterable() -> None:
    with pytest.raises(ps.SpecError, match="got __getitem__, which is a plain one"):
        ps.Pipeline.from_dataset(Numbers(8), executor="async")
    with pytest.raises(ps.SpecError, match="is for its map"):
        ps.Pipeline.from_dataset(Counting(8), executor="async")


# Knobs turn


def test_more_permits_let_more_wait_at_once() -> None:
    crowd = Crowd(40)
    data = Remote(88, crowd, free=8)
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=2).batch(8)
    with pipe:
        batches = iter(pipe)
        next(batches)
        permits_of(pipe).set(40)
        assert len(list(batches)) == 10


def test_surplus_permits_leave_when_their_lease_ends() -> None:
    inside = 0
    counts: dict[int, int] = {}

    async def count(sample: Sample) -> Sample:
        nonlocal inside
        inside += 1
        await asyncio.sleep(0)
        counts[sample[1]] = inside
        inside -= 1
        return sample

    with pipe_of(count, length=800, num_parallel_workers=30) as pipe:
        for step, _ in enumerate(pipe):
            if step == 20:
                permits_of(pipe).set(1)
    assert {counts[index] for index in range(600, 800)} == {1}


def test_turning_knobs_changes_no_byte() -> None:
    dice = random.Random(0)
    with pipe_of(augment_async, length=400, num_parallel_workers=5) as pipe:
        turned = []
        for batch in pipe:
            turned.append(batch)
            permits_of(pipe).set(dice.randrange(1, 60))
    with pipe_of(augment_async, length=400, num_parallel_workers=1) as pipe:
        assert digest(turned) == digest(pipe)


CALLS = contextvars.ContextVar("CALLS", default=0)


async def calls_in_this_context(_: object) -> int:
    CALLS.set(CALLS.get() + 1)
    await asyncio.sleep(0)
    return CALLS.get()


def test_what_a_function_binds_in_its_context_ends_with_the_lease() -> None:
    """A tracing span or the like does not pile up as long as the workers live."""
    data = ps.Pipeline.from_dataset(list(range(400)))
    with data.map(calls_in_this_context, num_parallel_workers=4).batch(8) as pipe:
        counts = torch.cat([*pipe])
    assert counts.max() <= 8  # no lease is longer than a batch
