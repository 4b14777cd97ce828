"""Segments move between kinds of workers as they run; `auto` chooses by measuring."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.autotune import tuner
from penstock.engine import recipe
from penstock.engine.engine import Engine
from penstock.engine.far.slabs import block_at
from penstock.engine.segment import Kind
from support.datasets import WORKERS, Numbers
from support.functions import augment, digest
from support.json_lines import rows_in

LENGTH = 400
THREADS = WORKERS["2 threads"]
KINDS: tuple[Kind, ...] = ("inline", "thread", "process")
NOISE = os.urandom(1 << 16)


def two_segments() -> ps.Pipeline:
    return (
        ps.Pipeline.from_dataset(Numbers(LENGTH), **THREADS)
        .shuffle(seed=5)
        .map(augment, **THREADS)
        .batch(8)
    )


def engine_of(pipe: ps.Pipeline) -> Engine:
    run = pipe._slot.run  # noqa: SLF001 moves are the engine's own affair
    assert run is not None
    return run.host.engine  # type: ignore[attr-defined, no-any-return]


def moving(pipe: ps.Pipeline, kinds: list[Kind], interval: int = 3) -> list[Any]:
    """Train an epoch; every few batches move a segment to another kind of worker."""
    batches = []
    for number, batch in enumerate(pipe):
        batches.append(batch)
        if kinds and number % interval == 0:
            engine = engine_of(pipe)
            engine.move(engine.segments[len(kinds) % 2], kinds.pop())
    assert kinds == []
    return batches


@pytest.fixture(scope="module")
def undisturbed() -> str:
    with two_segments() as pipe:
        return digest(pipe)


def test_moves_between_all_kinds_under_load_change_no_byte(undisturbed: str) -> None:
    dice = random.Random(0)
    kinds = [kind for kind in KINDS for _ in range(5)]
    dice.shuffle(kinds)
    with two_segments() as pipe:
        assert digest(moving(pipe, kinds)) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_fifty_moves_in_fifty_batches_change_no_byte(
    seed: int, undisturbed: str
) -> None:
    kinds = random.Random(seed).choices(KINDS, k=LENGTH // 8)
    with two_segments() as pipe:
        assert digest(moving(pipe, kinds, interval=1)) == undisturbed


def test_workers_of_the_old_kind_leave_and_their_work_stays_counted() -> None:
    with two_segments() as pipe:
        loop = iter(pipe)
        next(loop)
        engine = engine_of(pipe)
        for kind in ("process", "thread"):
            for segment in engine.segments:
                engine.move(segment, kind)
            for _ in loop:
                if all(segment.settled() for segment in engine.segments):
                    break
        assert [segment.executor for segment in engine.segments] == ["thread"] * 2
        list(loop)
        observation = engine.monitor.read()
        assert all(segment.rows >= LENGTH for segment in observation.segments)
        assert all(segment.alive == 2 for segment in observation.segments)


def test_worker_processes_inherit_no_held_lock_of_the_user() -> None:
    lock = threading.Lock()

    def locked(sample: Any) -> Any:
        with lock:
            time.sleep(0.001)  # most of the time some thread holds the lock
        return sample

    pipe = ps.Pipeline.from_dataset(Numbers(120)).map(
        locked, executor="thread", num_parallel_workers=4
    )
    with pipe.batch(4) as pipe:
        indices = []
        for number, batch in enumerate(pipe):
            indices += batch[1].tolist()
            if number == 3:
                engine = engine_of(pipe)
                engine.move(engine.segments[-1], "process")
        assert indices == list(range(120))


def test_batches_that_processes_make_lie_in_shared_memory() -> None:
    with ps.Pipeline.from_dataset(range(1200)).batch(8) as pipe:
        loop = iter(pipe)
        assert block_at(next(loop).data_ptr()) is None
    pipe = ps.Pipeline.from_dataset(range(1200), executor="process").batch(8)
    with pipe:
        *_, last = pipe
    assert block_at(last.data_ptr()) is not None


def counts_in_python(index: int) -> int:
    """Hold the GIL for a millisecond or two."""
    return index + 0 * sum(number * number for number in range(20_000))


def compresses(index: int) -> int:
    """Work for a millisecond or two without the GIL."""
    return index + 0 * len(zlib.compress(NOISE, 1))


def train_until(
    pipe: ps.Pipeline,
    log: pytest.LogCaptureFixture,
    text: str,
    patience_s: float,
    loop: Iterator[Any] | None = None,
) -> str:
    """Train until the autotune log has a line like this; return it."""
    start = time.perf_counter()
    for _ in loop or pipe:
        for line in log.messages:
            if re.search(text, line):
                return line
        if time.perf_counter() - start > patience_s:
            break
    return pytest.fail(f"no {text!r} within {patience_s} s: {log.messages}")


ENDLESS = range(10**7)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "penstock.autotune")
    return caplog


@pytest.mark.serial  # measures time
@pytest.mark.slow
@pytest.mark.skipif(ps.config.budget().cpu_cores < 2, reason="one core gains nothing")
def test_python_that_holds_the_gil_is_moved_to_processes(
    log: pytest.LogCaptureFixture,
) -> None:
    ps.set_enable_autotune(True)
    with ps.Pipeline.from_dataset(ENDLESS).map(counts_in_python).batch(32) as pipe:
        outcome = r"executor \w+ -> process (kept|rolled back)"
        train_until(pipe, log, outcome, 40.0)
    pattern = re.compile(r"\bexecutor\b|is tried")  # not the name of this file
    lines = [line for line in log.messages if pattern.search(line)]
    assert "executor inline -> thread: a batch takes" in lines[0]
    old, why = "thread", "the GIL is held"
    if "From old value: [thread] to new value: [inline]." in lines[1]:
        # Threads in one another's way were slower than the trainer alone.
        assert "executor thread -> inline kept:" in lines[2]
        old, why = "inline", "the trainer makes batches itself"
        del lines[1:3]
    assert f"is tried on processes: {why}" in lines[1]
    assert 'Added request to change "executor" of Operator: Map(ID:1)' in lines[2]
    assert f"From old value: [{old}] to new value: [process]." in lines[2]
    assert f"executor {old} -> process kept:" in lines[3]


@pytest.mark.serial  # measures time
@pytest.mark.slow
def test_work_without_the_gil_stays_on_threads(log: pytest.LogCaptureFixture) -> None:
    ps.set_enable_autotune(True)
    with ps.Pipeline.from_dataset(ENDLESS).map(compresses).batch(32) as pipe:
        end_s = time.perf_counter() + 8.0
        for _ in pipe:
            if time.perf_counter() > end_s:
                break
        stats = pipe.stats()
    assert stats is None
    assert not [line for line in log.messages if "is tried on processes" in line]


@pytest.mark.usefixtures("two_cores")
def test_without_autotune_nothing_moves_after_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "CONTROL_S", 0.01)
    with ps.Pipeline.from_dataset(ENDLESS).map(counts_in_python).batch(16) as pipe:
        for _ in itertools.islice(pipe, 20):
            stats = pipe.stats()
    assert stats is not None
    [segment] = stats.segments
    assert [move.outcome for move in segment.moves] == ["moved"]
    assert segment.executor == "thread"


ROUNDS = threading.Lock()


class TakesTurns:
    """Samples that wait 5 ms, one after the other in each process."""

    def __len__(self) -> int:
        return len(ENDLESS)

    def __getitem__(self, index: int) -> int:
        with ROUNDS:
            time.sleep(0.005)
        return index


@pytest.mark.serial  # measures time
@pytest.mark.slow
@pytest.mark.skipif(ps.config.budget().cpu_cores < 2, reason="one process of workers")
def test_workers_are_not_blamed_for_the_trainers_absence(
    log: pytest.LogCaptureFixture,
) -> None:
    ps.set_enable_autotune(True)
    with ps.Pipeline.from_dataset(TakesTurns(), **THREADS).batch(8) as pipe:
        recipe = pipe._compiled()  # noqa: SLF001 no user can begin `auto` on processes
        [segment] = recipe.segments
        segment = replace(segment, executor="process", stays="")
        pipe._recipe = replace(recipe, segments=(segment,))  # noqa: SLF001
        loop = iter(pipe)
        for _ in range(60):  # a second or so after all workers have begun
            next(loop)
        time.sleep(3.0)
        outcome = "executor process -> thread (kept|rolled back)"
        line = train_until(pipe, log, outcome, 40.0, loop)
    [rates] = re.findall(r"(\d+) -> (\d+) samples/s", line)
    processes, threads = map(float, rates)
    assert "rolled back" in line
    assert processes > threads


def test_a_cheap_function_stays_inline_without_a_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe, "WORTH_WORKERS_NS", 10**12)  # any is cheap
    with ps.Pipeline.from_dataset(range(2_000)).batch(32) as pipe:
        for _ in pipe:
            assert not [t for t in threading.enumerate() if "gil probe" in t.name]
        stats = pipe.stats()
    assert stats is not None
    [move] = stats.segments[0].moves
    assert (move.old, move.outcome) == ("inline", "stays")


def test_an_explicit_executor_is_never_moved() -> None:
    for kind in KINDS:
        with ps.Pipeline.from_dataset(range(64), executor=kind).batch(8) as pipe:
            list(pipe)
            run = pipe._slot.run  # noqa: SLF001 no user can see a knob
            assert run is not None
            assert "executor" not in {knob.name for knob in run.knobs()}


@pytest.mark.usefixtures("two_cores")
def test_a_segment_that_cannot_be_moved_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ps.SpecError("`lambda` cannot travel; write it with def")

    with ps.Pipeline.from_dataset(ENDLESS).map(counts_in_python).batch(8) as pipe:
        loop = iter(pipe)
        for _ in range(4):  # enough to put it on threads
            next(loop)
        engine = engine_of(pipe)
        [segment] = engine.segments
        monkeypatch.setattr(engine, "move", refuse)
        [knob] = [knob for knob in segment.knobs() if knob.name == "executor"]
        assert knob.set("process") == "process"
        next(loop)
        assert segment.executor == "thread"
        assert segment.moves[-1].line.endswith(
            "executor thread -> process failed: `lambda` cannot travel; write it with "
            "def."
        )
        assert not [knob for knob in segment.knobs() if knob.name == "executor"]


def test_the_executor_knob_moves_workers_at_the_next_batch(undisturbed: str) -> None:
    source = ps.Pipeline.from_dataset(Numbers(LENGTH), num_parallel_workers=2)
    with source.shuffle(seed=5).map(augment).batch(8) as pipe:
        batches = []
        for number, batch in enumerate(pipe):
            batches.append(batch)
            for knob in engine_of(pipe).segments[0].knobs():
                if knob.name == "executor":
                    knob.set("process" if number % 10 < 5 else "thread")
        assert digest(batches) == undisturbed


@pytest.mark.usefixtures("two_cores")
def test_moves_are_rows_in_the_autotune_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "CONTROL_S", 0.05)
    ps.set_enable_autotune(True, filepath_prefix=str(tmp_path / "run"))
    with ps.Pipeline.from_dataset(ENDLESS).map(counts_in_python).batch(8) as pipe:
        for _ in pipe:
            rows = rows_in(tmp_path / "run_0.jsonl")
            moves = [row for row in rows if row["event"] == "executor"]
            if moves:
                break
    assert (moves[0]["old"], moves[0]["new"]) == ("inline", "thread")
    assert "a batch takes" in moves[0]["reason"]


class Counts:
    """Counts what it was asked for; its threads may share it."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return index


def test_threads_that_were_requested_stay_if_their_data_changes() -> None:
    data = Counts()
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=2, thread_safe=True)
    with pipe.batch(8) as batched_pipe:
        loop = iter(batched_pipe)
        next(loop)
        engine = engine_of(batched_pipe)
        (segment,) = engine.segments
        knob = next(knob for knob in segment.knobs() if knob.name == "executor")
        knob.set("process")
        indices = [index for batch in loop for index in batch.tolist()]
        assert indices == list(range(8, 400))
        assert segment.executor == "thread"
        (move,) = segment.moves
    assert "asked` changes while samples are made" in move.reason
