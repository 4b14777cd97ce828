"""Knobs turn while the pipeline runs: nothing is lost, repeated or reordered."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import psutil
import pytest
import torch

import penstock as ps
from penstock.engine import workers
from support.datasets import WORKERS, Numbers
from support.functions import augment, digest, waits
from support.leaks import children
from support.thread_limit import no_more_threads

LENGTH = 400
BATCH = 8


def pipe_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> ps.Pipeline:
    """Two segments with a connector between them, each with work to do."""
    return (
        ps.Pipeline.from_dataset(Numbers(LENGTH), **first)
        .shuffle(seed=1)
        .map(augment, **second)
        .map(partial(waits, wait_s=0.0002), **second)
        .batch(BATCH)
    )


class Restless(threading.Thread):
    """Turns a pipeline's knobs at random, a given number of times."""

    def __init__(self, pipe: ps.Pipeline, turns: int, *, most: int, names: str) -> None:
        super().__init__(name="restless")
        self.turned = 0
        self._pipe = pipe
        self._left = turns
        self._most = most
        self._names = names
        self._dice = random.Random(0)
        self.step = threading.Semaphore(0)
        """One turn is allowed for each release; the trainer paces them."""

    @property
    def over(self) -> bool:
        return self.turned >= self._left

    def run(self) -> None:
        run = self._pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
        assert run is not None
        knobs = [knob for knob in run.knobs() if knob.name in self._names.split()]
        assert knobs
        while not self.over:
            self.step.acquire()
            knob = self._dice.choice(knobs)
            before = knob.value
            others = [n for n in range(1, self._most + 1) if n != before]
            knob.set(self._dice.choice(others))
            self.turned += knob.value != before


@contextlib.contextmanager
def turning(pipe: ps.Pipeline, turns: int, most: int, names: str) -> Iterator[Restless]:
    thread = Restless(pipe, turns, most=most, names=names)
    thread.start()
    try:
        yield thread
    finally:
        thread.step.release(turns)  # where the loop was left
        thread.join()


def train(
    pipe: ps.Pipeline, turns: int, *, most: int, names: str, per_batch: int
) -> tuple[int, str]:
    """Run whole epochs, `per_batch` turns for each, until all turns are done."""
    batches: list[Any] = []
    epochs = 0
    loop = iter(pipe)
    with turning(pipe, turns, most, names) as restless:
        while not restless.over:
            for batch in loop:
                restless.step.release(per_batch)
                batches.append(batch)
            epochs += 1
            loop = iter(pipe)
        batches += loop
    assert restless.turned == turns
    return epochs + 1, digest(batches)


def undisturbed(epochs: int) -> str:
    inline = WORKERS["inline"]
    with pipe_of(inline, inline) as pipe:
        return digest([batch for _ in range(epochs) for batch in pipe])


def test_hundreds_of_changes_of_thread_counts_under_load() -> None:
    workers = WORKERS["2 threads"]
    with pipe_of(workers, workers) as pipe:
        names = "num_parallel_workers"
        epochs, content = train(pipe, 400, most=9, names=names, per_batch=5)
    assert content == undisturbed(epochs)


def test_dozens_of_changes_of_process_counts_under_load() -> None:
    workers = WORKERS["3 processes"]
    with pipe_of(workers, workers) as pipe:
        names = "num_parallel_workers"
        epochs, content = train(pipe, 36, most=5, names=names, per_batch=1)
    assert content == undisturbed(epochs)


def test_hundreds_of_changes_of_prefetch_sizes_under_load() -> None:
    workers = WORKERS["2 threads"]
    with pipe_of(workers, workers) as pipe:
        epochs, content = train(pipe, 400, most=12, names="prefetch_size", per_batch=5)
    assert content == undisturbed(epochs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2 threads", "3 processes"),
        pytest.param("3 processes", "2 threads", marks=pytest.mark.slow),
    ],
)
def test_all_knobs_of_mixed_kinds_may_be_turned_at_once(
    first: str, second: str
) -> None:
    with pipe_of(WORKERS[first], WORKERS[second]) as pipe:
        names = "num_parallel_workers prefetch_size"
        epochs, content = train(pipe, 96, most=5, names=names, per_batch=2)
    assert content == undisturbed(epochs)


@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
def test_there_are_as_many_workers_as_requested(workers: str) -> None:
    pipe = (
        ps.Pipeline.from_dataset(Numbers(2000, wait_s=0.001), **WORKERS[workers])
    ).batch(4)
    with pipe:
        loop = iter(pipe)
        next(loop)
        run = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
        assert run is not None
        knob = next(k for k in run.knobs() if k.name == "num_parallel_workers")
        for count in (5, 1, 4, 2):
            knob.set(count)
            for _ in loop:
                stats = pipe.stats()
                assert stats is not None
                if stats.segments[0].alive == count:
                    break
            else:
                pytest.fail(f"{count} workers were requested, and never existed")


def test_a_kind_that_is_no_longer_requested_moves_nobody() -> None:
    with ps.Pipeline.from_dataset(Numbers(LENGTH), **WORKERS["2 threads"]).batch(
        BATCH
    ) as pipe:
        loop = iter(pipe)
        next(loop)
        run: Any = pipe._slot.run  # noqa: SLF001 the way to its engine
        (segment,) = run.host.engine.segments
        segment.request("process", 2)
        segment.request("thread", 1)
        next(loop)
        assert (segment.executor, segment.num_parallel_workers) == ("thread", 1)
        assert not segment.moving


def test_threads_that_cannot_start_do_not_count() -> None:
    with ps.Pipeline.from_dataset(Numbers(LENGTH), **WORKERS["2 threads"]).batch(
        BATCH
    ) as pipe:
        loop = iter(pipe)
        next(loop)
        run: Any = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
        knob = next(k for k in run.knobs() if k.name == "num_parallel_workers")
        with no_more_threads(), pytest.raises(RuntimeError, match="new thread"):
            knob.set(4)
        assert knob.value == run.read().segments[0].alive == 2
        knob.set(3)
        assert run.read().segments[0].alive == 3
        assert len(list(loop)) == LENGTH // BATCH - 1


def test_a_worker_that_cannot_start_its_thread_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = workers.use_one_torch_thread  # starts a thread for a moment

    def limited() -> None:
        with no_more_threads():
            begin()

    monkeypatch.setattr(workers, "use_one_torch_thread", limited)
    pipe = ps.Pipeline.from_dataset(Numbers(LENGTH), **WORKERS["2 threads"])
    try:
        with pipe.batch(BATCH) as pipe, pytest.raises(RuntimeError, match="new thread"):
            next(iter(pipe))
    finally:  # the worker made one thread the default, for itself
        torch.set_num_threads(torch.get_num_threads())


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
@pytest.mark.parametrize("round_", range(2))
def test_thousands_of_changes_round_after_round(workers: str, round_: int) -> None:
    with pipe_of(WORKERS[workers], WORKERS[workers]) as pipe:
        names = "num_parallel_workers prefetch_size"
        epochs, content = train(pipe, 2000, most=6 + round_, names=names, per_batch=4)
    assert content == undisturbed(epochs)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(2))
def test_fifty_random_kills_while_resizing_change_no_byte(round_: int) -> None:
    dice = random.Random(round_)
    workers = WORKERS["3 processes"]
    killed: set[int] = set()
    batches: list[Any] = []
    epochs = 0
    with pipe_of(workers, workers) as pipe:
        while len(killed) < 50:
            for batch in pipe:
                batches.append(batch)
                killed.update(kill_a_worker(dice))
                run = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
                assert run is not None
                dice.choice(run.knobs()).set(dice.randint(1, 5))
            epochs += 1
    assert digest(batches) == undisturbed(epochs)


def kill_a_worker(dice: random.Random) -> list[int]:
    """Kill a grandchild every other time: our children are fork servers."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it is retiring just now
        workers = [
            worker for fork_server in children() for worker in fork_server.children()
        ]
        if workers and dice.random() < 0.5:
            victim = dice.choice(workers)
            victim.kill()
            return [victim.pid]
    return []
