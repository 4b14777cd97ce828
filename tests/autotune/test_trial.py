"""Trials are kept, rolled back, or not judged yet."""

from dataclasses import asdict, replace

import pytest

from penstock.autotune.trial import Decision, Trial, Verdict
from penstock.autotune.window import cost_s, enough, joined
from penstock.engine.observe.observation import (
    Observation,
    TrainerObservation,
    WorkerReading,
)
from support.windows import READ, at_ease, rate, starved

GROWTH = Decision(
    READ, "num_parallel_workers", 1, 3, rule="slow", reason="as seen", expected=3.0
)
RELEASE = Decision(
    READ, "num_parallel_workers", 8, 2, rule="release", reason="as seen", expected=1.0
)


def eased(wait_s: float) -> Observation:
    trainer = TrainerObservation(5, 320, wait_s, 1 - wait_s)
    return replace(at_ease(), trainer=trainer)


def verdict(
    decision: Decision, before: list[Observation], after: list[Observation]
) -> Verdict:
    return Trial((decision,), tuple(before), tuple(after)).verdict()


def test_a_clear_gain_is_kept_after_one_window() -> None:
    assert verdict(GROWTH, [rate(64)], [rate(128)]) is Verdict.KEEP


def test_growth_that_gains_nothing_is_rolled_back_in_the_end() -> None:
    same, little = [rate(100)], replace(GROWTH, expected=1.05)
    short = [replace(rate(50), window_s=0.5)]
    assert verdict(little, same, short * 3) is Verdict.MORE
    assert verdict(little, same, short * 4) is Verdict.ROLL_BACK
    assert verdict(little, same, same * 2) is Verdict.MORE
    assert verdict(little, same, same * 3) is Verdict.ROLL_BACK  # three seconds


def test_growth_far_from_what_it_must_gain_is_given_up_after_two_windows() -> None:
    same = [rate(100)]
    assert verdict(GROWTH, same, same) is Verdict.MORE
    assert verdict(GROWTH, same, same * 2) is Verdict.ROLL_BACK
    uneven = [rate(50), rate(100), rate(150)]
    assert verdict(GROWTH, uneven, same * 2) is Verdict.MORE


@pytest.mark.parametrize(
    ("promised", "rows", "expected"),
    [(3.0, 110, Verdict.ROLL_BACK), (1.05, 102, Verdict.KEEP)],
)
def test_what_growth_must_gain_depends_on_what_it_promised(
    promised: float, rows: int, expected: Verdict
) -> None:
    growth = replace(GROWTH, expected=promised)
    assert verdict(growth, [rate(100)], [rate(rows)] * 4) is expected


def test_harm_is_rolled_back_after_two_windows_not_one() -> None:
    assert verdict(GROWTH, [rate(100)], [rate(60)]) is Verdict.MORE
    assert verdict(GROWTH, [rate(100)], [rate(60)] * 2) is Verdict.ROLL_BACK


def test_harm_within_the_noise_does_not_count_yet() -> None:
    noisy = [rate(60), rate(100), rate(140)]
    assert verdict(GROWTH, noisy, [rate(60), rate(120)]) is Verdict.MORE


def test_a_release_that_costs_nothing_is_kept() -> None:
    assert verdict(RELEASE, [eased(0.0)], [eased(0.0)] * 2) is Verdict.MORE
    assert verdict(RELEASE, [eased(0.0)], [eased(0.0)] * 3) is Verdict.KEEP


def test_a_release_that_makes_the_trainer_wait_is_rolled_back() -> None:
    after = [eased(0.0), eased(0.0), eased(0.04)]
    assert verdict(RELEASE, [eased(0.0)], after) is Verdict.ROLL_BACK


def test_noise_asks_for_more_windows_before_a_verdict() -> None:
    trial = Trial((GROWTH,), (rate(64),), (rate(128),))
    assert trial.verdict(least=3) is Verdict.MORE
    assert trial.seen(rate(128)).seen(rate(128)).verdict(least=3) is Verdict.KEEP


def test_growth_is_not_judged_while_connectors_fill() -> None:
    first, last = rate(100).segments
    filling = replace(rate(100), segments=(replace(first, rows=120), last))
    assert verdict(GROWTH, [rate(100)], [filling] * 4) is Verdict.MORE
    assert verdict(GROWTH, [rate(100)], [filling] * 12) is Verdict.ROLL_BACK


def in_step(decision: Decision, before: float, after: float) -> Verdict:
    """Return the verdict where steps take as long as before, whatever the wait."""
    waits = [eased(share) for share in (before, after)]
    return Trial((decision,), (waits[0],) * 4, (waits[1],) * 4, in_step=True).verdict()


def test_a_rank_in_step_gains_by_the_time_it_waits_for_others() -> None:
    assert in_step(GROWTH, before=0.5, after=0.0) is Verdict.KEEP
    assert in_step(GROWTH, before=0.5, after=0.5) is Verdict.ROLL_BACK


def test_a_rank_in_step_releases_nothing_that_others_would_wait_for() -> None:
    assert in_step(RELEASE, before=0.1, after=0.4) is Verdict.ROLL_BACK
    assert in_step(RELEASE, before=0.1, after=0.1) is Verdict.KEEP


def test_a_change_that_a_budget_demands_is_never_rolled_back() -> None:
    forced = replace(RELEASE, forced=True)
    assert verdict(forced, [rate(100)], [rate(50)]) is Verdict.KEEP


def test_outcomes_measure_both_sides() -> None:
    trial = Trial((GROWTH,), (rate(64),), (rate(128),))
    (outcome,) = trial.outcomes(kept=True)
    assert outcome.before.rows_per_s == pytest.approx(64)
    assert outcome.after.rows_per_s == pytest.approx(128)


def test_a_starving_window_is_evidence_by_its_rows_and_any_other_by_its_steps() -> None:
    assert enough(rate(8))
    assert not enough(rate(7))
    assert enough(eased(0.0))
    assert not enough(replace(eased(0.0), trainer=TrainerObservation(1, 64, 0.0, 0.2)))


def test_one_row_is_evidence_after_two_seconds() -> None:
    assert enough(replace(rate(1), window_s=2.0))
    assert not enough(replace(rate(0), window_s=2.0))


@pytest.mark.parametrize(
    ("loop_s", "loops", "window_s", "is_enough"),
    [
        (0.8, 0, 0.5, False),  # the midst of a short loop
        (0.8, 1, 0.5, False),
        (0.8, 2, 1.0, True),  # a whole one
        (0.8, 0, 2.5, True),  # a long one after them
        (0.0, 1, 0.5, True),  # no loop has ended yet
        (5.0, 0, 0.5, True),
    ],
)
def test_a_window_has_a_whole_loop_if_loops_are_short(
    loop_s: float, loops: int, window_s: float, *, is_enough: bool
) -> None:
    trainer = replace(eased(0.0).trainer, loops=loops, loop_s=loop_s)
    window = replace(eased(0.0), trainer=trainer, window_s=window_s)
    assert enough(window) == is_enough


def test_the_cost_is_the_trainers_own_where_it_does_not_starve() -> None:
    assert cost_s(eased(0.0)) == pytest.approx(1 / 320)
    assert cost_s(rate(50)) == pytest.approx(1 / 50)


def test_a_connector_that_runs_empty_does_not_flatter_the_rate() -> None:
    window = rate(50)
    draining = replace(window.segments[-1], rows=150)
    assert cost_s(replace(window, segments=(window.segments[0], draining))) == 1 / 50


def test_joined_windows_add_counts_and_average_levels_over_time() -> None:
    first, second = starved(), replace(at_ease(), window_s=3.0)
    whole = joined(first, second)
    assert whole.window_s == 4.0
    assert whole.trainer.steps == 6
    assert whole.segments[0].rows == 384
    assert whole.segments[1].output.utilization == pytest.approx(0.75)
    feeding = whole.segments[1].input
    assert feeding is not None
    assert feeding.utilization == pytest.approx(0.75)


def test_windows_of_another_pipeline_are_not_joined() -> None:
    other = replace(starved(), segments=starved().segments[:1])
    assert joined(starved(), other) is other


RELIEF = Decision(
    READ, "num_parallel_workers", 8, 6, rule="relief", reason="as seen", expected=1.0
)


def slowed(gap_s: float, wait_s: float = 0.0) -> Observation:
    """Return a window of a trainer whose steps take this long."""
    trainer = TrainerObservation(10, 640, 10 * wait_s, 10 * gap_s)
    return replace(at_ease(), trainer=trainer)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (slowed(0.015), Verdict.KEEP),
        (slowed(0.017, 0.0015), Verdict.KEEP),  # it waits, and the step is shorter
        (slowed(0.020), Verdict.ROLL_BACK),  # many steps down would add up
        (slowed(0.020, 0.002), Verdict.ROLL_BACK),
    ],
)
def test_fewer_workers_that_slow_the_trainer_less_must_pay_for_themselves(
    after: Observation, expected: Verdict
) -> None:
    assert verdict(RELIEF, [slowed(0.020)] * 3, [after] * 4) is expected


def by_processes(window_s: float, reports: int) -> Observation:
    """Return a window of 16 processes that are always busy: a batch takes a second.

    Args:
        window_s: its length.
        reports: batches of 64 rows that each of them reports in it.
    """
    window = rate(64)
    busy_s = 16 * window_s
    work = WorkerReading(
        rows=64 * 16 * reports,
        run_s=busy_s,
        settled_s=16.0 * reports,
        worker_s=busy_s,
    )
    there = tuple(
        replace(s, executor="process", **asdict(work)) for s in window.segments
    )
    return replace(window, segments=there, window_s=window_s)


def test_a_window_is_long_enough_for_a_report_of_each_process() -> None:
    assert not enough(by_processes(0.9, 1))
    assert enough(by_processes(1.1, 1))
    assert not enough(by_processes(0.6, 1))
    in_eight = (
        replace(segment, num_parallel_workers=16, children=8)
        for segment in by_processes(0.6, 1).segments
    )
    assert enough(replace(by_processes(0.6, 1), segments=tuple(in_eight)))
    slow = (
        replace(segment, settled_s=64.0 * 16)
        for segment in by_processes(3.0, 1).segments
    )
    assert enough(replace(by_processes(3.0, 1), segments=tuple(slow)))  # 64 s a batch


def test_processes_that_report_together_are_measured_by_how_long_they_were_busy() -> (
    None
):
    assert cost_s(by_processes(2.5, 2)) == pytest.approx(1 / (64 * 16))
    assert cost_s(by_processes(2.5, 3)) == pytest.approx(1 / (64 * 16))
    assert not enough(by_processes(2.5, 0))
