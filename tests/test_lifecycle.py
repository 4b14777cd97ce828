"""However a loop ends, nothing of it stays; however a worker ends, the data is the same.

That nothing stays is looked at around every test (conftest.py).
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from support.datasets import KINDS, WORKERS, Numbers
from support.functions import augment, digest, indices, pids, waits

LENGTH = 160
EPOCH = 20
"""Batches of 8."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pipe_of(kind: str, length: int = LENGTH, wait_s: float = 0.0) -> ps.Pipeline:
    workers = WORKERS[kind]
    pipe = ps.Pipeline.from_dataset(Numbers(length), **workers).shuffle(seed=2)
    pipe = pipe.map(augment, **workers)
    if wait_s:
        pipe = pipe.map(partial(waits, wait_s=wait_s), **workers)
    return pipe.batch(8)


def expected(epochs: int = 1) -> str:
    with pipe_of("inline") as pipe:
        return digest([batch for _ in range(epochs) for batch in pipe])


def children() -> list[psutil.Process]:
    """Templates and workers of this process."""
    return [p for p in psutil.Process().children(recursive=True) if p.is_running()]


def workers_of(pipe: ps.Pipeline) -> int:
    """Workers now alive; 0 once its run is closed."""
    stats = pipe.stats()
    return 0 if stats is None else sum(len(s.workers) for s in stats.segments)


# A loop that is left early


def test_break_stops_the_workers(kind: str) -> None:
    pipe = pipe_of(kind)
    for _ in pipe:
        break
    assert workers_of(pipe) == 0
    assert children() == []


def test_an_exception_in_the_loops_body_stops_the_workers(kind: str) -> None:
    pipe = pipe_of(kind)
    with pytest.raises(ZeroDivisionError):
        for batch in pipe:
            batch[1] // 0
            raise ZeroDivisionError
    assert workers_of(pipe) == 0


def test_close_stops_the_workers_and_the_loop(kind: str) -> None:
    pipe = pipe_of(kind)
    loop = iter(pipe)
    next(loop)
    pipe.close()
    assert workers_of(pipe) == 0
    with pytest.raises(ps.PenstockError, match="closed; iterate it again"):
        next(loop)
    pipe.close()


def test_a_closed_pipeline_may_be_iterated_again(kind: str) -> None:
    with pipe_of(kind) as pipe:
        next(iter(pipe))
        pipe.close()
        pipe.set_epoch(0)
        assert digest(pipe) == expected()


def test_close_from_another_thread_ends_a_waiting_loop() -> None:
    with pipe_of("2 threads", length=10**6, wait_s=0.001) as pipe:
        loop = iter(pipe)
        next(loop)
        closer = threading.Thread(target=pipe.close)
        closer.start()
        with pytest.raises(ps.PenstockError, match="closed"):
            for _ in loop:
                pass
        closer.join()


def test_leaving_the_with_stops_the_workers(kind: str) -> None:
    with pytest.raises(KeyError), pipe_of(kind) as pipe:
        next(iter(pipe))
        next(loop := iter(pipe))
        raise KeyError(loop)
    assert workers_of(pipe) == 0


@pytest.mark.parametrize("first", ["pipe", "loop"])
def test_dropping_both_in_either_order_stops_the_workers(kind: str, first: str) -> None:
    held: dict[str, Any] = {"pipe": pipe_of(kind)}
    held["loop"] = iter(held["pipe"])
    next(held["loop"])
    engine = weakref.ref(held["pipe"]._slot.run)  # noqa: SLF001 whether it is gone
    del held[first]
    if first == "pipe":
        assert next(held["loop"]) is not None
    held.clear()
    assert engine() is None
    assert children() == []


def test_dropping_an_idle_pipeline_stops_its_workers(kind: str) -> None:
    pipe = pipe_of(kind)
    assert len(list(pipe)) == EPOCH
    engine = weakref.ref(pipe._slot.run)  # noqa: SLF001 whether it is gone
    assert engine() is not None
    del pipe
    assert engine() is None
    assert children() == []


def test_the_collector_may_close_a_loop(kind: str) -> None:
    pipe = pipe_of(kind)
    loop: Any = iter(pipe)
    next(loop)
    ring = [loop]
    ring.append(ring)
    del loop, ring
    gc.collect()
    assert workers_of(pipe) == 0


def test_a_second_loop_ends_the_first(kind: str) -> None:
    with pipe_of(kind) as pipe:
        first = iter(pipe)
        next(first)
        second = iter(pipe)
        next(second)
        with pytest.raises(ps.PenstockError, match="closed"):
            next(first)
        assert len(list(second)) == EPOCH - 1


def test_a_finished_loop_stays_finished(kind: str) -> None:
    with pipe_of(kind) as pipe:
        loop = iter(pipe)
        assert len(list(loop)) == EPOCH
        again = iter(pipe)
        assert next(loop, None) is None
        assert len(list(again)) == EPOCH


# The next epoch


def test_the_next_epochs_first_batches_are_loaded_ahead() -> None:
    with pipe_of("2 threads") as pipe:
        list(pipe)
        read = sum(segment.total.rows for segment in rows_settled(pipe, 2 * LENGTH + 32))
        assert read > 2 * LENGTH
        before = pipe.stats()
        loop = iter(pipe)
        assert pipe.plan is not None
        next(loop)
        after = pipe.stats()
    assert before is not None
    assert after is not None
    assert after.trainer.steps == before.trainer.steps + 1


def rows_settled(pipe: ps.Pipeline, rows: int) -> Any:
    """Wait until the workers have finished so many rows over all segments."""
    knobs = pipe._slot.run  # noqa: SLF001 its gate tells when something moves
    assert knobs is not None
    gate = knobs.run.engine.gate
    event = threading.Event()
    with gate:
        for bells in gate.bells.values():
            bells.append(event.set)
    while True:
        event.clear()
        stats = pipe.stats()
        assert stats is not None
        if sum(segment.total.rows for segment in stats.segments) >= rows:
            return stats.segments
        if not event.wait(5.0):
            pytest.fail(f"the workers stopped short: {stats}")


def test_set_epoch_drops_what_was_loaded_ahead_and_is_right(kind: str) -> None:
    with pipe_of(kind) as pipe:
        epochs = [digest(pipe) for _ in range(4)]
        for epoch in (3, 0, 0, 2, 1):
            pipe.set_epoch(epoch)
            assert digest(pipe) == epochs[epoch]
        assert digest(pipe) == epochs[2]


def test_set_epoch_after_a_break_starts_that_epoch(kind: str) -> None:
    with pipe_of(kind) as pipe:
        epochs = [digest(pipe) for _ in range(2)]
        for _ in pipe:
            break
        pipe.set_epoch(1)
        assert digest(pipe) == epochs[1]


# Several at once


def test_two_pipelines_at_once_do_not_disturb_each_other(kind: str) -> None:
    with pipe_of(kind) as one, pipe_of(kind) as two:
        pairs = list(zip(one, two, strict=True))
        assert digest(a for a, _ in pairs) == digest(b for _, b in pairs) == expected()


def test_two_pipelines_may_run_in_two_threads(kind: str) -> None:
    found: dict[int, str] = {}

    def train(number: int) -> None:
        with pipe_of(kind) as pipe:
            found[number] = digest([*pipe, *pipe])

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == [expected(epochs=2)] * 2


# Batches outlive what made them


def test_batches_stay_valid_and_unchanged_for_as_long_as_they_are_held(
    kind: str,
) -> None:
    with pipe_of(kind) as pipe:
        held = [batch for _ in range(2) for batch in pipe]
        early = digest(held[:5])
        for _ in pipe:
            pass
        assert digest(held[:5]) == early
    assert digest(held) == expected(epochs=2)


def test_a_part_of_a_batch_keeps_its_memory(kind: str) -> None:
    with pipe_of(kind) as pipe:
        parts = [batch[0][1:3].numpy() for _ in range(3) for batch in pipe]
        copies = [part.copy() for part in parts]
        for _ in pipe:
            pass
    assert all((part == copy).all() for part, copy in zip(parts, copies, strict=True))
    with pipe_of(kind) as pipe:
        rows = [batch[0][1:3].numpy() for _ in range(3) for batch in pipe]
    assert all((part == row).all() for part, row in zip(parts, rows, strict=True))


def test_collecting_many_batches_of_processes_keeps_few_files_open() -> None:
    with pipe_of("3 processes", length=1600) as pipe:
        loop = iter(pipe)
        held = [next(loop) for _ in range(20)]
        files = psutil.Process().num_fds()
        held += loop
        assert len(held) == 200
        assert psutil.Process().num_fds() <= files + 16


def test_collecting_many_batches_leaves_few_mapped_in_the_workers() -> None:
    with pipe_of("3 processes", length=3200) as pipe:
        loop = iter(pipe)
        held = [next(loop) for _ in range(390)]
        mapped = [
            Path(f"/proc/{child.pid}/maps").read_text().count("memfd:penstock")
            for child in children()
        ]
        assert len(held) == 390
    assert max(mapped) <= 64


# Workers that die


def test_a_killed_worker_is_replaced_and_its_work_done_again() -> None:
    with pipe_of("3 processes", length=LENGTH, wait_s=0.001) as pipe:
        found = []
        for at, batch in enumerate(pipe):
            found.append(batch)
            if at in (2, 9):
                kill_a_worker()
        stats = pipe.stats()
    assert stats is not None
    assert digest(found) == expected()


def kill_a_worker(dice: random.Random | None = None) -> int:
    """Kill a child of a template: where its parent is not this process."""
    found = [p for p in children() if p.ppid() != os.getpid()]
    if not found:
        return 0
    victim = (dice or random.Random(0)).choice(found)
    victim.kill()
    return victim.pid


def test_workers_that_die_idle_are_replaced() -> None:
    with pipe_of("3 processes") as pipe:
        first = digest(pipe)
        victims = [p for p in children() if p.ppid() != os.getpid()]
        for victim in victims:
            victim.kill()
        assert len(victims) == 3
        assert [first, digest(pipe)] == two_epochs()


def two_epochs() -> list[str]:
    with pipe_of("inline") as pipe:
        return [digest(pipe), digest(pipe)]


def test_work_is_spread_over_the_processes() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(64, wait_s=0.002), **WORKERS["3 processes"])
    with pipe.map(pids, **WORKERS["3 processes"]).batch(8) as batched:
        found = {int(pid) for batch in batched for pid in batch[1]}
    assert len(found) == 3
    assert os.getpid() not in found


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(4))
def test_fifty_random_kills_while_resizing_change_no_byte(round_: int) -> None:
    dice = random.Random(round_)
    killed: set[int] = set()
    epochs = 0
    found: list[Any] = []
    with pipe_of("3 processes", wait_s=0.001) as pipe:
        while len(killed) < 50:
            for batch in pipe:
                found.append(batch)
                killed.add(kill_a_worker(dice))
                for knob in pipe._slot.run.run.knobs():  # type: ignore[union-attr] # noqa: SLF001
                    knob.turn(dice.randint(1, 5))
            epochs += 1
    assert digest(found) == expected(epochs)


@pytest.mark.slow
def test_fifty_rounds_of_everything_leave_nothing(kind: str) -> None:
    for round_ in range(50):
        with pipe_of(kind) as pipe:
            for at, _ in enumerate(pipe):
                if at == round_ % EPOCH:
                    break
            loop: Iterator[Any] | None = iter(pipe)
            assert loop is not None
            next(loop)
            if round_ % 3 == 0:
                loop = None
            if round_ % 3 == 1:
                pipe.close()
        assert children() == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX only")
def test_indices_are_those_of_the_plan_after_all_this(kind: str) -> None:
    with pipe_of(kind) as pipe:
        assert sorted(i for batch in indices(pipe) for i in batch) == [*range(LENGTH)]
