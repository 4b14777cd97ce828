"""The verdict names whatever the test made slow, and why.

Where something sleeps, a busy machine does not make that shorter, so the verdict is the
same there. What only a quiet machine shows is marked `quiet`. The rules themselves are
tried on made windows: see `autotune/test_causes.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import penstock as ps
from penstock.autotune.causes import TUNE
from penstock.autotune.explain import Explanation
from penstock.engine.batch.device import ToDevice

SEEN_S = 1.2
DEADLINE_S = 60.0
"""A busy machine gets more time to see the same."""
STEP_S = 0.004
READ, COLLATE = "Dataset(ID:0) Reads", "Batch(ID:1)"
FOREIGN = "while others use them"
"""The verdict on a machine whose cores others use, where it is right."""
SMALL = np.zeros((16, 16), np.float32)
LARGE = np.zeros((1024, 1024), np.float32)


class Reads:
    """Reading a sample takes this long."""

    def __init__(self, wait_s: float = 0.0, sample: Any = SMALL) -> None:
        self.wait_s = wait_s
        self.sample = sample

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        return self.sample


class Straggles(Reads):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.3 if index % 50 == 25 else 0.001)
        return self.sample


class Computes(Reads):
    def __getitem__(self, index: int) -> Any:
        computes(SMALL)
        return self.sample


class NeedsTheGil(Reads):
    def __getitem__(self, index: int) -> Any:
        sum(range(200_000))
        return self.sample


class Streams(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Reads(0.004).__getitem__, range(100_000))


def cheap(sample: Any) -> Any:
    return sample + 1


NUMBERS = np.random.default_rng(0).random(20_000)


def computes(sample: Any) -> Any:
    """Sort for three milliseconds of a core, without the GIL."""
    end_s = time.thread_time() + 0.003
    while time.thread_time() < end_s:
        np.sort(NUMBERS)
    return sample


def waits(batch: Any) -> Any:
    time.sleep(0.03)
    return batch


def collates(rows: list[Any]) -> Any:
    time.sleep(0.03)
    return torch.from_numpy(np.stack(rows))


def threads(data: Any, count: int, batch: int = 8) -> ps.Pipeline:
    options: Any = {"executor": "thread", "num_parallel_workers": (count, count)}
    return ps.Pipeline.from_dataset(data, **options).batch(batch)


def loader(data: Any, workers: int, **options: Any) -> Any:
    return ps.DataLoader(data, batch_size=8, num_workers=workers, **options)


def told(face: Any, right: Callable[[Explanation], bool], step_s: float) -> Explanation:
    """Train with tuning until the verdict is right, or for long enough."""
    ps.set_enable_autotune(True)
    begun_s = time.monotonic()
    batches = chain.from_iterable(repeat(face))
    for _ in batches:
        time.sleep(step_s)
        passed_s = time.monotonic() - begun_s
        if passed_s > SEEN_S:
            explanation: Explanation = face.explain()
            if right(explanation) or passed_s > DEADLINE_S:
                break
    del batches
    face.close()
    return explanation


def check(face: Any, stage: str, *causes: str, step_s: float = STEP_S) -> Explanation:
    def right(explanation: Explanation) -> bool:
        is_named = explanation.cause.startswith(causes) or explanation.cause.endswith(
            f"{FOREIGN}."
        )
        return explanation.bottleneck == stage and is_named

    explanation = told(face, right, step_s)
    assert right(explanation), str(explanation)
    return explanation


WAITING = "waiting reads"


def quiet(test: Any) -> Any:
    """Run this test alone, and with all tests only: it needs cores of its own."""
    return pytest.mark.slow(pytest.mark.serial(test))


def test_nobody_is_advised_to_tune_what_was_tuned() -> None:
    with ps.Pipeline.from_dataset(Reads(0.004), executor="thread").batch(8) as pipe:
        batches, deadline_s = iter(pipe), time.monotonic() + DEADLINE_S
        untuned = ""
        while TUNE not in untuned and time.monotonic() < deadline_s:
            untuned = [next(batches) for _ in range(20)] and str(pipe.explain())
        ps.set_enable_autotune(True)
        next(batches)
        ps.set_enable_autotune(False)
        tuned = str(pipe.explain())
    assert TUNE in untuned
    assert TUNE not in tuned


@pytest.mark.parametrize(
    "workers", [0, pytest.param(2, marks=(pytest.mark.slow, pytest.mark.serial))]
)
def test_a_slow_read_in_a_loader_is_named(workers: int) -> None:
    check(loader(Reads(0.02), workers), READ, WAITING)


@quiet
def test_a_slow_read_fused_with_a_cheap_map_is_named() -> None:
    check(ps.Pipeline.from_dataset(Reads(0.02)).map(cheap).batch(8), READ, WAITING)


@quiet
def test_a_slow_map_fused_with_a_cheap_read_is_named() -> None:
    pipe = ps.Pipeline.from_dataset(Reads()).map(computes).batch(8)
    check(pipe, "Map(ID:1) computes", "CPU")


@quiet
@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_collate_fn_of_a_loader_is_named(workers: int) -> None:
    check(loader(Reads(), workers, collate_fn=collates), COLLATE, "collate")


def test_a_slow_collate_fn_that_the_trainer_calls_is_named() -> None:
    source = ps.Pipeline.from_dataset(Reads(), executor="thread")
    explanation = check(source.batch(8, collate_fn=collates), COLLATE, "collate")
    assert explanation.advice == ()


@quiet
def test_a_slow_map_of_whole_batches_is_named() -> None:
    pipe = ps.Pipeline.from_dataset(Reads()).batch(8)
    slow = pipe.map(waits, num_parallel_workers=(1, 1), executor="thread")
    check(slow, "Map(ID:2) waits", WAITING)


@quiet
@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_trainer_is_named(workers: int) -> None:
    def right(explanation: Explanation) -> bool:
        return explanation.cause.startswith("the trainer")

    explanation = told(loader(Reads(), workers), right, 0.5)
    assert right(explanation), str(explanation)
    assert explanation.bottleneck is None


@quiet
def test_stragglers_with_a_small_prefetch_are_named() -> None:
    ps.set_prefetch_size(2)
    stage = "Dataset(ID:0) Straggles"
    check(threads(Straggles(), 4), stage, "uneven samples", step_s=0.04)


@quiet
def test_a_memory_budget_that_is_the_limit_is_named() -> None:
    ps.set_memory_budget("20MB")
    explanation = check(
        threads(Reads(0.05, LARGE), 8, 2), READ, "the memory budget: workers"
    )
    assert [line.partition("  #")[0] for line in explanation.advice] == [
        'ps.set_memory_budget("39MiB")'
    ]


@quiet
def test_batches_too_large_for_the_memory_budget_are_named() -> None:
    ps.set_memory_budget("10MB")
    pipe = threads(Reads(0.05, LARGE), 8, 2)
    check(pipe, READ, "the memory budget: it has room for only one batch")


@quiet
def test_a_segment_without_input_is_not_blamed() -> None:
    one: Any = {"executor": "thread", "num_parallel_workers": (1, 1)}
    source = ps.Pipeline.from_dataset(Reads(0.01), **one)
    explanation = check(source.map(cheap, executor="thread").batch(8), READ, WAITING)
    assert "so cheap has no input" in explanation.cause or FOREIGN in explanation.cause


def test_a_slow_transfer_to_the_device_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = ToDevice.__call__

    def slow(self: ToDevice, data: Any, carry: Any = None) -> Any:
        time.sleep(0.02)
        return there(self, data, carry)

    monkeypatch.setattr(ToDevice, "__call__", slow)
    pipe = ps.Pipeline.from_dataset(Reads()).batch(8).to_device("cpu")
    explanation = check(pipe, "to_device", "the transfer to the device")
    assert "(to_device " in explanation.line


@quiet
def test_turns_at_the_gil_are_named() -> None:
    stage = "Dataset(ID:0) NeedsTheGil"
    check(threads(NeedsTheGil(), 4), stage, "the GIL")


@quiet
@pytest.mark.parametrize(("batch", "executor"), [(2, "thread"), (32, "inline")])
def test_one_worker_reads_an_iterable_whatever_the_trainer_needs(
    batch: int, executor: str
) -> None:
    """A thread takes it over where that saves much of a step, and only there."""
    pipe = ps.Pipeline.from_dataset(Streams()).batch(batch)
    explanation = check(pipe, "Dataset(ID:0) Streams", WAITING)
    assert explanation.stages[0].executor == executor
    assert (
        "one worker reads an iterable" in explanation.cause
        or FOREIGN in explanation.cause
    )
    assert explanation.advice == ()


@quiet
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_that_torch_loads_is_named(workers: int) -> None:
    who = "torch's own workers load" if workers else "the trainer itself loads"
    check(loader(Streams(), workers), "Dataset(ID:0) Streams", who)


def spins() -> None:
    while True:
        pass


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Keep each core busy three times over."""
    context = multiprocessing.get_context("fork")
    count = 3 * (os.cpu_count() or 1)
    processes = [context.Process(target=spins, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()
        process.close()


@quiet
@pytest.mark.usefixtures("busy_cores")
def test_a_trainer_that_loads_by_itself_and_loses_its_core_is_named() -> None:
    source = ps.Pipeline.from_dataset(Computes(), executor="inline")
    explanation = check(source.batch(2), "Dataset(ID:0) Computes", "CPU")
    assert FOREIGN in explanation.cause


@quiet
@pytest.mark.usefixtures("busy_cores")
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_lose_their_cores_are_named(workers: int) -> None:
    explanation = check(loader(Computes(), workers), "Dataset(ID:0) Computes", "CPU")
    assert FOREIGN in explanation.cause


@pytest.mark.parametrize(
    ("given", "advised"), [({}, True), ({"num_workers": 0}, False)]
)
def test_nobody_is_promised_a_gain_by_tuning_what_stays(
    given: dict[str, int], *, advised: bool
) -> None:
    """The program says `num_workers=0`, so the trainer would go on to load."""
    loader = ps.DataLoader(Reads(0.02), batch_size=2, **given)
    for step, _ in enumerate(loader):
        if step == 5:
            break
    explanation = loader.explain()
    assert (TUNE in str(explanation)) == advised
    assert ("at most" in str(explanation.advice)) == advised
