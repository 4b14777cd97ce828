"""Readings of an engine, and windows as the difference of two of them."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import repeat

import pytest

import penstock as ps
from penstock.config import Settings
from penstock.engine import run
from penstock.engine.core.in_flight import ByteBudget
from penstock.engine.engine import Engine
from penstock.engine.monitor import Monitor, unmeasured
from penstock.engine.observe.observation import (
    ConnectorObservation,
    Observation,
    SegmentObservation,
    TrainerObservation,
)
from penstock.engine.plan import BatchPlan, Cursor, Shard
from penstock.engine.run import Run
from penstock.engine.trainer_cost import TrainerMeter
from penstock.pipeline.compile import compile_recipe
from penstock.pipeline.stages import BatchStage, MapStage, SourceStage
from support.core_script import Script

S = 1_000_000_000
RECIPE = compile_recipe(
    (
        SourceStage(list(range(100)), executor="inline", name="data"),
        MapStage(float, executor="thread", num_parallel_workers=2),
        BatchStage(5),
    ),
    Settings(num_parallel_workers=1, prefetch_size=2, cpu_budget=1.0),
    Shard.single(),
)


def batch(rows: int, epoch: int, step: int, *, last: bool = False) -> BatchPlan:
    """A whole batch of one rank."""
    first = Script((rows,)).batch(0)
    return first._replace(epoch=epoch, step=step, last=last)


def test_a_step_is_counted_when_its_batch_is_handed_over() -> None:
    meter = TrainerMeter()
    assert not meter.training
    meter.ask(10 * S)
    assert meter.training
    assert meter.read() == TrainerObservation(0, 0, 0.0, 0.0)
    meter.get(13 * S, batch(64, 0, 1))
    observation = TrainerObservation(1, 64, 3.0, 0.0, first_s=3.0, loops=1)
    assert meter.read() == observation
    meter.ask(20 * S)
    assert meter.read() == observation
    meter.get(21 * S, batch(32, 1, 2))
    assert meter.read() == replace(observation, steps=2, rows=96, wait_s=4.0, gap_s=7.0)
    assert (meter.read().steps, meter.epoch, meter.step) == (2, 1, 2)


def test_the_trainers_work_between_two_loops_is_not_part_of_a_step() -> None:
    meter = TrainerMeter()
    meter.ask(0)
    meter.get(1 * S, batch(8, 0, 0))
    meter.stop()
    assert not meter.training
    meter.ask(100 * S)
    meter.get(102 * S, batch(8, 1, 1))
    whole = TrainerObservation(2, 16, 3.0, 0.0, first_s=3.0, loops=2, loop_s=100.0)
    assert meter.read() == whole
    meter.ask(250 * S)
    assert meter.read().loop_s == 150.0  # the loop that goes on is the longer one


def test_the_start_of_a_loop_is_a_wait() -> None:
    meter = TrainerMeter()
    meter.begin_ns = 4 * S
    meter.ask(10 * S)
    meter.get(11 * S, batch(8, 0, 0))
    meter.ask(12 * S)
    meter.get(13 * S, batch(8, 0, 1))
    assert meter.read() == TrainerObservation(2, 16, 6.0, 1.0, first_s=5.0, loops=1)


def test_the_trainers_absence_does_not_count_as_a_longer_step() -> None:
    meter = TrainerMeter()
    now = 0
    for step in range(100):
        meter.ask(now)
        meter.get(now + S // 100, batch(8, 0, step))
        now += S // 100 + (60 * S if step in (50, 70) else S // 10)
    observation = meter.read()
    assert observation.away_s == 120.0
    assert observation.gap_s == pytest.approx(97 * 0.1)
    assert observation.wait_s == pytest.approx(1.0)


def test_a_long_step_that_recurs_counts_as_a_step() -> None:
    meter = TrainerMeter()
    now = 0
    for step in range(160):
        meter.ask(now)
        meter.get(now, batch(8, 0, step))
        now += 3 * S if step % 16 == 15 else S // 10
    assert meter.read().away_s <= 3.0  # the first of its kind counted as an absence


def segment(scale: float, window_s: float, workers: int = 2) -> SegmentObservation:
    """Return a reading whose counters are in proportion to `scale`."""
    return SegmentObservation(
        name="Map(ID:1) f",
        queue_name="Batch(ID:2)",
        executor="thread",
        num_parallel_workers=workers,
        prefetch_size=3,
        rows=int(10 * scale),
        worker_s=8 * scale,
        run_s=6 * scale,
        cpu_s=5 * scale,
        wait_input_s=scale,
        wait_credit_s=scale,
        output=ConnectorObservation(
            occupancy=40 * scale / window_s,
            capacity=20,
            empty=scale / window_s,
            full=2 * scale / window_s,
            row_bytes=7.0,
        ),
    )


def test_a_window_is_shorter_by_the_trainers_absence() -> None:
    before, now = reading(10.0, 1), reading(80.0, 3)
    trainer = replace(now.trainer, away_s=66.0)
    window = replace(now, window_s=now.window_s - 66.0, trainer=trainer) - before
    assert (window.window_s, window.trainer.away_s) == (4.0, 66.0)
    assert window.rows_per_s == 4.0


def reading(time_s: float, scale: float, workers: int = 2) -> Observation:
    """Return what a run has done that began 3 s after the clock."""
    trainer = TrainerObservation(int(2 * scale), int(8 * scale), scale, 3 * scale)
    first = segment(scale, time_s - 3.0)
    second = replace(segment(2 * scale, time_s - 3.0, workers), input=first.output)
    parts = (first, second)
    return Observation(
        time_s, time_s - 3.0, 1, 9, trainer, parts, held_bytes=500, peak_bytes=900
    )


def test_a_window_is_the_difference_of_two_readings() -> None:
    window = reading(14.0, 3, workers=5) - reading(10.0, 1)
    assert (window.time_s, window.window_s) == (14.0, 4.0)
    assert (window.epoch, window.step) == (1, 9)
    assert window.trainer == TrainerObservation(4, 16, 2.0, 6.0)
    first, second = window.segments
    assert (first.rows, first.worker_s, first.run_s, first.cpu_s) == (20, 16, 12, 10)
    assert (second.rows, second.wait_input_s, second.wait_credit_s) == (40, 4.0, 4.0)
    assert second.num_parallel_workers == 5
    assert (window.held_bytes, window.peak_bytes) == (500, 900)


def test_a_connector_is_seen_as_the_mean_over_the_window() -> None:
    first, second = (reading(14.0, 3) - reading(10.0, 1)).segments
    assert first.input is None
    assert second.input == first.output
    assert first.output.occupancy == pytest.approx(80 / 4)
    assert first.output.row_bytes == 7.0
    assert (first.output.empty, first.output.full) == (2 / 4, 4 / 4)
    assert first.output.capacity == 20


def test_shares_of_a_window_never_exceed_one() -> None:
    first, _ = (reading(10.001, 3) - reading(10.0, 1)).segments
    assert (first.output.empty, first.output.full) == (1.0, 1.0)


def test_a_pipeline_that_has_not_run_has_an_empty_window() -> None:
    window = unmeasured(RECIPE)
    assert [part.name for part in window.segments] == [
        "Dataset(ID:0) data",
        "Map(ID:1) float",
    ]
    assert window.trainer == TrainerObservation(0, 0, 0.0, 0.0)
    assert all(part.rows == 0 == part.output.occupancy for part in window.segments)


def test_waits_for_a_core_are_those_of_threads_and_of_the_trainer() -> None:
    with Engine(RECIPE, ByteBudget(1 << 30), 0) as engine:
        segment, _ = engine.segments
        segment.connector.own_queue.total_ns = 30 * 10**9
        observation = engine.monitor.read()
    looked = segment.run_queue.look()
    assert observation.segments[0].run_queue_s == (looked.waited_ns + 30 * 10**9) / 1e9


def test_waits_for_a_core_are_a_part_of_what_functions_spend_off_it() -> None:
    before = replace(segment(1.0, 1.0), run_queue_s=1.0, run_s=100.0, cpu_s=20.0)
    now = replace(before, run_queue_s=6.0, run_s=101.0, cpu_s=20.5)
    assert (now - before).queued_s == 0.5  # some of it was between leases


def test_a_reading_of_a_running_engine_is_complete() -> None:
    with Engine(RECIPE, ByteBudget(1 << 30), 0) as engine:
        before = engine.monitor.read()
        for _ in range(6):
            engine.pop()
        now = engine.monitor.read()
        window = now - before
        again = engine.monitor.read() - now
    source, mapped = now.segments
    assert (source.name, source.queue_name) == ("Dataset(ID:0) data",) * 2
    assert (mapped.name, mapped.queue_name) == ("Map(ID:1) float", "Batch(ID:2)")
    assert (source.executor, mapped.executor) == ("inline", "thread")
    assert (source.num_parallel_workers, mapped.num_parallel_workers) == (1, 2)
    assert source.rows >= mapped.rows >= 30
    assert window.segments[0].rows >= window.segments[1].rows >= 30
    assert again.segments[1].rows <= 70
    assert now.held_bytes <= now.peak_bytes
    assert now.peak_bytes >= 5 * 8
    assert mapped.output.capacity == 2 * 5


def test_windows_follow_each_other_without_a_gap() -> None:
    run = Run(RECIPE, ByteBudget(1 << 30), Cursor(0, 0, 0, 0))
    with closing(run):
        start_s = run.read().time_s
        run.next()
        first, second = run.observe(), run.observe()
    assert first is not None
    assert second is not None
    assert second.time_s - second.window_s == pytest.approx(first.time_s)
    assert first.time_s - first.window_s <= start_s


def test_epochs_in_direct_succession_are_one_training() -> None:
    with closing(Run(RECIPE, ByteBudget(1 << 30), Cursor(0, 0, 0, 0))) as run:
        for epoch in range(3):
            if epoch:
                run.begin(Cursor(epoch, 0, 20 * epoch, 0))
            while run.next() is not None:
                pass
        assert (
            run.recent().trainer.steps == 60 - 1
        )  # the first epoch includes the start of workers


def test_the_steps_of_a_window_take_no_longer_than_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, delays = Monitor.read, repeat(0.02)

    def read_late(monitor: Monitor) -> Observation:
        time.sleep(next(delays))
        return read(monitor)

    monkeypatch.setattr(Monitor, "read", read_late)
    with closing(Run(RECIPE, ByteBudget(1 << 30), Cursor(0, 0, 0, 0))) as run:
        while run.next() is not None:
            delays = repeat(0.0)
            time.sleep(0.001)
        window = run.recent()
    assert window.trainer.steps == 20 - 1
    assert window.trainer.wait_s + window.trainer.gap_s <= window.window_s


def test_recent_excludes_what_other_workers_did() -> None:
    with closing(Run(RECIPE, ByteBudget(1 << 30), Cursor(0, 0, 0, 0))) as run:
        while run.next() is not None:
            pass
        (workers,) = (k for k in run.knobs() if k.name == "num_parallel_workers")
        workers.write(4)
        run.begin(Cursor(1, 0, 20, 0))
        while run.next() is not None:
            pass
        assert run.recent().trainer.steps == 20


def test_waits_for_the_first_batches_of_loops_count_separately() -> None:
    meter = TrainerMeter()
    for start_s in (0, 100):
        meter.ask(start_s * S)
        meter.get((start_s + 3) * S, batch(64, 0, 0))
        meter.ask((start_s + 4) * S)
        meter.get((start_s + 5) * S, batch(64, 0, 1))
        meter.ask((start_s + 6) * S)
        meter.stop()
    trainer = meter.read()
    assert (trainer.wait_s, trainer.first_s, trainer.gap_s) == (8.0, 6.0, 4.0)


def test_a_run_notes_a_reading_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.Pipeline.from_dataset(list(range(64))).batch(1) as pipe:
        batches = iter(pipe)
        next(batches)
        history = pipe._slot.run._history  # type: ignore[union-attr]  # noqa: SLF001
        (_, noted), seconds = history[-1], run.NOTE_S
        monkeypatch.setattr(run, "NOTE_S", 3600.0)
        next(batches)
        assert history[-1][1] is noted
        monkeypatch.setattr(run, "NOTE_S", 0.0)
        next(batches)
        assert history[-1][1] is not noted
        assert seconds > 0


def test_what_the_process_did_before_a_run_is_no_part_of_it() -> None:
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    before_s = time.process_time()
    with ps.Pipeline.from_dataset(list(range(32))).batch(8) as pipe:
        list(pipe)
        stats = pipe.stats()
        assert stats is not None
        assert 0.0 <= stats.process_cpu_s <= time.process_time() - before_s
