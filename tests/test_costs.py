"""The costs of penstock itself, counted in bytecodes, bytes and writes.

`benchmarks/engine_overhead.py` prints them in microseconds. Each bound here is about
twice what was counted on Python 3.11, where the benchmark's figures keep the promises.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.tuner import Tuner
from penstock.engine.core.connector import WorkerMeter
from penstock.engine.core.core import Gauge
from penstock.engine.core.in_flight import Wait
from penstock.system.resources import Budget
from support.fluid_plant import FluidPlant, Work, steady
from support.work_counts import bytecodes, peak_bytes

STORE = tuple(Work(name, steady(0.01), cpu_s=0.001) for name in ("Folder", "Map"))


def test_the_two_events_of_a_chunk_take_few_instructions() -> None:
    meter, before, behind = WorkerMeter(0), Gauge(64, 0), Gauge(64, 0)

    def two_events() -> None:
        now_ns = time.perf_counter_ns()
        meter.wait(Wait.INPUT, now_ns)
        meter.start(now_ns)
        before.move(3, now_ns)
        meter.stop(8, 1000, 1000, now_ns)
        behind.move(3, now_ns)

    assert bytecodes(two_events) <= 500


def test_a_reading_of_sixteen_workers_takes_few_instructions() -> None:
    pipe = ps.Pipeline.from_dataset(
        range(6400), executor="thread", num_parallel_workers=8
    ).map(abs, executor="thread", num_parallel_workers=8)
    with pipe.batch(8) as pipe:
        loop = iter(pipe)
        next(loop)
        assert (
            1_000 <= bytecodes(pipe.stats) <= 22_000
        )  # the tuner reads twice a second


@pytest.mark.parametrize(("prefix", "bound"), [(None, 32_000), ("run", 56_000)])
def test_the_tuner_and_its_log_take_few_instructions_a_second(
    tmp_path: Path, prefix: str | None, bound: int
) -> None:
    plant = FluidPlant(STORE, gap_s=0.1, cores=2.0)
    executed = 0
    with AutotuneLog(prefix and str(tmp_path / prefix)) as log:
        tuner = Tuner(plant, BottleneckLaw(), Budget(2.0, 10**9), log)
        while plant.now_s < 60.0:
            waits_s: list[float] = []
            executed += bytecodes(lambda: waits_s.append(tuner.step()))  # noqa: B023 called at once
            plant.advance(waits_s[0])
    assert executed <= bound * 60


def test_a_state_far_within_a_billion_samples_takes_no_more_work_than_a_near_one() -> (
    None
):
    def resume(batch: int) -> None:
        later = {"batch": batch, "step": 7 * 15625000 + batch, "position": 64 * batch}
        with make() as pipe:
            pipe.load_state_dict(state | later)
            next(iter(pipe))
            assert pipe.plan is not None
            assert pipe.plan.start == 64 * batch

    def make() -> ps.Pipeline:
        return ps.Pipeline.from_dataset(range(10**9)).shuffle(seed=0).batch(64)

    with make() as pipe:
        pipe.set_epoch(7)
        next(iter(pipe))
        state = {**pipe.state_dict()}
    resume(2)  # what is made once
    assert bytecodes(lambda: resume(10**7)) <= 2 * bytecodes(lambda: resume(2))
    assert peak_bytes(lambda: resume(10**7)) <= 2 * peak_bytes(lambda: resume(2))
