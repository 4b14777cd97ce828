"""The costs of penstock itself stay under the bounds that it promises."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies import BottleneckLaw
from penstock.autotune.tuner import Tuner
from penstock.engine.core.metrics import Gauge, Wait, WorkerMeter
from penstock.system.resources import Budget
from support.fluid_plant import FluidPlant, Work, steady

pytestmark = pytest.mark.serial  # measures time

STORE = tuple(Work(name, steady(0.01), cpu_s=0.001) for name in ("Folder", "Map"))


def cpu_ns(call: Callable[[], object], calls: int) -> float:
    """Return how long a call takes undisturbed: the best of many rounds."""
    rounds = []
    for _ in range(20):
        begun_ns = time.thread_time_ns()
        for _ in range(calls):
            call()
        rounds.append((time.thread_time_ns() - begun_ns) / calls)
    return min(rounds)


def test_a_chunk_event_costs_a_microsecond_at_most() -> None:
    meter, before, behind = WorkerMeter(0), Gauge(64, 0), Gauge(64, 0)

    def two_events() -> None:
        now_ns = time.perf_counter_ns()
        meter.wait(Wait.INPUT, now_ns)
        meter.start(now_ns)
        before.move(3, now_ns)
        meter.stop(8, 1000, 1000, now_ns)
        behind.move(3, now_ns)

    assert cpu_ns(two_events, 1000) <= 2 * 1000


def test_readings_cost_half_a_percent_of_a_core_at_most() -> None:
    pipe = ps.Pipeline.from_dataset(
        range(64), executor="thread", num_parallel_workers=8
    ).map(abs, executor="thread", num_parallel_workers=8)
    with pipe.batch(8) as pipe:
        next(iter(pipe))
        assert (
            cpu_ns(pipe.stats, 10) * 2 <= 0.005 * 1e9
        )  # the tuner looks twice a second


@pytest.mark.parametrize("prefix", [None, "run"])
def test_the_tuner_and_its_log_take_five_milliseconds_of_a_second_at_most(
    tmp_path: Path, prefix: str | None
) -> None:
    plant = FluidPlant(STORE, gap_s=0.1, cores=2.0)
    spent_ns = 0
    with AutotuneLog(prefix and str(tmp_path / prefix)) as log:
        tuner = Tuner(plant, BottleneckLaw(), Budget(2.0, 10**9), log)
        while plant.now_s < 60.0:
            begun_ns = time.thread_time_ns()
            wait_s = tuner.step()
            spent_ns += time.thread_time_ns() - begun_ns
            plant.advance(wait_s)
    assert spent_ns <= 0.005 * 60e9


def test_a_state_within_a_billion_samples_resumes_within_a_second() -> None:
    def make() -> ps.Pipeline:
        return ps.Pipeline.from_dataset(range(10**9)).shuffle(seed=0).batch(64)

    with make() as pipe:
        pipe.set_epoch(7)
        next(iter(pipe))
        state = {**pipe.state_dict()}
    later = {"batch": 10**7, "step": 7 * 15625000 + 10**7, "position": 64 * 10**7}
    begun_s = time.monotonic()
    with make() as pipe:
        pipe.load_state_dict(state | later)
        next(iter(pipe))
        took_s = time.monotonic() - begun_s
        assert pipe.plan is not None
        assert pipe.plan.start == 64 * 10**7
    assert took_s < 1.0
