"""The choice of threads or processes, trainer or host process, from measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.policies.kinds import NO_KINDS, Kinds, Past
from penstock.autotune.policies.policy import KnobKey, KnobView, Situation
from penstock.autotune.trial import Decision, DecisionOutcome, Measure, Trial, Verdict
from penstock.autotune.tuner import Tuner
from penstock.engine.observe.observation import (
    ContentionObservation,
    Observation,
    PartObservation,
    TrainerObservation,
)
from penstock.system.resources import Budget
from support.simulator.machine import Machine
from support.simulator.plant import Simulated
from support.simulator.workload import SimulatedStage, Workload
from support.simulator.workload import Trainer as SimulatedTrainer
from support.windows import DECODE, computing, eased_situation, situation

EXECUTOR = (DECODE, "executor")
HOST = ("Pipeline", "host")


def kind(value: str) -> KnobView:
    kinds: tuple[str, ...] = "thread", "process"
    if value in ("inline", "trainer"):
        kinds = value, "process"
    return KnobView(0, 0, 0, tunable=True, kind=value, choices=kinds)


def bound(**changes: object) -> Situation:
    """Return pure Python on threads of two cores, and a trainer that waits for it."""
    observation = replace(computing(), gil_held=0.97, process_cpu_s=1.03)
    executor = str(changes.pop("executor", "thread"))
    read, decode = observation.segments
    decode = replace(decode, executor=executor)
    observation = replace(observation, segments=(read, decode), **changes)  # type: ignore[arg-type]
    case = situation(observation)
    knobs = {**case.knobs, EXECUTOR: kind(executor)}
    return replace(case, knobs=knobs, budget=Budget(2.0, 1 << 30))


def tried(case: Situation, kinds: Kinds = NO_KINDS) -> list[tuple[object, object]]:
    return [(d.new, d.knob) for d in kinds.other_executor(case)]


def test_processes_are_tried_where_the_gil_is_held_and_cores_are_idle() -> None:
    law = BottleneckLaw()
    (decision, workers), _ = law.decide(bound(), law.start())
    assert (decision.old, decision.new) == ("thread", "process")
    assert decision.reason == (
        f"Op ({DECODE}) is tried on processes: the GIL is held 97% of the time while"
        " 1.03 of 2 cores are used: processes may use the rest."
    )
    assert decision.expected == pytest.approx(2 / 1.03)
    assert (workers.knob, workers.new) == ("num_parallel_workers", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"process_cpu_s": 1.9},
        {"gil_held": 0.04},
        {"gil_held": None},
        {"trainer": replace(computing().trainer, wait_s=0.001, gap_s=1.0)},
    ],
    ids=["no core is idle", "the GIL is free", "nobody has looked", "nobody waits"],
)
def test_threads_stay_where_one_of_these_conditions_is_missing(
    change: dict[str, object],
) -> None:
    assert tried(bound(**change)) == []


def at_a_lock(share: float) -> Situation:
    """Return threads that wait this share of their time for one lock."""
    case = bound(gil_held=0.05, process_cpu_s=0.1)
    read, decode = case.observation.segments
    waits = replace(decode, cpu_s=0.01, looked=100, lined=int(100 * share))
    return replace(case, observation=replace(case.observation, segments=(read, waits)))


def test_processes_are_tried_where_threads_wait_for_one_lock() -> None:
    assert tried(at_a_lock(0.3)) == []
    law = BottleneckLaw()
    (decision, *_), _ = law.decide(at_a_lock(0.8), law.start())
    assert (decision.old, decision.new) == ("thread", "process")
    assert decision.reason == (
        f"Op ({DECODE}) is tried on processes: its threads wait for one lock 80% of"
        " their time, and processes have one each."
    )
    case = at_a_lock(0.8)
    knobs = {key: knob for key, knob in case.knobs.items() if key != EXECUTOR}
    decisions, _ = law.decide(replace(case, knobs=knobs), law.start())
    assert not [
        d for d in decisions if d.knob == "num_parallel_workers" and d.added > 0
    ]
    free = replace(at_a_lock(0.0), knobs=knobs)
    more, _ = law.decide(free, law.start())
    assert [d for d in more if d.knob == "num_parallel_workers" and d.added > 0]


def test_a_segment_that_hardly_computes_is_not_blamed_for_the_gil() -> None:
    case = bound()
    read, decode = case.observation.segments
    observation = replace(
        case.observation, segments=(replace(read, cpu_s=9.0), replace(decode))
    )
    assert tried(replace(case, observation=observation)) == []


@pytest.mark.parametrize(("blocked", "tries"), [(0.05, 0), (0.2, 1), (0.9, 0)])
def test_processes_are_tried_where_threads_compute_and_block_by_turns(
    blocked: float, tries: int
) -> None:
    case = bound(gil_held=0.1, process_cpu_s=1.58)
    read, decode = case.observation.segments
    decode = replace(decode, cpu_s=(1 - blocked) * decode.run_s)
    read = replace(read, cpu_s=0.0)
    observation = replace(case.observation, segments=(read, decode))
    decisions = tried(replace(case, observation=observation))
    assert [knob for _, knob in decisions].count("executor") == tries


def test_threads_are_tried_where_they_have_not_been_measured() -> None:
    assert tried(bound(executor="process")) == [("thread", "executor")]


def test_a_knob_that_is_pinned_or_missing_is_left_alone() -> None:
    case = bound()
    pinned = replace(kind("thread"), tunable=False)
    assert tried(replace(case, knobs={**case.knobs, EXECUTOR: pinned})) == []
    assert tried(replace(case, knobs={})) == []


def outcome(old: str, new: str, before: float, after: float) -> DecisionOutcome:
    decision = Decision(
        DECODE, "executor", old, new, rule="executor", reason="", expected=1.9
    )
    measures = Measure(before, 0.9, 1.0), Measure(after, 0.9, 1.0)
    return DecisionOutcome(decision, after > before, *measures)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_trial_is_repeated_after_two_minutes_then_four(executor: str) -> None:
    other = "process" if executor == "thread" else "thread"
    lost = (outcome(executor, other, 100.0, 70.0),)
    once = NO_KINDS.learned(lost, bound(executor=executor).observation)
    twice = once.learned(lost, bound(executor=executor).observation)
    for kinds, wait_s in ((once, 120.0), (twice, 240.0)):
        for late_s, tries in ((-1.0, 0), (1.0, 1)):
            later = bound(executor=executor, time_s=1.0 + wait_s + late_s)
            knobs = [knob for _, knob in tried(later, kinds)]
            assert knobs.count("executor") == tries


def test_other_work_makes_old_results_worthless() -> None:
    lost = (outcome("thread", "process", 100.0, 70.0),)
    case = bound()
    kinds = NO_KINDS.learned(lost, case.observation)
    assert tried(case, kinds) == []
    read, decode = case.observation.segments
    dearer = replace(decode, rows=decode.rows // 3)
    observation = replace(case.observation, segments=(read, dearer))
    assert tried(replace(case, observation=observation), kinds) != []


def test_a_kept_trial_says_the_reverse_of_the_kind_it_left() -> None:
    outcomes = (outcome("thread", "process", 100.0, 200.0),)
    kinds = NO_KINDS.learned(outcomes, bound().observation)
    [(lost, past)] = kinds.pasts.items()
    assert lost == (EXECUTOR, "thread")
    assert past.change == pytest.approx(-0.5)


def test_a_past_result_holds_for_the_same_work_for_a_while() -> None:
    past = Past(-0.3, 1, 50.0, cpu_s=0.01)
    assert past.speaks(169.0, 0.01)
    assert not past.speaks(171.0, 0.01)
    assert not past.speaks(60.0, 0.03)


def rated(rows: int) -> Observation:
    observation = computing()
    segments = tuple(replace(segment, rows=rows) for segment in observation.segments)
    return replace(observation, segments=segments)


@pytest.mark.parametrize(
    ("new", "rows", "verdict"),
    [
        ("process", 1700, Verdict.KEEP),
        ("process", 1010, Verdict.ROLL_BACK),
        ("process", 600, Verdict.ROLL_BACK),
        ("thread", 1300, Verdict.KEEP),
        ("thread", 990, Verdict.KEEP),
        ("thread", 930, Verdict.ROLL_BACK),
        ("thread", 550, Verdict.ROLL_BACK),
    ],
)
def test_processes_must_gain_while_threads_only_must_not_lose(
    new: str, rows: int, verdict: Verdict
) -> None:
    old = "thread" if new == "process" else "process"
    expected = 1.9 if new == "process" else 1.0
    decision = Decision(
        DECODE, "executor", old, new, rule="executor", reason="", expected=expected
    )
    trial = Trial((decision,), (rated(1000),) * 3)
    result = Verdict.MORE
    while result is Verdict.MORE:
        trial = trial.seen(rated(rows))
        result = trial.verdict()
    assert result is verdict


def contended(beside_s: float, alone_s: float, *, certain: bool = True) -> Situation:
    case = eased_situation()
    contention, steps = ContentionObservation(beside_s, alone_s, certain), 100
    trainer = TrainerObservation(steps, 64 * steps, 0.0, steps * beside_s)
    observation = replace(case.observation, contention=contention, trainer=trainer)
    return replace(case, observation=observation, knobs={HOST: kind("trainer")})


def test_an_engine_in_the_trainers_way_is_tried_in_another_process() -> None:
    [decision] = NO_KINDS.other_host(contended(0.0072, 0.005))
    assert (decision.key, decision.new) == (HOST, "process")
    assert "takes 7.2 ms while batches are loaded beside it, 5 ms" in decision.reason
    assert decision.expected == pytest.approx(1.44)  # as if loading were free


def test_small_or_doubtful_growth_is_not_worth_a_host_process() -> None:
    assert list(NO_KINDS.other_host(contended(0.0051, 0.005))) == []
    assert list(NO_KINDS.other_host(contended(0.0072, 0.005, certain=False))) == []


def test_a_tiny_share_of_a_step_is_not_worth_a_host_process() -> None:
    case = contended(0.000_04, 0.000_03)
    trainer = replace(case.observation.trainer, wait_s=0.2)
    observation = replace(case.observation, trainer=trainer)
    assert list(NO_KINDS.other_host(replace(case, observation=observation))) == []


def test_threads_give_way_to_processes_on_many_cores() -> None:
    case = replace(bound(), budget=Budget(16.0, 1 << 30))
    there = {**case.knobs, HOST: kind("trainer")}
    [decision] = NO_KINDS.off_threads(replace(case, knobs=there))
    assert (decision.key, decision.new) == (HOST, "process")
    assert "with 16 cores, worker processes are tried instead" in decision.reason
    few = replace(case, knobs=there, budget=Budget(2.0, 1 << 30))
    moved = replace(case, knobs={**case.knobs, HOST: kind("process")})
    far = replace(bound(executor="process"), knobs=there, budget=case.budget)
    read, decode = far.observation.segments
    both = replace(read, executor="process"), decode
    far = replace(far, observation=replace(far.observation, segments=both))
    lost = Kinds({(HOST, "process"): Past(-0.2, 1, case.observation.time_s)})
    assert list(lost.off_threads(replace(case, knobs=there))) == []
    for other in (case, few, moved, far):
        assert list(NO_KINDS.off_threads(other)) == []


def test_processes_do_not_go_back_to_threads_on_many_cores() -> None:
    assert tried(bound(executor="process")) == [("thread", "executor")]
    many = replace(bound(executor="process"), budget=Budget(16.0, 1 << 30))
    assert tried(many) == []


@pytest.mark.parametrize(("share", "kinds"), [(0.9, ["process"]), (0.1, [])])
def test_processes_are_tried_where_collating_is_most_of_the_trainers_wait(
    share: float, kinds: list[str]
) -> None:
    case = bound(gil_held=0.0)
    waits_s = case.observation.trainer.wait_s
    trainer = replace(case.observation.trainer, collate_s=share * waits_s)
    case = replace(case, observation=replace(case.observation, trainer=trainer))
    assert [new for new, knob in tried(case) if knob == "executor"] == kinds


@pytest.mark.parametrize(("share", "new"), [(0.9, "process"), (0.1, "thread")])
def test_collating_moves_from_the_trainer_to_processes_first(
    share: float, new: str
) -> None:
    case = bound(executor="inline")
    observation = case.observation
    read, decode = observation.segments
    map_part, collate = (
        PartObservation(name, part * decode.run_s_per_row, 0.0, None)
        for name, part in ((DECODE, 1.0 - share), ("Batch(ID:3)", share))
    )
    decode = replace(decode, parts=(map_part, collate))
    wait_s = decode.run_s_per_row * observation.trainer.rows
    trainer = replace(observation.trainer, wait_s=wait_s)
    observation = replace(observation, segments=(read, decode), trainer=trainer)
    choices = replace(kind("inline"), choices=("inline", "thread", "process"))
    case = replace(
        case, observation=observation, knobs={**case.knobs, EXECUTOR: choices}
    )
    assert tried(case)[0] == (new, "executor")


def test_the_law_waits_for_the_gil_probe_before_it_adds_threads_that_compute() -> None:
    policy = BottleneckLaw()
    case, memory = bound(gil_held=None), policy.start()
    for _ in range(3):
        decisions, memory = policy.decide(case, memory)
        assert decisions == ()
    decisions, _ = policy.decide(case, memory)
    assert [d.knob for d in decisions] == ["num_parallel_workers"]


PYTHON = Workload(
    (SimulatedStage("tokenize", cpu_s=0.004, gil=1.0, movable=True),),
    SimulatedTrainer(gap_s=0.02),
    batch_rows=32,
)
"""Pure Python of 4 ms a sample: one core's worth on threads, four on processes."""


def test_python_that_holds_the_gil_ends_up_on_processes_in_the_simulator() -> None:
    machine = Machine(4.0, 0)
    plant = Simulated(machine, PYTHON, [1], [2])
    budget = Budget(4.0, 1 << 40, whole_machine=True)
    tuner = Tuner(plant, BottleneckLaw(), budget, AutotuneLog())
    while machine.now_s < 30.0:
        machine.advance(tuner.step())
    steps, began_s = plant.steps, machine.now_s
    while machine.now_s < 45.0:
        machine.advance(tuner.step())
    rate = (plant.steps - steps) * 32 / (machine.now_s - began_s)
    assert dict(tuner.found().executors) == {"Map(ID:0) tokenize": "process"}
    assert rate >= 0.8 * 4.0 / 0.004


def one(executor: str, step_s: float, alone_s: float) -> Situation:
    """Return one segment: steps take `step_s`, and `alone_s` for the trainer alone."""
    observation = bound(executor=executor).observation
    rows = observation.trainer.rows / observation.trainer.steps
    trainer = replace(
        observation.trainer, gap_s=0.0, wait_s=step_s * observation.trainer.steps
    )
    decode = replace(observation.segments[1], alone_s_per_row=alone_s / rows)
    observation = replace(observation, segments=(decode,), trainer=trainer)
    return replace(bound(executor=executor), observation=observation)


def several(case: Situation) -> Situation:
    """Return the situation of several segments that the trainer made fast."""
    segments = tuple(
        replace(segment, alone_s_per_row=1e-6) for segment in case.observation.segments
    )
    return replace(case, observation=replace(case.observation, segments=segments))


def test_workers_slower_than_the_trainer_was_alone_are_stopped() -> None:
    (decision,) = NO_KINDS.alone(one("process", 0.010, 0.005), 1.3)
    assert (decision.old, decision.new, decision.frees) == ("process", "inline", True)
    assert decision.reason == (
        f"Op ({DECODE}) goes back to the trainer: a step takes 10 ms, and took 5 ms"
        " without workers."
    )
    for stays in (
        one("process", 0.010, 0.009),
        one("process", 0.010, 0.0),  # not measured
        one("inline", 0.010, 0.005),
        several(bound(executor="process")),
    ):
        assert not tuple(NO_KINDS.alone(stays, 1.3))


def test_a_trial_of_the_trainer_alone_is_not_repeated_at_once() -> None:
    case = one("process", 0.010, 0.005)
    lost = (outcome("process", "inline", 100.0, 70.0),)
    kinds = NO_KINDS.learned(lost, case.observation)
    assert not tuple(kinds.alone(case, 1.3))
    observation = replace(case.observation, time_s=case.observation.time_s + 121.0)
    assert tuple(kinds.alone(replace(case, observation=observation), 1.3))


def computing_on(executor: str, rates: dict[str, float], time_s: float) -> Situation:
    """Return a segment of pure Python that makes this many samples a second."""
    gil_held = 0.9 if executor == "thread" else None
    case = bound(executor=executor, gil_held=gil_held, time_s=time_s)
    observation = case.observation
    decode = replace(
        observation.segments[1], rows=64, alone_s_per_row=1 / rates["inline"]
    )
    trainer = replace(observation.trainer, rows=64, steps=1, gap_s=0.0)
    trainer = replace(trainer, wait_s=64 / rates[executor])
    observation = replace(observation, segments=(decode,), trainer=trainer)
    every = replace(kind(executor), choices=("inline", "thread", "process"))
    knobs: dict[KnobKey, KnobView] = {(DECODE, "executor"): every}
    return replace(case, observation=observation, knobs=knobs)


@given(
    rates=st.fixed_dictionaries(
        {name: st.floats(50.0, 5000.0) for name in ("inline", "thread", "process")}
    ),
    began=st.sampled_from(["inline", "thread"]),
)
def test_pure_python_ends_on_the_fastest_kind(
    rates: dict[str, float], began: str
) -> None:
    policy, executor = BottleneckLaw(), began
    memory = policy.start()
    outcomes: tuple[DecisionOutcome, ...] = ()
    for look in range(12):
        case = computing_on(executor, rates, 1.0 + look)
        case = replace(case, outcomes=outcomes)
        decisions, memory = policy.decide(case, memory)
        moves = [d for d in decisions if d.knob == "executor"]
        outcomes = tuple(
            DecisionOutcome(
                decision,
                kept=rates[str(decision.new)] >= 1.03 * rates[executor],
                before=Measure(rates[executor], 0.9, 1.0),
                after=Measure(rates[str(decision.new)], 0.9, 1.0),
            )
            for decision in moves
        )
        if outcomes and outcomes[0].kept:
            executor = str(moves[0].new)
    assert rates[executor] >= max(rates.values()) / 1.03**2, executor


def test_threads_that_were_slower_than_the_trainer_lead_to_processes() -> None:
    """Threads that are in each other's way may be left before the GIL is looked at."""
    rates = {"inline": 1180.0, "thread": 795.0, "process": 2000.0}
    case = computing_on("inline", rates, 2.0)
    went = (outcome("thread", "inline", 795.0, 1180.0),)
    kinds = NO_KINDS.learned(went, case.observation)
    decision, *_ = kinds.other_executor(case)
    assert (decision.old, decision.new) == ("inline", "process")
    assert decision.reason.endswith("threads were 33% slower.")
    busy = replace(case.observation, process_cpu_s=1.9)
    assert tried(replace(case, observation=busy), kinds) == []
    (waiting,) = case.observation.segments
    waiting = replace(waiting, run_s=10.0 * waiting.cpu_s)
    observation = replace(case.observation, segments=(waiting,))
    assert tried(replace(case, observation=observation), kinds) == []
    lost = kinds.learned((outcome("inline", "process", 1180.0, 900.0),), observation)
    assert tried(case, lost) == []


def test_a_trainer_that_makes_long_batches_tries_workers() -> None:
    def short(run_s_per_row: float) -> Situation:
        case = one("inline", 0.010, 0.005)
        (segment,) = case.observation.segments
        segment = replace(segment, run_s=run_s_per_row * segment.rows)
        observation = replace(case.observation, segments=(segment,))
        return replace(case, observation=observation)

    assert tried(short(0.001))[:1] == [("process", "executor")]
    assert tried(short(0.00001)) == []
