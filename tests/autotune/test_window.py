"""What the verdict names, the tuner acts on: from the same value on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.autotune.explain import explain
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.policies.kinds import NO_KINDS
from penstock.autotune.policies.policy import KnobView, Situation
from penstock.autotune.window import GIL_HELD, HELD_BACK, NEVER_EMPTY, WORTH
from penstock.engine.observe.observation import Observation, TrainerObservation
from penstock.system.resources import Budget
from support.windows import DECODE, computing, situation, starved

NEAR = pytest.mark.parametrize("share", [0.99, 1.01])
ROOMY = Budget(2.0, 1 << 30)


def acts(case: Situation) -> list[str]:
    """Return the rules of what the law decides, once it has seen the window twice."""
    law = BottleneckLaw()
    _, memory = law.decide(case, law.start())
    return [decision.rule for decision in law.decide(case, memory)[0]]


def several(window: Observation) -> Observation:
    """Return the window of four threads that compute."""
    read, decode = window.segments
    four: Any = {"num_parallel_workers": 4, "worker_s": 4.0, "run_s": 4.0, "cpu_s": 3.9}
    return replace(window, segments=(read, replace(decode, **four)))


@NEAR
def test_processes_are_tried_where_the_gil_is_the_cause(share: float) -> None:
    window = replace(several(computing()), gil_held=share * GIL_HELD, process_cpu_s=0.5)
    named = explain(window, Budget(8.0, 1 << 30)).cause.startswith("the GIL")
    kinds = KnobView(0, 0, 0, tunable=True, kind="thread", choices=("process",))
    case = situation(window, cores=8.0)
    case = replace(case, knobs={**case.knobs, (DECODE, "executor"): kinds})
    assert named == bool([*NO_KINDS.other_executor(case)]) == (share > 1)


@NEAR
def test_workers_are_added_where_the_trainer_waits(share: float) -> None:
    wait_s = share * WORTH
    trainer = TrainerObservation(10, 640, wait_s, 1.0 - wait_s)
    window = replace(starved(), trainer=trainer)
    bound = explain(window, ROOMY).verdict != "not input-bound"
    assert bound == ("law" in acts(situation(window))) == (share > 1)


@NEAR
def test_nothing_is_added_where_the_wait_is_for_the_hand_over(share: float) -> None:
    window = starved()
    read, decode = window.segments
    output = replace(decode.output, empty=share * NEVER_EMPTY)
    window = replace(window, segments=(read, replace(decode, output=output)))
    loading = not explain(window, ROOMY).cause.startswith("contention")
    assert loading == ("law" in acts(situation(window))) == (share > 1)


@NEAR
def test_queues_grow_where_samples_are_uneven(share: float) -> None:
    window = replace(starved(), trainer=TrainerObservation(10, 64, 0.5, 0.5))
    read, decode = window.segments
    held_s = 4 * share * HELD_BACK
    four: Any = {"num_parallel_workers": 4, "worker_s": 4.0, "run_s": 1.2, "cpu_s": 0.0}
    decode = replace(decode, **four, wait_input_s=0.0, wait_credit_s=held_s)
    read = replace(read, run_s=0.1, wait_credit_s=0.0)
    window = replace(window, segments=(read, decode))
    named = explain(window, ROOMY).cause.startswith("uneven samples")
    case = situation(window, upper=1)
    assert named == ("held_back" in acts(case)) == (share > 1)
