"""Bytes in flight stay under the budget plus one batch, and nothing else grows."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.engine.core.in_flight import process_byte_budget
from penstock.engine.feed import EngineHost
from support.datasets import KINDS, Numbers
from support.functions import indices

WIDTH = 1024
BATCH_BYTES = 8 * (4 * WIDTH + 8)
"""A batch of 8: `float32 [WIDTH]` and an int64 each."""

Kind = Mapping[str, Any]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def pipe_of(kind: Kind, length: int = 400) -> ps.Pipeline:
    pipe = ps.Pipeline.from_dataset(Numbers(length, WIDTH), **kind)
    return pipe.map(lambda sample: sample, **kind).batch(8)


def held(pipe: ps.Pipeline) -> tuple[int, int]:
    """Return the bytes held now, and the most held so far."""
    stats = pipe.stats()
    assert stats is not None
    return stats.held_bytes, stats.peak_bytes


def is_full(pipe: ps.Pipeline, batches: int) -> bool:
    """Wait until this many batches are held; return False if that never happens."""
    return comes(pipe, lambda: held(pipe)[0] >= batches * BATCH_BYTES)


def comes(pipe: ps.Pipeline, condition: Callable[[], bool]) -> bool:
    """Wait until it holds, checking at every change; return False if it never does."""
    run = pipe._slot.run  # noqa: SLF001 its lock tells when something moves
    assert run is not None
    change = threading.Event()
    assert isinstance(run.host, EngineHost)
    engine_lock = run.host.engine.engine_lock
    with engine_lock.lock:
        for listeners in engine_lock.listeners:
            listeners.append(change.set)
    while not condition():
        if not change.wait(60.0):
            return False
        change.clear()
    return True


@pytest.mark.parametrize(
    ("workers", "batches"),
    [
        ("inline", 1.5),
        ("2 threads", 1.5),
        ("2 threads", 3),
        ("3 processes", 3),
        ("3 processes", 6),
    ],
)
def test_the_budget_is_kept_for_a_slow_trainer(workers: str, batches: float) -> None:
    ps.set_prefetch_size(20)
    budget = int(batches * BATCH_BYTES)
    ps.set_memory_budget(budget)
    with pipe_of(KINDS[workers], 240) as pipe:
        for number, index in enumerate(indices(pipe)):
            assert index == [*range(8 * number, 8 * number + 8)]
            now, peak = held(pipe)
            assert 0 <= now <= peak <= budget + BATCH_BYTES
    assert process_byte_budget().held_bytes == 0


def test_prefetching_fills_the_budget_and_stops_there() -> None:
    ps.set_prefetch_size(40)
    ps.set_memory_budget(4 * BATCH_BYTES)
    with pipe_of(KINDS["2 threads"]) as pipe:
        loop = iter(pipe)
        next(loop)
        assert is_full(pipe, 3)
        assert held(pipe)[1] <= 5 * BATCH_BYTES
        assert len(list(loop)) == 49


@pytest.mark.parametrize("kind", [KINDS["2 threads"], KINDS["3 processes"]])
def test_two_pipelines_share_one_budget(kind: Kind) -> None:
    ps.set_prefetch_size(20)
    budget = 4 * BATCH_BYTES
    ps.set_memory_budget(budget)
    with pipe_of(kind, 160) as one, pipe_of(kind, 160) as two:
        for number, (a, b) in enumerate(zip(one, two, strict=True)):
            expected = [*range(8 * number, 8 * number + 8)]
            assert a[1].tolist() == b[1].tolist() == expected
            assert process_byte_budget().held_bytes <= budget + 2 * BATCH_BYTES
    assert process_byte_budget().held_bytes == 0


def test_a_pipeline_goes_on_although_another_holds_the_whole_budget() -> None:
    ps.set_prefetch_size(40)
    ps.set_memory_budget(4 * BATCH_BYTES)
    with pipe_of(KINDS["2 threads"]) as idle, pipe_of(KINDS["2 threads"]) as busy:
        loop = iter(idle)
        next(loop)
        assert is_full(idle, 3)
        assert len(list(busy)) == 50


def test_a_budget_raised_at_run_time_is_used() -> None:
    ps.set_prefetch_size(40)
    ps.set_memory_budget(2 * BATCH_BYTES)
    with pipe_of(KINDS["2 threads"]) as pipe:
        loop = iter(pipe)
        next(loop)
        ps.set_memory_budget(20 * BATCH_BYTES)
        assert is_full(pipe, 15)
        assert len(list(loop)) == 49


def test_a_budget_smaller_than_one_batch_is_an_error_with_its_cure(kind: Kind) -> None:
    ps.set_memory_budget(BATCH_BYTES // 2)
    with pipe_of(kind, 80) as pipe:
        with pytest.raises(ps.BudgetError, match="must hold one batch") as caught:
            next(iter(pipe))
        assert f"got {BATCH_BYTES // 2}; raise it with set_memory_budget()" in str(
            caught.value
        )
        ps.set_memory_budget(4 * BATCH_BYTES)
        pipe.set_epoch(0)
        assert len(list(pipe)) == 10


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_batch_that_does_not_fit_comes_once_the_budget_is_raised(
    kind: Kind, *, filtered: bool, keeps: bool
) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(30, WIDTH), **kind)
    pipe = pipe.filter(len, **kind) if filtered else pipe
    with pipe.batch(8).options(persistent_workers=keeps) as pipe:
        ps.set_memory_budget(BATCH_BYTES // 2)
        loop = iter(pipe)
        for _ in range(2):
            with pytest.raises(ps.BudgetError):
                next(loop)
        ps.set_memory_budget(4 * BATCH_BYTES)
        for epoch in (loop, pipe):
            assert [n for batch in epoch for n in batch[1].tolist()] == [*range(30)]


def test_after_an_epoch_and_a_close_nothing_is_held(kind: Kind) -> None:
    with pipe_of(kind, 160) as pipe:
        for _ in range(2):
            list(pipe)
        next(iter(pipe))
    assert process_byte_budget().held_bytes == 0


def test_batches_that_the_trainer_drops_do_not_accumulate() -> None:
    with pipe_of(KINDS["3 processes"], length=1200) as pipe:
        loop = iter(pipe)
        shared = set()
        for at, _ in enumerate(loop):
            if at % 20 == 0:
                shared.add(Path("/proc/self/maps").read_text().count("memfd:penstock"))
    assert max(shared) <= 24


# Batches that the trainer keeps


def test_collecting_many_batches_keeps_few_files_open_and_few_mappings() -> None:
    with pipe_of(KINDS["3 processes"], length=1600) as pipe:
        loop = iter(pipe)
        batches = [next(loop) for _ in range(20)]
        files = psutil.Process().num_fds()
        batches += [next(loop) for _ in range(170)]
        mapped = [
            Path(f"/proc/{child.pid}/maps").read_text().count("memfd:penstock")
            for child in psutil.Process().children(recursive=True)
        ]
        assert max(mapped) <= 64  # in each worker
        assert len([*batches, *loop]) == 200
        assert psutil.Process().num_fds() <= files + 16


@pytest.mark.slow
def test_fifty_thousand_batches_do_not_make_the_process_grow() -> None:
    process = psutil.Process(os.getpid())
    with pipe_of(KINDS["2 threads"], length=40_000) as pipe:
        list_of_rss: list[int] = []
        for _ in range(10):
            for _ in pipe:
                pass
            gc.collect()
            list_of_rss.append(process.memory_info().rss)
    assert list_of_rss[-1] - list_of_rss[2] < 16 * 2**20


def test_a_pipeline_between_two_epochs_gives_its_bytes_to_one_that_trains(
    kind: Kind,
) -> None:
    before = process_byte_budget().limit_bytes
    try:
        with pipe_of(kind, 80) as resting, pipe_of(kind, 1000) as training:
            first = [batch[1].tolist() for batch in resting]
            if kind is not KINDS["inline"]:  # this one prefetches nothing
                assert is_full(resting, 2)
                ps.set_memory_budget(3 * BATCH_BYTES)
                batches = iter(training)
                next(batches)
                assert comes(resting, lambda: held(resting)[0] == 0)
                assert is_full(training, 2)
            assert [batch[1].tolist() for batch in resting] == first
            assert [batch[1].tolist() for batch in resting] == first
    finally:
        ps.set_memory_budget(before)
