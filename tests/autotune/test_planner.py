"""Predictions of what a measured pipeline would do elsewhere, by simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.autotune.log import AutotuneLog
from penstock.autotune.planner import (
    Surroundings,
    measured_workload,
    plan,
    plan_nodes,
)
from penstock.autotune.policies import BottleneckLaw
from penstock.autotune.simulator import (
    Machine,
    Simulated,
    SimulatedStage,
    Trainer,
    Workload,
)
from penstock.autotune.tuner import Tuner
from penstock.errors import SpecError
from penstock.system.resources import Budget

READS = Workload(
    (
        SimulatedStage("read", cpu_s=0.0005, wait_s=0.1),
        SimulatedStage("decode", cpu_s=0.01),
    ),
    Trainer(gap_s=0.04),
    batch_rows=8,
)
"""A trainer of 200 rows/s: 20 reads at once, two cores of decoding."""
ROW_CPU_S = 0.0105


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a tuned run on one core."""
    folder = tmp_path_factory.mktemp("tuned")
    machine = Machine(1.0)
    plant = Simulated(machine, READS, [1, 1], [2, 2])
    with AutotuneLog(str(folder / "run"), quiet=True) as rows:
        tuner = Tuner(plant, BottleneckLaw(), Budget(1.0, 1 << 30), rows)
        while machine.now_s < 30:
            machine.advance(tuner.step())
    return folder / "run_0.jsonl"


def test_a_log_says_how_long_a_sample_takes(log: Path) -> None:
    found = measured_workload(log)
    read, decode = found.stages
    assert read.wait_s == pytest.approx(0.1, rel=0.2)
    assert decode.cpu_s == pytest.approx(0.01, rel=0.2)
    assert found.batch_rows == 8
    assert found.trainer.gap_s == pytest.approx(0.04, rel=0.1)


def test_more_cores_gain_what_the_law_says_until_the_trainer_is_fed() -> None:
    one, two, four = (plan(READS, cores) for cores in (1.0, 2.0, 4.0))
    assert one.rows_per_s == pytest.approx(1 / ROW_CPU_S, rel=0.1)
    assert two.rows_per_s == pytest.approx(2 / ROW_CPU_S, rel=0.1)
    assert four.rows_per_s == pytest.approx(200, rel=0.03)
    assert "not input-bound" in str(four)
    assert "CPU" in one.explanation.cause


def test_the_plan_names_the_workers_of_each_stage() -> None:
    text = str(plan(READS, 4.0))
    assert "decode" in text
    assert "workers" in text


def test_the_plan_of_a_log_uses_the_names_in_the_log(log: Path) -> None:
    told = plan(measured_workload(log), 2.0).explanation
    assert [stage.name for stage in told.stages] == [
        "Map(ID:0) read",
        "Map(ID:1) decode",
    ]


@pytest.mark.parametrize("text", ["", "{", '{"event": "verdict"}\n', "[]\n"])
def test_a_file_without_training_is_an_error_that_says_so(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "run_0.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match="run_0.jsonl"):
        measured_workload(path)


def test_a_log_of_another_version_is_an_error_that_says_so(
    log: Path, tmp_path: Path
) -> None:
    older = tmp_path / "run_0.jsonl"
    older.write_text(log.read_text().replace('"process_cpu_s"', '"used_cores"'))
    with pytest.raises(SpecError, match="another version of penstock .*used_cores"):
        measured_workload(older)


def test_a_plan_for_nodes_says_when_the_store_becomes_the_limit() -> None:
    photos = replace(READS, source_bytes=1e5)
    around = Surroundings(store_bytes_per_s=1e9, spread=0.0)
    found = plan_nodes(photos, 4.0, [1, 8, 64], around)
    firsts = [first for first, _ in found.epochs]
    assert [first.rows_per_s for first in firsts] == pytest.approx(
        [200, 1_600, 10_000], rel=1e-3
    )
    assert [first.binds for first in firsts][-1] == "the store's bandwidth"
    assert "the store's bandwidth" in str(found)


def test_a_plan_for_nodes_knows_what_their_cores_can_load() -> None:
    found = plan_nodes(READS, 1.0, [16], Surroundings(spread=0.0))
    ((first, later),) = found.epochs
    assert first == later
    assert first.rows_per_s == pytest.approx(16 / ROW_CPU_S, rel=0.01)
    assert first.binds == "a node's own loading"


def test_a_store_is_compared_with_samples_of_a_known_size() -> None:
    with pytest.raises(SpecError, match="how large a sample is"):
        plan_nodes(READS, 4.0, [2], Surroundings(store_bytes_per_s=1e9))


def test_a_cache_is_compared_with_data_of_a_known_size() -> None:
    with pytest.raises(SpecError, match="--data-size"):
        plan_nodes(READS, 4.0, [2], Surroundings(ram_bytes=1e9))


def test_a_plan_covers_trainers_that_take_no_time() -> None:
    idle = replace(READS, trainer=Trainer(gap_s=0.0))
    ((first, _),) = plan_nodes(idle, 4.0, [2], Surroundings()).epochs
    assert first.rows_per_s == pytest.approx(2 * idle.best_rows_per_s(4.0))
