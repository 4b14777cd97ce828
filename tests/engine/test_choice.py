"""Threads or processes: what follows from what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine.choice import Advice, Evidence, Past, Trial, Verdict, propose

BOUND = Evidence(
    kind="thread",
    time_s=100.0,
    wait_share=0.9,
    cpu_share=1.0,
    used_cores=1.03,
    allowed_cores=2.0,
    gil_held=0.97,
)
"""Pure Python on two threads, and a trainer that waits for it."""


def test_a_held_gil_idle_cores_and_a_waiting_trainer_ask_for_processes() -> None:
    proposal = propose(BOUND)
    assert proposal.advice is Advice.TRY
    assert proposal.reason == (
        "the GIL is held 97% of the time while 1.03 of 2 cores are used: processes may "
        "use the rest"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wait_share": 0.01}, "the trainer waits only 1.0% of its step for data"),
        ({"cpu_share": 0.1}, "it takes only 10% of the CPU time of loading"),
        ({"used_cores": 1.9}, "1.90 of 2 cores are used: none is left"),
        ({"gil_held": 0.04}, "the GIL is held 4% of the time: threads do not wait"),
        ({"past": Past(-0.3, 1, 50.0)}, "processes were tried: -30% samples/s"),
    ],
)
def test_where_one_of_these_is_missing_threads_stay(
    change: dict[str, object], reason: str
) -> None:
    proposal = propose(replace(BOUND, **change))
    assert proposal.advice is Advice.STAY
    assert proposal.reason.startswith(reason)


def test_threads_that_compute_and_are_blocked_a_fifth_of_the_time_may_jostle() -> None:
    jostled = replace(BOUND, used_cores=1.58, gil_held=0.1, blocked=0.2)
    assert propose(jostled).reason == (
        "1.58 of 2 cores are used, and workers that compute are blocked 20% of the"
        " time: threads may be in one another's way"
    )
    for blocked in (0.05, 0.9):  # they do not; they wait for something else
        proposal = propose(replace(jostled, blocked=blocked))
        assert proposal.advice is Advice.STAY


def test_the_gil_is_looked_at_only_where_it_may_matter() -> None:
    unknown = replace(BOUND, gil_held=None)
    assert propose(unknown).advice is Advice.PROBE
    assert propose(replace(unknown, used_cores=1.9)).advice is Advice.STAY
    assert propose(replace(unknown, wait_share=0.0)).advice is Advice.STAY


def test_threads_are_tried_where_nothing_is_known_of_them() -> None:
    assert propose(replace(BOUND, kind="process")).advice is Advice.TRY


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_trial_is_repeated_after_two_minutes_then_four(kind: str) -> None:
    seen = replace(BOUND, kind=kind, past=Past(-0.3, 1, 0.0))
    assert propose(replace(seen, time_s=119.0)).advice is Advice.STAY
    assert propose(replace(seen, time_s=121.0)).advice is Advice.TRY
    twice = replace(seen, past=Past(-0.3, 2, 0.0))
    assert propose(replace(twice, time_s=239.0)).advice is Advice.STAY
    assert propose(replace(twice, time_s=241.0)).advice is Advice.TRY


def test_what_a_kept_trial_says_of_the_kind_left_is_its_reverse() -> None:
    assert Past(1.0, 1, 0.0).reversed().change == pytest.approx(-0.5)


STEADY = (1000.0, 1010.0, 990.0)


@pytest.mark.parametrize(
    ("new", "rate", "verdict"),
    [
        ("process", 1700.0, Verdict.KEEP),
        ("process", 1010.0, Verdict.BACK),
        ("process", 600.0, Verdict.BACK),
        ("thread", 1300.0, Verdict.KEEP),
        ("thread", 990.0, Verdict.KEEP),
        ("thread", 930.0, Verdict.BACK),
        ("thread", 550.0, Verdict.BACK),
    ],
)
def test_processes_must_gain_and_threads_must_not_lose(
    new: str, rate: float, verdict: Verdict
) -> None:
    trial = Trial(new, STEADY)  # type: ignore[arg-type]
    seen = Verdict.MORE
    while seen is Verdict.MORE:
        trial = trial.seen(rate)
        seen = trial.verdict()
    assert seen is verdict


def test_what_is_clear_takes_two_windows_and_what_is_not_takes_six() -> None:
    clear = Trial("process", STEADY, (1600.0,))
    assert clear.verdict() is Verdict.MORE
    assert clear.seen(1700.0).verdict() is Verdict.KEEP
    unclear = Trial("process", STEADY, (1040.0,) * 5)
    assert unclear.verdict() is Verdict.MORE
    assert unclear.seen(1040.0).verdict() is Verdict.BACK


def test_one_window_with_a_pause_in_it_does_not_count() -> None:
    trial = Trial("process", STEADY, (1700.0, 1700.0, 40.0))
    assert trial.change == pytest.approx(0.7)
