"""Predictions of what a measured pipeline would do elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import cli
from penstock.autotune.log import AutotuneLog
from penstock.autotune.planner import (
    Projection,
    Workload,
    measured_workloads,
    plan_nodes,
    table_of,
)
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.tuner import Tuner
from penstock.engine.observe.observation import SegmentObservation
from penstock.errors import SpecError
from penstock.system.resources import Budget
from support.recordings import record
from support.simulator.machine import Machine
from support.simulator.plant import Simulated
from support.simulator.workload import SimulatedStage, Trainer
from support.simulator.workload import Workload as SimulatedWorkload


def measured(name: str, cpu_s: float, wait_s: float = 0.0) -> SegmentObservation:
    """Return a stage that has made one row, in these seconds."""
    totals = {"rows": 1, "run_s": cpu_s + wait_s, "cpu_s": cpu_s}
    return SegmentObservation(name, name, "thread", 1, 2, **totals)


READS = Workload(
    (measured("read", 0.0005, 0.1), measured("decode", 0.01)),
    gap_s=0.04,
    batch_rows=8,
)
"""A trainer of 200 rows/s: 20 reads at once, two cores of decoding."""
ROW_CPU_S = 0.0105


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a tuned run on one core."""
    folder = tmp_path_factory.mktemp("tuned")
    machine = Machine(1.0)
    stages = [
        SimulatedStage(stage.name, cpu_s=stage.cpu_s, wait_s=stage.run_s - stage.cpu_s)
        for stage in READS.stages
    ]
    work = SimulatedWorkload(tuple(stages), Trainer(READS.gap_s), READS.batch_rows)
    plant = Simulated(machine, work, [1, 1], [2, 2])
    with AutotuneLog(str(folder / "run")) as rows:
        tuner = Tuner(plant, BottleneckLaw(), Budget(1.0, 1 << 30), rows)
        while machine.now_s < 30:
            machine.advance(tuner.step())
    return folder / "run_0.jsonl"


def test_a_log_says_how_long_a_sample_takes(log: Path) -> None:
    (workload,) = measured_workloads(log).values()
    read, decode = workload.stages
    wait_s = read.run_s_per_row - read.cpu_s_per_row
    assert wait_s == pytest.approx(0.1, rel=0.2)
    assert decode.cpu_s_per_row == pytest.approx(0.01, rel=0.2)
    assert workload.batch_rows == 8
    assert workload.gap_s == pytest.approx(0.04, rel=0.1)


def test_more_cores_gain_what_the_law_says_until_the_trainer_is_fed() -> None:
    one, two, four = (Projection(READS, cores) for cores in (1.0, 2.0, 4.0))
    assert one.rows_per_s == pytest.approx(1 / ROW_CPU_S)
    assert two.rows_per_s == pytest.approx(2 / ROW_CPU_S)
    assert four.rows_per_s == pytest.approx(200)
    assert one.binds == "CPU: all cores are busy, most of them with decode"
    assert str(four).splitlines() == [
        (
            "on 4 cores: 200 samples/s, the trainer waits 0% of each step"
            " (not input-bound)"
        ),
        "  read      21 workers, 0.10 cores",
        "  decode     2 workers, 2.00 cores",
        "  what binds: the trainer: loading keeps up with it",
    ]


@pytest.mark.parametrize("cores", [0.5, 1.0, 1.9, 8.0])
def test_the_named_workers_reach_the_speed_on_a_simulated_machine(
    cores: float,
) -> None:
    projection = Projection(READS, cores)
    stages = [
        SimulatedStage(stage.name, cpu_s=stage.cpu_s, wait_s=stage.run_s - stage.cpu_s)
        for stage in READS.stages
    ]
    work = SimulatedWorkload(tuple(stages), Trainer(READS.gap_s), READS.batch_rows)
    machine = Machine(cores)
    workers = [projection.workers(stage) for stage in READS.stages]
    plant = Simulated(machine, work, workers, [4, 4])
    machine.advance(20.0)
    plant.observe()
    machine.advance(60.0)
    rows_per_s = plant.observe().rows_per_s
    assert rows_per_s == pytest.approx(projection.rows_per_s, rel=0.15)


def test_an_iterable_has_one_worker() -> None:
    iterable = replace(measured("read", 0.0, 0.02), iterable=True)
    reads = replace(READS, stages=(iterable,))
    projection = Projection(reads, 4.0)
    assert projection.rows_per_s == pytest.approx(50)
    assert projection.binds == "read: it may have no more workers"


def test_the_plan_of_a_log_uses_the_names_in_the_log(log: Path) -> None:
    (workload,) = measured_workloads(log).values()
    names = [stage.name for stage in workload.stages]
    assert names == ["Map(ID:0) read", "Map(ID:1) decode"]


def test_each_pipeline_of_a_log_is_planned_unless_one_is_named(tmp_path: Path) -> None:
    for name in ("train", "val"):
        record(tmp_path / "run", name)
    workloads = measured_workloads(tmp_path / "run")
    assert [*workloads] == ["train", "val"]
    assert [*measured_workloads(tmp_path / "run", "val")] == ["val"]
    log = str(tmp_path / "run")
    plan = CliRunner().invoke(cli.app, ["plan", log, "--cores", "32", "--nodes", "64"])
    assert re.findall(r"^(\S+):$", plan.stdout, re.MULTILINE) == ["train", "val"]
    assert plan.stdout.count("what binds: ") == 2


@pytest.mark.parametrize("text", ["", "{", '{"event": "verdict"}\n', "[]\n"])
def test_a_file_without_training_is_an_error_that_says_so(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "run_0.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match="run_0.jsonl"):
        measured_workloads(path)


def test_a_log_of_another_version_is_an_error_that_says_so(
    log: Path, tmp_path: Path
) -> None:
    older = tmp_path / "run_0.jsonl"
    older.write_text(log.read_text().replace('"process_cpu_s"', '"used_cores"'))
    with pytest.raises(SpecError, match="another version of penstock .*used_cores"):
        measured_workloads(older)


def test_a_plan_for_nodes_says_when_the_store_becomes_the_limit() -> None:
    photos = replace(READS, source_bytes=1e5)
    plans = plan_nodes(photos, 4.0, [1, 8, 64], store_bytes_per_s=1e9, spread=0.0)
    firsts = [first for first, _ in plans]
    assert [first.rows_per_s for first in firsts] == pytest.approx(
        [200, 1_600, 10_000], rel=1e-3
    )
    assert [first.binds for first in firsts][-1] == "the store's bandwidth"
    assert "the store's bandwidth" in table_of(4.0, plans)


def test_a_plan_for_nodes_knows_what_their_cores_can_load() -> None:
    plans = plan_nodes(READS, 1.0, [16], spread=0.0)
    ((first, later),) = plans
    assert first == later
    assert first.rows_per_s == pytest.approx(16 / ROW_CPU_S, rel=0.01)
    assert first.binds == "a node's own loading"


def test_a_store_is_compared_with_samples_of_a_known_size() -> None:
    with pytest.raises(SpecError, match="how large a sample is"):
        plan_nodes(READS, 4.0, [2], store_bytes_per_s=1e9)


def test_a_cache_is_compared_with_data_of_a_known_size() -> None:
    with pytest.raises(SpecError, match="--data-size"):
        plan_nodes(READS, 4.0, [2], ram_bytes=1e9)


def test_a_plan_covers_trainers_that_take_no_time() -> None:
    idle = replace(READS, gap_s=0.0)
    ((first, _),) = plan_nodes(idle, 4.0, [2])
    assert first.rows_per_s == pytest.approx(2 * 4.0 / ROW_CPU_S)
