"""Noise: how many windows it takes before a measurement counts."""

from __future__ import annotations

from dataclasses import replace

from penstock.autotune.trial import MAX_NOISE_WINDOWS, Noise
from support.windows import starved


def after(*rows: int) -> Noise:
    """Return the noise of windows that finished these numbers of rows."""
    noise = Noise()
    for count in rows:
        see(noise, count)
    return noise


def see(noise: Noise, rows: int) -> bool:
    window = starved()
    segments = tuple(replace(segment, rows=rows) for segment in window.segments)
    return noise.see(replace(window, segments=segments))


def test_one_window_is_evidence_until_another_says_otherwise() -> None:
    assert after().windows == 1
    assert after(64).windows == 1


def test_a_steady_pipeline_is_judged_by_one_window() -> None:
    assert after(*[64, 66, 63, 65] * 4).windows == 1


def test_the_more_windows_differ_the_more_of_them_it_takes() -> None:
    # 60 and 90 in turn differ by 40 %, which is 28 % of noise; 10 % are allowed.
    assert after(*[60, 90] * 8).windows == 8
    assert after(*[20, 90] * 8).windows == MAX_NOISE_WINDOWS


def test_a_change_of_knobs_is_not_noise() -> None:
    noise = after(*[64] * 4)
    noise.cut()
    for _ in range(4):
        see(noise, 256)
    assert noise.windows == 1


def test_another_load_is_told_from_noise() -> None:
    steady, noisy = after(*[64, 66] * 4), after(*[60, 90] * 4)
    assert see(steady, 40)
    assert not see(noisy, 60)


def test_a_window_in_which_nothing_finished_says_nothing() -> None:
    noise = after(64, 64)
    see(noise, 0)
    assert noise.windows == 1
