"""Batches reach a device ahead of the trainer, whole and unchanged.

The device is a stand-in whose copies are done when the test says so.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.config import Settings
from penstock.engine import run
from penstock.engine.batch.device import DeviceStage, ToDevice
from penstock.engine.core.in_flight import ByteBudget
from penstock.engine.feed import EngineHost
from penstock.engine.plan import Cursor, Shard
from penstock.engine.to_device.lane import DEPTH, Lane, is_ready
from penstock.engine.trainer_cost import TrainerMeter
from penstock.pipeline.compile import compile_recipe
from penstock.pipeline.stages import BatchStage, SourceStage
from support import warm
from support.batches import COLLATES, same
from support.clocked_bus import ClockedBus
from support.datasets import KINDS, Numbers
from support.given_host import Given, as_it_is, images, lane_over, taken

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.5)
STAGE = DeviceStage.of("cpu", (MEAN, STD))


# The stand-in


def test_the_stand_in_shows_a_buffer_overwritten_before_its_copy() -> None:
    bus = ClockedBus()
    memory = bus.pin(torch.ones(8, dtype=torch.uint8))
    with bus.side():
        early, late = bus.copy(memory), bus.copy(memory)
    assert early.tolist() == [0] * 8
    bus.tick()
    memory.fill_(2)
    bus.tick()
    assert (early[0].item(), late[0].item()) == (1, 2)


# Exactness


@given(
    st.lists(st.integers(1, 9), max_size=12),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=12),
)
def test_batches_equal_those_copied_in_the_trainers_thread_at_any_pace(
    rows: list[int], paces: list[tuple[int, int]]
) -> None:
    bus = ClockedBus()
    host = Given([(images(at, n), torch.arange(n) + at) for at, n in enumerate(rows)])
    lane = lane_over(bus, ToDevice(STAGE))
    paces += [(0, 0)] * (len(rows) - len(paces))
    for at, (n, (ready, ticks)) in enumerate(zip(rows, paces, strict=False)):
        host.ready = max(host.ready, at + ready)
        assert lane.cursor(host) == Cursor(0, at, at, 0)
        batch = taken(lane, host)
        assert host.place - at - 1 <= DEPTH
        bus.tick(ticks)
        bus.read()
        assert same(batch, ToDevice(STAGE)((images(at, n), torch.arange(n) + at)))
    assert lane.next(host) is None
    assert bus.from_pageable == 0


@pytest.mark.parametrize("collate", COLLATES.values(), ids=COLLATES)
def test_a_batch_of_any_content_crosses(collate: Any) -> None:
    bus, data = ClockedBus(), collate([Numbers(50)[at] for at in range(8)])
    lane = lane_over(bus)
    batch = taken(lane, Given([data]))
    bus.read()
    assert same(batch, as_it_is()(data))


def test_a_ready_batch_is_under_way_before_it_is_asked_for() -> None:
    bus, host = ClockedBus(), Given([images(at) for at in range(5)])
    lane = lane_over(bus)
    taken(lane, host)
    assert (host.place, bus.issued) == (1, 1)
    bus.tick()
    host.ready = 5
    taken(lane, host)
    assert (host.place, bus.issued) == (2 + DEPTH, 2 + DEPTH)
    assert (bus.done, bus.waited) == (1, 0)


def test_an_error_is_raised_when_its_batch_is_due() -> None:
    bus, host = ClockedBus(), Given([images(0), ValueError("its own"), images(2)])
    host.ready = 3
    lane = lane_over(bus)
    taken(lane, host)
    assert lane.cursor(host) == Cursor(0, 1, 1, 0)
    with pytest.raises(ValueError, match="its own"):
        lane.next(host)  # type: ignore[arg-type]
    assert lane.cursor(host) == Cursor(0, 2, 2, 0)
    batch = taken(lane, host)
    bus.read()
    assert torch.equal(batch, images(2))


def test_a_batch_that_cannot_be_copied_ahead_is_copied_when_it_is_due() -> None:
    """The device may have had no room for it."""
    host = Given([images(at) for at in range(6)])
    host.ready = 6
    bus = ClockedBus()
    lane = lane_over(bus)
    bus_copy, bus.copy = bus.copy, broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no room"):
        lane.next(host)  # type: ignore[arg-type]
    bus.copy = bus_copy  # type: ignore[method-assign]
    taken(lane, host)
    assert host.place == 4
    bus.copy = broken  # type: ignore[method-assign]
    taken(lane, host)
    bus.copy = bus_copy  # type: ignore[method-assign]
    for at in (3, 4, 5):
        batch = taken(lane, host)
        bus.read()
        assert torch.equal(batch, images(at))
    assert host.place == 6


def broken(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no room")


def test_batches_copied_ahead_are_dropped_when_the_trainer_goes_elsewhere() -> None:
    bus, host = ClockedBus(), Given([images(at) for at in range(9)])
    host.ready = 9
    lane = lane_over(bus)
    taken(lane, host)
    lane.drop()
    host.place = 7
    assert lane.cursor(host) == Cursor(0, 7, 7, 0)
    batch = taken(lane, host)
    bus.read()
    assert torch.equal(batch, images(7))


# Whole pipelines


def test_the_lane_looks_ahead_to_the_end_of_the_engines_epoch() -> None:
    stages = (
        SourceStage(Numbers(40), executor="thread", name="data"),
        BatchStage(4),
    )
    recipe = compile_recipe(
        stages,
        Settings(num_parallel_workers=2, prefetch_size=4, cpu_budget=1.0),
        Shard.single(),
    )
    start = recipe.planned.start(0)
    host = EngineHost(recipe, ByteBudget(1 << 30), start, TrainerMeter())
    bus = ClockedBus()
    lane = Lane(bus, as_it_is())
    outbox = host.engine.engine_lock.core.outbox  # not only its head
    ahead = []
    while True:
        head = host.engine.head
        while not all(head + at in outbox for at in range(DEPTH + 1)):
            os.sched_yield()
        if lane.next(host) is None:
            break
        bus.tick(bus.issued)
        ahead.append(len(lane._ahead))  # noqa: SLF001
    assert ahead == [2] * 8 + [1, 0]
    assert not is_ready(host, 0)
    host.close()
    lane.close()


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[ClockedBus, Lane]]]:
    """Put a clocked bus in front of every pipeline's device; return buses and lanes."""
    pairs: list[tuple[ClockedBus, Lane]] = []

    def ways_to(stage: DeviceStage | None) -> tuple[Lane | None, None]:
        if stage is None:
            return None, None
        bus = ClockedBus()
        pairs.append((bus, Lane(bus, ToDevice(stage))))
        return pairs[-1][1], None

    monkeypatch.setattr(run, "ways_to", ways_to)
    yield pairs
    pairs.clear()


def described(**how: Any) -> ps.Pipeline:
    return ps.Pipeline.from_dataset(Numbers(40), **how).shuffle(seed=3).batch(4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "kind"), [*(("trainer", kind) for kind in KINDS), ("process", "2 threads")]
)
def test_a_pipeline_gives_the_same_batches_and_states(
    lanes: list[tuple[ClockedBus, Lane]], host: Any, kind: str
) -> None:
    how = KINDS[kind]
    expected, states = [], []
    with described(**how) as plain:
        for batch in plain:
            expected.append((batch, plain.plan))
            states.append(plain.state_dict())
    with described(**how).options(host=host).to_device("cpu") as pipe:
        for _ in range(2):
            pipe.set_epoch(0)
            for at, batch in enumerate(pipe):
                lanes[-1][0].read()
                values, plan = expected[at]
                assert same(batch, values)
                assert pipe.plan == plan
                assert pipe.state_dict() == states[at]
        pipe.load_state_dict(states[3])
        for batch, (values, _) in zip(pipe, expected[4:], strict=True):
            lanes[-1][0].read()
            assert same(batch, values)
    for bus, _ in lanes:
        assert (bus.from_pageable, bus.pinned_bytes) == (0, 0)
        assert bus.done == bus.issued


def test_a_pipeline_that_is_left_early_goes_on_where_the_trainer_was(
    lanes: list[tuple[ClockedBus, Lane]],
) -> None:
    with described(executor="thread", num_parallel_workers=2) as plain:
        expected = [batch[1].tolist() for batch in plain]
    pipe = described(executor="thread", num_parallel_workers=2).to_device("cpu")
    batches: list[list[int]] = []
    with pipe:
        while len(batches) < len(expected):
            for count, batch in enumerate(pipe):
                lanes[-1][0].read()
                batches.append(batch[1].tolist())
                if count == 2:
                    pipe.load_state_dict(pipe.state_dict())
                    break
    assert batches == expected


def test_a_failing_sample_fails_its_own_batch(
    lanes: list[tuple[ClockedBus, Lane]],
) -> None:
    def picky(sample: Any) -> Any:
        if sample[1] == 21:
            raise ValueError("21 again")
        return sample

    pipe = ps.Pipeline.from_dataset(Numbers(40)).map(picky, executor="thread").batch(4)
    with pipe.to_device("cpu") as device_pipe:
        batches = iter(device_pipe)
        for step in range(5):
            next(batches)
            assert device_pipe.plan is not None
            assert device_pipe.plan.step == step
        with pytest.raises(ValueError, match="21 again"):
            next(batches)
    assert len(lanes) == 1


@pytest.mark.parametrize("how", [KINDS["2 threads"], KINDS["3 processes"]])
def test_no_part_of_a_batch_outlives_its_pipeline(
    lanes: list[tuple[ClockedBus, Lane]], how: Any
) -> None:
    with described(**how).to_device("cpu") as pipe:
        batches = iter(pipe)
        references: list[Callable[[], object]] = [
            weakref.ref(next(batches)[0]) for _ in range(3)
        ]
    del batches
    assert [reference() for reference in references] == [None] * 3
    (bus, lane) = lanes[0]
    assert bus.registered == {}
    assert not lane._ahead  # noqa: SLF001
    assert not lane._carrier._under_way  # noqa: SLF001


WITHOUT_CUDA = """
import sys, threading, penstock as ps
for device in "cpu", "meta":
    pipe = ps.Pipeline.from_dataset(range(8)).batch(4).to_device(device)
    assert len(list(pipe)) == 2
    pipe.close()
assert threading.active_count() == 1, threading.enumerate()
print(*(name for name in sys.modules if name.startswith("penstock.engine.to_dev")))
"""


@pytest.mark.long
def test_no_code_for_cuda_is_loaded_without_a_cuda_device() -> None:
    process = warm.run([sys.executable, "-P", "-c", WITHOUT_CUDA], brief=True)
    assert (process.returncode, process.stdout.split()) == (0, []), process.stderr
