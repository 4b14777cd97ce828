"""The tuner's loop, on a simulated pipeline and a virtual clock."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from connector_rules import ConnectorRules

from penstock.autotune.explain import verdict_of
from penstock.autotune.host_peers import HostPeers
from penstock.autotune.log import (
    FEW_STEPS_S,
    VERDICT_CHANGE_S,
    AutotuneLog,
    Spoken,
)
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.policies.policy import Policy, Situation
from penstock.autotune.trial import Decision
from penstock.autotune.tuner import Tuner, TunerThread
from penstock.autotune.window import latest, wait_share
from penstock.engine.observe.observation import (
    Knob,
    Move,
    Observation,
    TrainerObservation,
)
from penstock.system.resources import Budget
from support.fluid_plant import FluidPlant, Segment, Work, steady

READ, DECODE = "Folder(ID:0)", "Map(ID:1) decode"
STORE = (
    Work(READ, steady(0.0152), cpu_s=0.0002),
    Work(DECODE, steady(0.0006), cpu_s=0.0006),
)
"""Reads of 15 ms from a store, and a light decoder."""
TWO_CORES = Budget(2.0, 10**9, whole_machine=True)
RULES = ConnectorRules()


@pytest.fixture(params=[RULES, BottleneckLaw()], ids=["rules", "law"])
def policy(request: pytest.FixtureRequest) -> Policy[Any]:
    """Return each policy in turn."""
    parameter: Policy[Any] = request.param
    return parameter


def run(
    plant: FluidPlant,
    until_s: float,
    *,
    budget: Budget = TWO_CORES,
    policy: Policy[Any] = RULES,
    log: AutotuneLog | None = None,
    interval_steps: int = 0,
) -> None:
    log = log or AutotuneLog()
    tuner = Tuner(plant, policy, budget, log, interval_steps=interval_steps)
    while plant.now_s < until_s:
        plant.advance(tuner.step())
    tuner.finish()


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_from_one_worker_a_stage_the_trainer_is_fed_within_ten_seconds(
    policy: Policy[Any], noise: float
) -> None:
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0, noise=noise)
    run(plant, 30.0, policy=policy)
    alone = FluidPlant(STORE, gap_s=64 / 600, cores=2.0, workers=32)
    alone.advance(30.0)
    assert plant.rows_per_s(10.0) >= 0.95 * alone.rows_per_s(10.0)
    assert plant.workers()[1] == 1


def test_the_first_decision_falls_within_two_seconds_of_slow_steps(
    policy: Policy[Any],
) -> None:
    plant = FluidPlant((Work(READ, steady(0.1)),), gap_s=0.1)  # a step takes 6.4 s
    run(plant, 5.0, policy=policy)
    assert plant.changes[0][0] <= 2.5


class SlowStart(FluidPlant):
    """Workers take five seconds to begin, and use nearly every core meanwhile."""

    begins_s = 5.0

    @property
    def begins(self) -> bool:
        return bool(self.changes) and self.now_s < self.changes[-1][0] + self.begins_s

    def _capacity(self, segment: Segment) -> float:
        return super()._capacity(segment) * (0.1 if self.begins else 1.0)

    def observe(self) -> Observation | None:
        observation = super().observe()
        if observation is None:
            return None
        segments = (
            replace(segment, beginning=int(self.begins))
            for segment in observation.segments
        )
        return replace(observation, segments=tuple(segments))


def test_no_rate_is_measured_before_all_workers_have_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant = SlowStart(STORE, gap_s=64 / 600, cores=2.0)
    with caplog.at_level(logging.INFO, logger="penstock.autotune"):
        run(plant, 40.0, policy=BottleneckLaw())
    assert plant.workers()[0] >= 9
    assert "kept" in caplog.text
    assert not re.search("num_parallel_workers 1 -> . rolled back", caplog.text)


def test_the_tuner_does_not_wait_endlessly_for_a_worker_to_begin() -> None:
    plant = SlowStart(STORE, gap_s=64 / 600, cores=2.0)
    plant.begins_s = float("inf")
    run(plant, 200.0, policy=BottleneckLaw())
    assert len(plant.changes) > 1


class GoesAway(FluidPlant):
    """A pipeline whose trainer is away for seven seconds now and then."""

    def observe(self) -> Observation | None:
        observation = super().observe()
        if observation is None or int(observation.time_s) % 5:
            return observation
        trainer = replace(observation.trainer, rows=1, away_s=7.0)
        segments = (
            replace(s, run_s=-20 * s.run_s, rows=1) for s in observation.segments
        )
        left_s = observation.window_s - 7.0  # earlier windows have counted its absence
        segments = tuple(segments)
        return replace(observation, window_s=left_s, trainer=trainer, segments=segments)


def test_measurements_taken_while_the_trainer_is_away_are_no_evidence() -> None:
    plant = GoesAway(STORE, gap_s=64 / 600, cores=2.0)
    run(plant, 60.0, policy=BottleneckLaw())
    assert plant.rows_per_s(1.0) >= 0.9 * 600
    assert 9 <= plant.workers()[0] <= 14


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_start_at_the_maximum_is_cut_to_what_the_trainer_needs(
    noise: float,
) -> None:
    plant = FluidPlant(
        STORE, gap_s=64 / 400, cores=2.0, workers=32, prefetch=16, noise=noise
    )
    run(plant, 15.0, budget=Budget(2.0, 10**10))
    assert plant.workers() == [7, 1]  # 400 rows/s need 6.1 and 0.24
    run(plant, 40.0, budget=Budget(2.0, 10**10))
    assert [segment.prefetch for segment in plant.segments] == [2, 2]
    assert plant.rows_per_s(1.0) >= 0.97 * 400


@pytest.mark.parametrize(("workers", "noise"), [(1, 0.0), (1, 0.3), (32, 0.3)])
def test_nothing_changes_in_the_second_half_of_a_steady_run(
    policy: Policy[Any], workers: int, noise: float
) -> None:
    plant = FluidPlant(STORE, gap_s=64 / 500, cores=2.0, workers=workers, noise=noise)
    run(plant, 120.0, policy=policy)
    assert [change for change in plant.changes if change[0] > 60.0] == []


@pytest.mark.parametrize("workers", [1, 4, 32])
def test_tuning_never_falls_far_behind_the_start(
    policy: Policy[Any], workers: int
) -> None:
    def plant() -> FluidPlant:
        return FluidPlant(STORE, gap_s=0.1, cores=2.0, workers=workers, noise=0.3)

    tuned, untouched = plant(), plant()
    run(tuned, 40.0, policy=policy)
    untouched.advance(40.0)
    assert tuned.rows_per_s(0.0) >= 0.95 * untouched.rows_per_s(0.0)


CONTENTION_S = {1: 0.010, 2: 0.011, 3: 0.013, 4: 0.024, 5: 0.045}


def test_workers_that_slow_each_other_down_are_rolled_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="penstock.autotune")
    crowd = Work(READ, lambda workers: CONTENTION_S.get(workers, 0.1))
    plant = FluidPlant((crowd,), gap_s=0.05)
    run(plant, 40.0)
    assert plant.workers() == [3]
    assert plant.rows_per_s(10.0) >= 0.98 * 3 / 0.013
    assert f"{READ}: num_parallel_workers 3 -> 5 rolled back: 230 -> 1" in caplog.text


def test_workers_that_gain_nothing_are_removed_again(policy: Policy[Any]) -> None:
    sequential = Work(READ, lambda workers: 0.01 * workers)
    plant = FluidPlant((sequential,), gap_s=0.05)
    run(plant, 50.0, policy=policy)
    assert plant.workers() == [1]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(1.0, [1, 1]), (4.0, [1, 4])],
)
def test_the_cpu_budget_bounds_workers_that_compute(
    policy: Policy[Any], cores: float, expected: list[int]
) -> None:
    works = (
        Work(READ, steady(0.0001), cpu_s=0.00001),
        Work(DECODE, steady(0.002), cpu_s=0.002),
    )
    plant = FluidPlant(works, gap_s=0.001, cores=16.0)
    run(plant, 30.0, policy=policy, budget=Budget(cores, 10**9))
    assert plant.workers() == expected


def test_a_start_beyond_the_cpu_budget_is_cut_to_it_for_good() -> None:
    works = (Work(DECODE, steady(0.002), cpu_s=0.002),)
    plant = FluidPlant(works, gap_s=0.001, cores=16.0, workers=6)
    run(plant, 30.0, budget=Budget(2.0, 10**9))
    assert plant.workers() == [2]


def test_one_bottleneck_after_the_other_is_found(policy: Policy[Any]) -> None:
    works = tuple(Work(f"Map(ID:{i})", steady(0.004 * (i + 1))) for i in range(5))
    plant = FluidPlant(works, gap_s=64 / 300)
    run(plant, 40.0, policy=policy)
    assert plant.rows_per_s(25.0) >= 0.9 * 300


def test_a_pinned_stage_is_never_touched(policy: Policy[Any]) -> None:
    pinned = Work(READ, steady(0.0152), tunable=False)
    plant = FluidPlant((pinned,), gap_s=0.1)
    run(plant, 20.0, policy=policy)
    assert plant.changes == []


def test_an_interval_keeps_decisions_that_many_steps_apart(policy: Policy[Any]) -> None:
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0)
    run(plant, 40.0, policy=policy, interval_steps=10)
    turned = [when for when, _, _ in plant.changes]
    between = [
        sum(1 for when in plant.taken if a < when <= b) for a, b in pairwise(turned)
    ]
    assert between
    assert min(between) >= 10


def test_the_log_gives_the_evidence_the_change_and_its_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="penstock.autotune")
    run(FluidPlant(STORE, gap_s=64 / 600, cores=2.0), 20.0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(
        "input-bound: waiting 89% of each step (Folder(ID:0) 89%)"
    )
    assert lines[1].startswith(f"Op ({READ}) is the bottleneck: blocked 15.")
    assert lines[2].startswith(
        f"Op ({READ}) is slow, input connector utilization=1.000000"
    )
    assert lines[3] == (
        f'Added request to change "num_parallel_workers" of Operator: {READ}'
        " From old value: [1] to new value: [3]."
    )
    assert lines[4].startswith(f"{READ}: num_parallel_workers 1 -> 3 kept: 6")
    assert lines[-2:] == [
        f"{READ} (num_parallel_workers: 9, prefetch_size: 2)",
        f"{DECODE} (num_parallel_workers: 1, prefetch_size: 2)",
    ]


def test_everything_given_back_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="penstock.autotune")
    run(FluidPlant(STORE, gap_s=64 / 400, cores=2.0, workers=32), 30.0)
    assert "not input-bound (wait 0.0%): released 56 workers" in caplog.text


def test_replaying_a_runs_rows_gives_the_same_decisions(
    policy: Policy[Any], tmp_path: Path
) -> None:
    plant = FluidPlant(STORE, gap_s=64 / 400, cores=2.0, workers=2, noise=0.3)
    with AutotuneLog(str(tmp_path / "run")) as log:
        run(plant, 40.0, policy=policy, log=log)
    replayed = list[Decision]()
    memory, decided = policy.start(), list[tuple[object, ...]]()
    for row in map(json.loads, (tmp_path / "run_0.jsonl").read_text().splitlines()):
        if row["event"] == "observation":
            decisions, memory = policy.decide(Situation.from_row(row), memory)
            replayed += decisions
        elif row["event"] == "decision":
            decided.append(tuple(row[key] for key in ("op", "knob", "old", "new")))
    assert len(decided) >= 2
    assert [(d.operator, d.knob, d.old, d.new) for d in replayed] == decided


class PausedPlant:
    """A pipeline in which nothing moves; each look sets `looked`."""

    trained = TrainerObservation()
    calm = False
    tried: Mapping[str, str] = MappingProxyType({})

    def __init__(self, look: Callable[[], Observation | None] = lambda: None) -> None:
        self.looked = threading.Event()
        self._look = look

    def observe(self) -> Observation | None:
        self.looked.set()
        return self._look()

    def knobs(self) -> tuple[Knob, ...]:
        return ()


def tuning(plant: PausedPlant) -> TunerThread:
    log = AutotuneLog()
    return TunerThread(Tuner(plant, ConnectorRules(), TWO_CORES, log))


def test_the_thread_is_gone_after_the_with() -> None:
    plant = PausedPlant()
    with tuning(plant):
        assert plant.looked.wait(60.0)
        names = [t.name for t in threading.enumerate() if t.daemon]
        assert "penstock-autotune" in names
    assert "penstock-autotune" not in [t.name for t in threading.enumerate()]


def test_a_tuner_that_fails_ends_tuning_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> Observation | None:
        message = "no such counter"
        raise LookupError(message)

    plant = PausedPlant(broken)
    with tuning(plant):
        assert plant.looked.wait(60.0)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("autotune failed and is off from here on")
    assert "LookupError: no such counter" in caplog.text


def test_a_change_of_executor_from_outside_ends_a_trial_unjudged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "penstock.autotune")
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0)
    tuner = Tuner(plant, ConnectorRules(), TWO_CORES, AutotuneLog())
    while not plant.changes:
        plant.advance(tuner.step())
    segment = plant.segments[1]
    segment.executor = "process"
    segment.moves = (
        Move(DECODE, "inline", "process", "moved", "it pays", time_s=plant.now_s),
    )
    before = len(caplog.messages)
    while len(plant.changes) < 2:
        plant.advance(tuner.step())
    lines = caplog.messages[before:]
    assert f"{DECODE}: executor inline -> process: it pays." in lines
    assert not any("kept" in line or "rolled back" in line for line in lines[:3])


def test_other_processes_may_have_the_cores_between_two_loops(tmp_path: Path) -> None:
    with HostPeers(tmp_path) as own, HostPeers(tmp_path) as other:
        plant = PausedPlant()
        tuner = Tuner(plant, ConnectorRules(), TWO_CORES, AutotuneLog(), host_peers=own)
        assert other.share(TWO_CORES, 0.0, 2.0) != TWO_CORES
        tuner.step()
        assert other.share(TWO_CORES, 0.0, 2.0) == TWO_CORES


def test_a_tuner_that_looks_is_training_though_its_steps_are_long(
    tmp_path: Path,
) -> None:
    with HostPeers(tmp_path) as own, HostPeers(tmp_path) as other:
        plant = FluidPlant(STORE, gap_s=100.0, cores=2.0)
        tuner = Tuner(plant, RULES, TWO_CORES, AutotuneLog(), host_peers=own)
        for _ in range(4):
            plant.advance(0.5)
            tuner.step()
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
        assert other.share(TWO_CORES, 0.0, 2.0) == TWO_CORES
        plant.advance(0.05)  # which is no evidence
        tuner.step()
        assert other.share(TWO_CORES, 0.0, 2.0) != TWO_CORES


class Moving(FluidPlant):
    """A pipeline without knobs while its engine moves."""

    moves = False

    def knobs(self) -> tuple[Knob, ...]:
        return () if self.moves else super().knobs()


class Overtaken(ConnectorRules):
    """Rules that take so long to decide that the engine moves meanwhile."""

    def __init__(self, plant: Moving) -> None:
        self.plant: Moving | None = plant

    def decide(self, situation: Situation, memory: Any) -> Any:
        decisions, after = super().decide(situation, memory)
        if decisions and self.plant:
            self.plant.moves = True
        return decisions, after


def test_a_knob_that_goes_while_the_policy_decides_ends_only_that_trial() -> None:
    plant = Moving(STORE, gap_s=64 / 600, cores=2.0)
    policy = Overtaken(plant)
    tuner = Tuner(plant, policy, TWO_CORES, AutotuneLog())
    while not plant.moves:
        plant.advance(tuner.step())
    plant.advance(tuner.step())
    assert plant.changes == []
    policy.plant, plant.moves = None, False
    while not plant.changes:
        plant.advance(tuner.step())


def test_loops_too_short_for_a_window_get_a_verdict_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "penstock.autotune")
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0)
    plant.advance(10.0)
    observation = plant.observe()
    assert observation is not None
    tuner = Tuner(PausedPlant(), ConnectorRules(), TWO_CORES, AutotuneLog())
    tuner.step()
    tuner.finish(lambda: observation)
    assert "input-bound: waiting " in caplog.text


def test_a_decision_before_the_first_step_is_followed_by_a_verdict_on_those_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "penstock.autotune")
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0, batch=100_000)
    tuner = Tuner(plant, BottleneckLaw(), TWO_CORES, AutotuneLog())
    while "Added request" not in caplog.text:
        plant.advance(0.5)
        tuner.step()
    assert plant.trained.steps == 0
    other = FluidPlant(STORE, gap_s=64 / 600, cores=2.0)
    other.advance(10.0)
    observation = other.observe()
    assert observation is not None
    assert "waiting " not in caplog.text
    tuner.finish(lambda: observation)
    assert "input-bound: waiting " in caplog.text


def test_a_move_after_the_last_look_is_in_the_log_and_the_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "penstock.autotune")
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0)
    tuner = Tuner(plant, ConnectorRules(), TWO_CORES, AutotuneLog())
    plant.advance(1.0)
    tuner.step()
    plant.advance(1.0)
    observation = plant.observe()
    assert observation is not None
    move = Move(DECODE, "inline", "process", "moved", "it pays", time_s=plant.now_s)
    last = replace(observation.segments[-1], moves=(move,), executor="process")
    tuner.finish(
        lambda: replace(observation, segments=(*observation.segments[:-1], last))
    )
    assert caplog.text.count(move.line) == 1
    assert tuner.found().executors[last.name] == "process"


def test_the_first_batch_of_a_loop_changes_no_verdict() -> None:
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0)
    plant.advance(10.0)
    observation = plant.observe()
    assert observation is not None

    def window(steps: int, wait_s: float, gap_s: float) -> Observation:
        trainer = replace(observation.trainer, steps=steps, wait_s=wait_s, gap_s=gap_s)
        return replace(
            observation, trainer=trainer, window_s=0.5, time_s=time.monotonic()
        )

    one, others = window(1, 0.04, 0.0), window(11, 0.0, 0.5)
    latest_window = latest((others, others, one), 10, 0.5)
    assert (latest_window.trainer.steps, latest_window.window_s) == (12, 1.0)
    assert verdict_of(wait_share(latest_window)) == "balanced"
    assert latest((others, one, others), 10, 0.5).trainer.steps == 11
    assert latest((others, one, others), 10, 1.0).trainer.steps == 12
    assert latest((one,), 10, 5.0).trainer.steps == 1
    spoken = Spoken()
    assert spoken.due(others)
    later = replace(one, time_s=others.time_s + VERDICT_CHANGE_S)
    assert not spoken.due(later)
    assert spoken.due(replace(later, window_s=FEW_STEPS_S))


def test_a_verdict_that_alternates_is_logged_less_and_less_often() -> None:
    plant = FluidPlant(STORE, gap_s=64 / 600, cores=2.0)
    plant.advance(10.0)
    observation = plant.observe()
    assert observation is not None
    spoken, seconds = Spoken(), []
    for second in range(601):
        wait_s = 0.6 if second % 2 else 0.0
        trainer = replace(observation.trainer, steps=20, wait_s=wait_s, gap_s=1.0)
        if spoken.due(replace(observation, trainer=trainer, time_s=float(second))):
            seconds.append(second)
    assert seconds[:4] == [0, 5, 16, 37]
    assert len(seconds) < 20  # of 120
