"""Settings found for one batch or image size take effect again when it comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.autotune.log import AutotuneLog, read_saved
from penstock.autotune.policies.bottleneck_law import BottleneckLaw, LawMemory
from penstock.autotune.policies.policy import PerRegime, Situation, Values
from penstock.autotune.report.recording import read_recording
from penstock.autotune.report.terminal import report_on
from penstock.autotune.tuner import Tuner
from penstock.system.resources import Budget
from support.json_lines import rows_in
from support.simulator.machine import Machine
from support.simulator.plant import Simulated
from support.simulator.workload import SimulatedStage, Trainer, Workload
from support.windows import READ, at_ease, situation, starved

SMALL, LARGE = "batches of 32 of 128 px", "batches of 32 of 224 px"
CORES = 64.0
ROUND_S = 20.0


def loading(wait_s: float, regime: str) -> Workload:
    """Return a store with this time a row, for a trainer of 640 rows a second."""
    store = SimulatedStage("read", wait_s=wait_s, cpu_s=0.0001, row_bytes=1000.0)
    return Workload((store,), Trainer(gap_s=0.05), regime=regime)


LIGHT, HEAVY = loading(0.010, SMALL), loading(0.080, LARGE)


class Course:
    """A tuned, simulated run that goes through regimes."""

    def __init__(
        self,
        regimes: Mapping[str, Values] | None = None,
        log: AutotuneLog | None = None,
    ) -> None:
        self.machine = Machine(CORES, 0)
        self.plant = Simulated(self.machine, LIGHT, [1], [2])
        self.tuner = Tuner(
            self.plant,
            BottleneckLaw(),
            Budget(CORES, 1 << 40),
            log or AutotuneLog(),
            found=regimes,
        )

    def run(self, workload: Workload, seconds: float) -> float:
        """Switch to a workload; return its rate as a share of the trainer's own."""
        self.plant.change(workload)
        steps, end_s = self.plant.steps, self.machine.now_s + seconds
        while self.machine.now_s < end_s:
            self.machine.advance(self.tuner.step())
        return (self.plant.steps - steps) * workload.trainer.gap_s / seconds

    @property
    def workers(self) -> int:
        return self.plant.knobs()[0].value


def test_a_regime_that_comes_back_is_served_at_once() -> None:
    course = Course()
    course.run(LIGHT, ROUND_S)
    course.run(HEAVY, ROUND_S)
    settled = course.workers
    course.run(LIGHT, ROUND_S)
    assert course.workers < settled / 3
    course.run(HEAVY, 1.0)
    assert course.workers == settled
    assert course.run(HEAVY, 5.0) >= 0.97


def test_an_unknown_regime_is_tuned_in_seconds() -> None:
    course = Course()
    course.run(LIGHT, ROUND_S)
    course.run(HEAVY, 8.0)
    assert course.run(HEAVY, 8.0) >= 0.95


def test_a_run_begins_each_regime_with_what_the_previous_run_found(
    tmp_path: Path,
) -> None:
    with AutotuneLog(str(tmp_path / "run")) as log:
        first = Course(log=log)
        first.run(LIGHT, ROUND_S)
        first.run(HEAVY, ROUND_S)
        first.tuner.finish()
    (saved,) = read_saved(tmp_path / "run_0.json").values()
    knob = first.plant.knobs()[0]
    key = (knob.operator, knob.name)
    assert saved.values(LARGE)[key] == first.workers
    assert saved.values(SMALL)[key] < first.workers / 3
    assert saved.values("batches of 7") == saved.knobs
    second = Course(saved.regimes)
    second.run(LIGHT, 2.0)
    second.run(HEAVY, 1.0)
    assert second.workers == first.workers


def test_a_first_regime_of_a_moment_does_not_cost_the_next_ones_values() -> None:
    first = Course()
    first.run(LIGHT, ROUND_S)
    first.run(HEAVY, ROUND_S)
    second = Course(first.tuner.found().regimes)
    second.run(LIGHT, 0.6)  # too short for a decision
    assert second.workers == 1
    second.run(HEAVY, 1.0)
    assert second.workers == first.workers


def test_a_change_that_a_boundary_undoes_is_not_reported_as_open(
    tmp_path: Path,
) -> None:
    with AutotuneLog(str(tmp_path / "run"), name="train") as log:
        course = Course(log=log)
        while course.workers == 1:  # until a trial has begun
            course.run(LIGHT, 0.5)
        course.run(loading(0.001, LARGE), ROUND_S)  # for which one worker is enough
        course.tuner.finish()
    events = [row["event"] for row in rows_in(tmp_path / "run_0.jsonl")]
    assert events.count("outcome") < events.count("decision")
    recording = read_recording(tmp_path / "run")
    assert "not judged" not in report_on(recording)


def test_a_run_through_regimes_can_be_replayed(tmp_path: Path) -> None:
    with AutotuneLog(str(tmp_path / "run")) as log:
        course = Course(log=log)
        for workload in (LIGHT, HEAVY, LIGHT, HEAVY):
            course.run(workload, ROUND_S)
    policy = PerRegime(BottleneckLaw())
    memory = policy.start()
    rows, again = [], []
    for row in map(json.loads, (tmp_path / "run_0.jsonl").read_text().splitlines()):
        if row["event"] == "decision":
            rows.append((row["op"], row["knob"], row["old"], row["new"], row["rule"]))
        elif row["event"] == "observation":
            decisions, memory = policy.decide(Situation.from_row(row), memory)
            again += [(d.operator, d.knob, d.old, d.new, d.rule) for d in decisions]
    assert rows == again
    assert "regime" in {rule for *_, rule in rows}


POLICY: PerRegime[LawMemory] = PerRegime(BottleneckLaw())


def test_restored_settings_respect_the_bounds_and_pins_of_the_user() -> None:
    key = (READ, "num_parallel_workers")
    first = situation(replace(at_ease(), regime=SMALL))
    _, memory = POLICY.decide(first, POLICY.start())
    later = situation(replace(starved(), regime=LARGE))
    _, memory = POLICY.decide(later, memory)
    back = situation(replace(starved(), regime=SMALL), upper=4)
    restored, _ = POLICY.decide(back, memory)
    assert {d.key: (d.old, d.new) for d in restored}[key] == (1, 4)
    assert all(decision.forced for decision in restored)
    pinned = situation(replace(starved(), regime=SMALL), tunable=False)
    assert POLICY.decide(pinned, memory)[0] == ()
