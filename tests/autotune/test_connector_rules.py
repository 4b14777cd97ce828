"""The policy alone, on observations made by hand."""

from dataclasses import replace

from connector_rules import ConnectorRules, RulesMemory

from penstock.autotune.policies.policy import Situation
from penstock.autotune.trial import Decision, DecisionOutcome, Measure
from penstock.engine.observe.observation import Observation, TrainerObservation
from support.windows import (
    DECODE,
    READ,
    at_ease,
    computing,
    situation,
    starved,
    with_output,
)

POLICY = ConnectorRules()
STARVED, EASED = Measure(64.0, 0.9, 1.0), Measure(320.0, 0.0, 0.2)
"""Measurements in `starved()` and `at_ease()`."""


def decide(case: Situation, memory: RulesMemory | None = None) -> tuple[Decision, ...]:
    return POLICY.decide(case, memory or POLICY.start())[0]


def changes(decisions: tuple[Decision, ...]) -> list[tuple[str, str, int, int]]:
    return [(d.operator, d.knob, d.old, d.new) for d in decisions]


def eased_for(windows: int, observation: Observation) -> tuple[Decision, ...]:
    memory, decisions = POLICY.start(), ()
    for _ in range(windows):
        decisions, memory = POLICY.decide(situation(observation), memory)
    return decisions


def short_wait(observation: Observation) -> Observation:
    trainer = TrainerObservation(steps=10, rows=640, wait_s=0.05, gap_s=0.95)
    return replace(observation, trainer=trainer)


def test_a_segment_with_a_fuller_input_than_output_gets_two_workers() -> None:
    (decision,) = decide(situation(starved()))
    assert changes((decision,)) == [(READ, "num_parallel_workers", 1, 3)]
    assert decision.rule == "slow"
    assert decision.reason == (
        f"Op ({READ}) is slow, input connector utilization=1.000000, output connector"
        " utilization=0.000000, diff=1.000000 > 0.35 threshold."
    )


def test_a_segment_that_computes_gets_two_workers_too() -> None:
    nearly_full = with_output(computing(), 0.7)
    (decision,) = decide(situation(nearly_full))
    assert changes((decision,)) == [(DECODE, "num_parallel_workers", 1, 3)]
    assert (
        "high average worker cpu utilization 98.00% > 75% threshold" in decision.reason
    )


def test_prefetch_grows_where_no_worker_helps() -> None:
    (decision,) = decide(situation(starved(), upper=1))
    assert changes((decision,)) == [(DECODE, "prefetch_size", 2, 6)]
    assert decision.reason == (
        f"Op ({DECODE}) getting low average worker cpu utilization 4.00% < 35%"
        " threshold."
    )


def test_prefetch_does_not_grow_beyond_the_memory_budget() -> None:
    assert decide(situation(starved(), upper=1, memory_bytes=1_000_001)) == ()


def test_nothing_is_added_where_the_final_connector_is_full_enough() -> None:
    assert decide(situation(with_output(starved(), 0.76))) == ()


def test_nothing_is_added_where_the_trainer_hardly_waits() -> None:
    trainer = TrainerObservation(steps=10, rows=640, wait_s=0.02, gap_s=0.98)
    assert decide(situation(replace(starved(), trainer=trainer))) == ()


def test_a_short_wait_must_be_seen_twice() -> None:
    case = situation(short_wait(starved()))
    first, memory = POLICY.decide(case, POLICY.start())
    second, _ = POLICY.decide(case, memory)
    assert first == ()
    assert len(second) == 1


def test_a_pinned_stage_is_left_alone() -> None:
    assert decide(situation(starved(), tunable=False)) == ()


def test_the_users_bound_is_kept() -> None:
    (decision,) = decide(situation(starved(), upper=2))
    assert decision.new == 2


def test_computing_workers_stop_at_the_cpu_budget() -> None:
    # 1.0 core is busy now: three workers would use 3.0, two would use 2.0.
    assert decide(situation(computing(), cores=2.0))[0].new == 2
    assert decide(situation(computing(), cores=1.5)) == ()


def test_waiting_workers_may_be_many_more_than_cores() -> None:
    case = situation(starved(), cores=0.5)
    assert changes(decide(case)) == [(READ, "num_parallel_workers", 1, 3)]


def test_a_whole_machine_may_be_filled_up() -> None:
    case = situation(computing(), cores=1.5)
    budget = replace(case.budget, whole_machine=True)
    assert decide(replace(case, budget=budget))[0].new == 2


def test_a_broken_cpu_budget_is_restored_first_and_for_good() -> None:
    busy = computing()
    pair = replace(busy.segments[1], num_parallel_workers=2)
    observation = replace(busy, segments=(busy.segments[0], pair))
    (decision,) = decide(situation(observation, cores=0.5))
    assert changes((decision,)) == [(DECODE, "num_parallel_workers", 2, 1)]
    assert decision.forced


def test_idle_workers_are_given_back_after_a_while_without_waits() -> None:
    assert eased_for(2, at_ease()) == ()
    assert changes(eased_for(3, at_ease())) == [
        (READ, "num_parallel_workers", 8, 2),
        (DECODE, "num_parallel_workers", 8, 2),
    ]


def test_queues_are_given_back_once_no_worker_is_idle() -> None:
    lean = at_ease(workers=1)
    deep = replace(lean.segments[1], prefetch_size=10)
    observation = replace(lean, segments=(lean.segments[0], deep))
    assert changes(eased_for(3, observation)) == [(DECODE, "prefetch_size", 10, 8)]


def test_nothing_is_given_back_that_is_needed() -> None:
    assert eased_for(10, at_ease(workers=1)) == ()


def failure(old: int, new: int) -> DecisionOutcome:
    knob = "num_parallel_workers"
    decision = Decision(READ, knob, old, new, "slow", "as seen", 2.0)
    return DecisionOutcome(decision, kept=False, before=STARVED, after=STARVED)


def test_a_change_that_was_rolled_back_is_not_tried_again_for_a_minute() -> None:
    after_failure = replace(situation(starved()), outcomes=(failure(1, 3),))
    _, memory = POLICY.decide(after_failure, POLICY.start())
    soon, _ = POLICY.decide(situation(starved(time_s=60.0)), memory)
    later, _ = POLICY.decide(situation(starved(time_s=62.0)), memory)
    assert [d.knob for d in soon] == ["prefetch_size"]
    assert [d.knob for d in later] == ["num_parallel_workers"]


def test_a_second_failure_doubles_the_backoff() -> None:
    memory = POLICY.start()
    for time_s in (1.0, 100.0):
        case = situation(starved(time_s=time_s))
        after_failure = replace(case, outcomes=(failure(1, 3),))
        _, memory = POLICY.decide(after_failure, memory)
    during_backoff, _ = POLICY.decide(situation(starved(time_s=219.0)), memory)
    free, _ = POLICY.decide(situation(starved(time_s=221.0)), memory)
    assert READ not in {d.operator for d in during_backoff}
    assert READ in {d.operator for d in free}


def test_a_gain_elsewhere_ends_a_backoff_as_the_bottleneck_has_moved() -> None:
    after_failure = replace(situation(starved()), outcomes=(failure(1, 3),))
    _, memory = POLICY.decide(after_failure, POLICY.start())
    grown = Decision(DECODE, "num_parallel_workers", 1, 3, "slow", "as seen", 2.0)
    outcome = DecisionOutcome(grown, kept=True, before=STARVED, after=STARVED)
    case = replace(situation(starved(time_s=2.0)), outcomes=(outcome,))
    assert changes(decide(case, memory)) == [(READ, "num_parallel_workers", 1, 3)]


def test_a_slow_handover_is_no_reason_to_keep_idle_workers() -> None:
    observation = at_ease()
    slow = replace(
        observation, trainer=replace(observation.trainer, wait_s=0.015, gap_s=0.985)
    )
    assert changes(eased_for(3, slow)) == changes(eased_for(3, observation))


def test_another_load_ends_a_backoff_once_it_lasts() -> None:
    after_failure = replace(situation(starved()), outcomes=(failure(1, 3),))
    _, memory = POLICY.decide(after_failure, POLICY.start())
    slower = TrainerObservation(steps=1, rows=64, wait_s=0.7, gap_s=0.3)
    case = situation(replace(starved(time_s=2.0), trainer=slower))
    decisions, memory = POLICY.decide(case, memory)
    assert [decision.knob for decision in decisions] == ["prefetch_size"]
    for _ in range(3):
        decisions, memory = POLICY.decide(case, memory)
    assert changes(decisions) == [(READ, "num_parallel_workers", 1, 3)]


def test_a_change_judged_against_a_rate_that_did_not_last_is_tried_again() -> None:
    on_stock = replace(failure(1, 3), before=replace(STARVED, rows_per_s=150.0))
    case = replace(situation(starved()), outcomes=(on_stock,))
    _, memory = POLICY.decide(case, POLICY.start())
    decisions, _ = POLICY.decide(situation(starved(time_s=2.0)), memory)
    assert changes(decisions) == [(READ, "num_parallel_workers", 1, 3)]


def test_workers_are_not_reduced_to_a_number_found_too_small() -> None:
    observation = at_ease(workers=3)
    knob = "num_parallel_workers"
    grown = Decision(READ, knob, 2, 3, "slow", "as seen", 1.5)
    slower = replace(EASED, rows_per_s=EASED.rows_per_s / 2)
    outcome = DecisionOutcome(grown, kept=True, before=slower, after=EASED)
    memory = POLICY.start()
    _, memory = POLICY.decide(
        replace(situation(observation), outcomes=(outcome,)), memory
    )
    for _ in range(5):
        decisions, memory = POLICY.decide(situation(observation), memory)
    assert [d.operator for d in decisions] == [DECODE]


def test_the_same_situation_gives_the_same_decision() -> None:
    assert decide(situation(starved())) == decide(situation(starved()))
