"""What is found of the trainer's gaps, and what is said of a move."""

from __future__ import annotations

import random

from penstock.engine.host.contention import (
    CYCLES,
    SETTLING_STEPS,
    STEPS,
    Contention,
    Trial,
)


def found(at_work: float, in_peace: float, noise: float, seed: int = 0) -> Contention:
    dice = random.Random(seed)
    contention = Contention()
    while not contention.whole:
        gaps = [at_work, at_work, at_work, in_peace]
        contention = contention.seen([g * dice.gauss(1, noise) for g in gaps])
    return contention


def test_it_takes_a_number_of_cycles() -> None:
    assert len(found(1, 1, 0).cycles) == CYCLES


def test_a_gap_that_grows_is_costly() -> None:
    contention = found(0.0072, 0.005, 0.05)
    assert contention.costly
    assert 0.25 < contention.growth < 0.4


def test_noise_alone_is_hardly_ever_taken_for_a_cost() -> None:
    verdicts = [found(0.005, 0.005, 0.05, seed).costly for seed in range(200)]
    assert sum(verdicts) <= 4


def test_a_small_growth_is_not_worth_a_move() -> None:
    assert not found(0.0051, 0.005, 0.001).costly


def test_a_few_slow_steps_do_not_make_a_finding() -> None:
    contention = found(0.005, 0.005, 0.001)
    slow = [(0.5, 0.005)] * 4
    assert not Contention((*contention.cycles[4:], *slow)).costly


def judged(before: float, after: float) -> Trial:
    trial = Trial((before,) * 30)
    for _ in range(SETTLING_STEPS):
        trial = trial.seen(10 * after)  # it begins with nothing in stock
    while not trial.whole:
        trial = trial.seen(after)
    return trial


def test_a_move_that_shortens_the_step_is_kept() -> None:
    assert judged(0.010, 0.009).kept
    assert not judged(0.010, 0.0101).kept


def test_a_single_pause_does_not_decide() -> None:
    trial = judged(0.010, 0.009)
    assert Trial(trial.before, (*trial.after[:-1], 9.0)).kept
    assert len(trial.after) == STEPS
