"""The policy alone, on observations made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.autotune.policies.bottleneck_law import BottleneckLaw, LawMemory
from penstock.autotune.policies.policy import KnobKey, KnobView, Situation
from penstock.autotune.trial import Decision, DecisionOutcome, Measure
from penstock.engine.observe.observation import (
    ConnectorObservation,
    ContentionObservation,
    Observation,
    TrainerObservation,
)
from support.windows import DECODE, READ, at_ease, computing, situation, starved

POLICY = BottleneckLaw()
WORKERS, PREFETCH = "num_parallel_workers", "prefetch_size"


def decide(case: Situation, memory: LawMemory | None = None) -> tuple[Decision, ...]:
    return POLICY.decide(case, memory or POLICY.start())[0]


def changes(decisions: tuple[Decision, ...]) -> list[tuple[str, str, int, int]]:
    return [(d.operator, d.knob, d.old, d.new) for d in decisions]


def outcome(old: int, new: int, before: float, after: float) -> DecisionOutcome:
    """Return the outcome of changing the reader's workers, in rows a second."""
    change = Decision(READ, WORKERS, old, new, "law", "", 2.0)
    kept = after > before
    return DecisionOutcome(
        change, kept, Measure(before, 0.9, 1.0), Measure(after, 0.9, 1.0)
    )


def known(*outcomes: DecisionOutcome) -> LawMemory:
    """Return a memory that has seen these outcomes in order."""
    memory = POLICY.start()
    for outcome in outcomes:
        case = replace(situation(starved()), outcomes=(outcome,))
        _, memory = POLICY.decide(case, memory)
    return memory


def with_workers(window: Observation, workers: int) -> Observation:
    """Return the observation with that many readers, all busy."""
    first = window.segments[0]
    crowd = replace(
        first,
        num_parallel_workers=workers,
        worker_s=float(workers),
        run_s=float(workers),
    )
    return replace(window, segments=(crowd, *window.segments[1:]))


def test_a_starved_trainer_gets_four_times_the_workers_at_once() -> None:
    # 64 rows/s of 15.6 ms each; the trainer takes 640.
    (decision,) = decide(situation(starved()))
    assert changes((decision,)) == [(READ, WORKERS, 1, 5)]
    assert decision.expected == pytest.approx(4.0)
    assert decision.reason == (
        f"Op ({READ}) takes 15.62 ms a sample: 256 samples/s keep 4.0 workers busy, and"
        " it has 1."
    )


def in_processes(window: Observation) -> Observation:
    """Return the observation with processes for workers."""
    segments = tuple(
        replace(segment, executor="process") for segment in window.segments
    )
    return replace(window, segments=segments)


def test_processes_become_one_for_each_core_at_once_if_the_trainer_needs_them() -> None:
    # 640 rows/s of 15.6 ms each keep ten workers busy; 16 cores have room for them.
    (decision, *_) = decide(situation(in_processes(starved())))
    assert changes((decision,)) == [(READ, WORKERS, 1, 12)]
    (decision, *_) = decide(situation(in_processes(starved()), cores=8.0))
    assert changes((decision,)) == [(READ, WORKERS, 1, 8)]


def test_no_more_than_sixteen_processes_are_added_beyond_one_for_each_core() -> None:
    crowd = in_processes(with_workers(starved(), 20))
    trainer = replace(crowd.trainer, rows=640, wait_s=0.99, gap_s=0.01)
    segments = tuple(replace(segment, rows=640) for segment in crowd.segments)
    window = replace(crowd, trainer=trainer, segments=segments)
    decisions = {d.operator: d for d in decide(situation(window, upper=64))}
    assert (decisions[READ].old, decisions[READ].new) == (20, 36)
    assert decisions[READ].expected == pytest.approx(1.8)


def test_the_trainers_own_speed_says_whether_workers_hinder_each_other() -> None:
    window = in_processes(with_workers(starved(), 16))
    # Sixteen make sixteen times the rate of one, and 32 no more: sixteen use all.
    output = window.segments[1].output
    first = replace(
        window.segments[0], rows=1024, alone_s_per_row=1 / 64, output=output
    )
    outcomes = (outcome(16, 32, 1024.0, 1024.0),)
    only = situation(replace(window, segments=(first,)))
    assert decide(replace(only, outcomes=outcomes)) == ()
    unknown = replace(first, alone_s_per_row=0.0)
    only = situation(replace(window, segments=(unknown,)))
    assert [d.rule for d in decide(replace(only, outcomes=outcomes))] == ["peak"]


HOST: KnobKey = ("Pipeline", "host")


def with_host(case: Situation) -> Situation:
    """Return the situation of work that may move to processes."""
    host = KnobView(
        0, 0, 0, tunable=True, kind="trainer", choices=("trainer", "process")
    )
    return replace(case, knobs={**case.knobs, HOST: host})


def test_work_moves_to_as_many_processes_as_it_needs() -> None:
    move, *more = decide(with_host(situation(starved())))
    assert (move.key, move.new) == (HOST, "process")
    assert changes(tuple(more)) == [(READ, WORKERS, 1, 12)]
    (alone,) = decide(with_host(situation(at_ease())))
    assert (alone.key, alone.new) == (HOST, "process")


@pytest.mark.parametrize(("kept", "curves"), [(True, [READ]), (False, [])])
def test_workers_of_a_kind_that_was_given_up_say_nothing_about_others(
    *, kept: bool, curves: list[str]
) -> None:
    case = with_host(situation(starved()))
    before, after = Measure(64.0, 0.9, 1.0), Measure(600.0, 0.1, 1.0)
    outcomes = tuple(
        DecisionOutcome(decision, kept, before, after) for decision in decide(case)
    )
    _, memory = POLICY.decide(replace(case, outcomes=outcomes), POLICY.start())
    assert list(memory.curves) == curves


def test_a_stage_gets_no_more_workers_than_keep_the_trainer_busy() -> None:
    window = starved()
    nearly = replace(window, trainer=replace(window.trainer, wait_s=0.5, gap_s=0.5))
    # 128 rows/s: two busy workers, and some to spare.
    (decision,) = decide(situation(nearly))
    assert changes((decision,)) == [(READ, WORKERS, 1, 3)]
    sentence = "128 samples/s keep 2.0 workers busy, and it has 1."
    assert decision.reason.endswith(sentence)


def test_the_cpu_bounds_what_is_possible() -> None:
    # 1.0 core makes 500 rows/s, so two make 1,000, whatever the trainer would take.
    assert changes(decide(situation(computing(), cores=2.0))) == [
        (DECODE, WORKERS, 1, 3)
    ]
    assert decide(situation(computing(), cores=1.0)) == ()


def test_the_users_bound_is_kept() -> None:
    assert changes(decide(situation(starved(), upper=2))) == [(READ, WORKERS, 1, 2)]


def test_a_pinned_stage_is_left_alone() -> None:
    assert decide(situation(starved(), tunable=False)) == ()


def test_the_peak_is_sought_between_the_best_and_the_numbers_beside_it() -> None:
    memory = known(outcome(1, 5, 60.0, 64.0), outcome(5, 21, 64.0, 25.0))
    crowd = with_workers(starved(), 5)
    (decision,) = decide(situation(crowd), memory)
    assert (decision.rule, decision.old, decision.new) == ("peak", 5, 2)


def test_the_law_goes_back_to_the_best_number_known() -> None:
    memory = known(outcome(32, 6, 50.0, 90.0), outcome(6, 12, 90.0, 70.0))
    crowd = with_workers(starved(), 12)
    (decision,) = decide(situation(crowd), memory)
    assert (decision.rule, decision.new) == ("peak", 6)


def test_workers_that_brought_nothing_are_given_back() -> None:
    # A trial may keep them all the same while the trainer lives on prefetched batches.
    memory = known(outcome(20, 32, 63.0, 64.0))
    (decision,) = decide(situation(with_workers(starved(), 32)), memory)
    assert (decision.rule, decision.new) == ("peak", 20)


def test_a_curve_that_contradicts_what_is_seen_is_forgotten() -> None:
    # The curve says 110 rows/s for five, perhaps thanks to stock; 64 is what is seen.
    memory = known(outcome(1, 5, 110.0, 110.0))
    (decision,) = decide(situation(with_workers(starved(), 5)), memory)
    assert (decision.rule, decision.old) == ("law", 5)


def test_fewer_workers_are_not_tried_where_each_brought_its_share() -> None:
    memory = known(outcome(2, 8, 16.0, 64.0), outcome(8, 9, 64.0, 50.0))
    crowd = with_workers(starved(), 8)
    assert decide(situation(crowd), memory) == ()


def test_nothing_is_tried_once_all_numbers_about_the_peak_are_known() -> None:
    memory = known(
        outcome(2, 3, 53.0, 64.0),
        outcome(3, 4, 64.0, 47.0),
    )
    assert decide(situation(with_workers(starved(), 3)), memory) == ()


def test_numbers_too_close_to_tell_apart_are_not_tried() -> None:
    outcomes = outcome(33, 40, 50.0, 64.0), outcome(40, 46, 64.0, 60.0)
    assert decide(situation(with_workers(starved(), 40)), known(*outcomes)) == ()


def test_results_with_threads_say_nothing_of_processes() -> None:
    memory = known(outcome(1, 5, 100.0, 110.0))
    window = with_workers(starved(), 5)
    first, *rest = window.segments
    case = replace(window, segments=(replace(first, executor="process"), *rest))
    decisions, memory = POLICY.decide(situation(case), memory)
    assert READ not in memory.curves
    assert [decision.rule for decision in decisions] == ["law"]


def test_many_waiting_workers_get_a_prefetch_of_several_rows_each() -> None:
    # 640 rows/s of 62.5 ms keep 40 workers busy; twice as many need 108 and 7 batches.
    window = with_workers(starved(), 40)
    read, decode = (replace(segment, rows=640) for segment in window.segments)
    waits = replace(read, cpu_s=0.4), replace(decode, cpu_s=0.0)
    trainer = replace(window.trainer, rows=640, wait_s=0.5, gap_s=0.5)
    case = replace(window, segments=waits, trainer=trainer)
    knob_changes = changes(decide(situation(case, upper=200)))
    assert knob_changes == [(READ, PREFETCH, 2, 6), (READ, WORKERS, 40, 95)]
    tight = situation(case, upper=200, memory_bytes=1)
    assert [knob for _, knob, *_ in changes(decide(tight))] == [WORKERS]


def test_a_gain_elsewhere_makes_old_results_obsolete() -> None:
    memory = known(outcome(2, 3, 190.0, 230.0))
    assert memory.curves[READ] == ((2, 190.0), (3, 230.0))
    gain = outcome(1, 4, 100.0, 200.0)
    elsewhere = replace(gain, decision=replace(gain.decision, operator=DECODE))
    case = replace(situation(starved()), outcomes=(elsewhere,))
    assert READ not in POLICY.decide(case, memory)[1].curves


def test_queues_grow_where_workers_are_held_back_and_none_is_busy() -> None:
    window = starved()
    idle = replace(window.segments[0], run_s=0.1, wait_credit_s=0.9)
    case = replace(window, segments=(idle, window.segments[1]))
    knob_changes = changes(decide(situation(case, upper=1)))
    assert knob_changes == [(READ, PREFETCH, 2, 4)]
    assert decide(situation(case, upper=1, memory_bytes=1_000_001)) == ()


def test_idle_workers_are_given_back_down_to_what_the_trainer_needs() -> None:
    memory = POLICY.start()
    decisions: tuple[Decision, ...] = ()
    for _ in range(2):
        decisions, memory = POLICY.decide(situation(at_ease(workers=8)), memory)
    assert changes(decisions) == [(READ, WORKERS, 8, 2), (DECODE, WORKERS, 8, 2)]
    assert "the trainer does not wait" in decisions[0].reason


@pytest.mark.parametrize(("rows", "kept"), [(0, 8), (40, 7), (320, 7)])
def test_workers_do_not_count_as_idle_while_the_trainer_lives_on_stock(
    rows: int, kept: int
) -> None:
    window = at_ease(workers=8)  # the trainer takes 320 rows a second
    first = replace(window.segments[0], rows=rows, run_s=0.7 * rows / 40)
    memory, decisions = POLICY.start(), ()
    for _ in range(2):
        drained = replace(window, segments=(first, window.segments[1]))
        decisions, memory = POLICY.decide(situation(drained), memory)
    assert dict.fromkeys([READ], 8) | {d.operator: d.new for d in decisions} == {
        READ: kept,
        DECODE: 2,
    }


def test_a_wait_with_batches_ready_is_the_handover_and_changes_nothing() -> None:
    ready = ConnectorObservation(occupancy=128, capacity=128, empty=0.0, full=1.0)
    window = starved()
    last = replace(window.segments[1], output=ready)
    assert decide(situation(replace(window, segments=(window.segments[0], last)))) == ()


def at_the_gil(workers: int) -> Observation:
    """Return that many threads, held up by the GIL alone."""
    crowd = with_workers(starved(), workers)
    return replace(crowd, gil_held=0.95)


def test_no_thread_is_added_where_threads_take_turns_at_the_gil() -> None:
    assert decide(situation(at_the_gil(1))) == ()


def test_many_threads_that_queue_for_the_gil_become_fewer() -> None:
    (decision,) = decide(situation(at_the_gil(6)))
    assert (decision.old, decision.new, decision.rule) == (6, 3, "crowded")


def queued(workers: int) -> Observation:
    """Return that many computing workers, half of their time in the run queue."""
    crowd = with_workers(starved(), workers)
    first, *rest = crowd.segments
    waiting = replace(first, cpu_s=0.4 * first.run_s, run_queue_s=0.5 * first.run_s)
    return replace(crowd, segments=(waiting, *rest))


def test_no_worker_is_added_where_workers_wait_for_a_core() -> None:
    assert decide(situation(queued(2), cores=8.0)) == ()


def test_many_workers_that_wait_for_a_core_become_half_as_many_or_fewer() -> None:
    def thinned(workers: int) -> Decision:
        case = situation(queued(workers), cores=2.0)
        budget = replace(case.budget, whole_machine=True)
        (decision,) = decide(replace(case, budget=budget))
        return decision

    half, most = thinned(8), thinned(16)
    assert (half.old, half.new, half.rule) == (8, 4, "crowded")
    assert (most.old, most.new) == (16, 4)


def test_processes_share_no_gil() -> None:
    decisions = decide(situation(in_processes(at_the_gil(1))))
    assert [d.rule for d in decisions if d.knob == WORKERS] == ["law"]


def slowed(wait_s: float) -> Observation:
    """Return a trainer that loading slows down, and that waits this long a step."""
    contention = ContentionObservation(0.02, 0.01, certain=True)
    trainer = TrainerObservation(50, 3200, 50 * wait_s, 1.0)
    return replace(starved(), trainer=trainer, contention=contention)


def test_workers_that_cost_the_trainer_more_than_they_spare_it_are_reduced() -> None:
    (decision,) = decide(situation(with_workers(slowed(0.0001), 8)))
    assert changes((decision,)) == [(READ, WORKERS, 8, 6)]
    assert decision.rule == "relief"
    assert "own part of a step by 100%" in decision.reason


def test_a_trainer_that_waits_for_longer_gets_no_fewer_workers() -> None:
    crowd = with_workers(slowed(0.03), 8)
    assert all(d.rule != "relief" for d in decide(situation(crowd)))
