"""The curve of rates by number of workers, and the number that it says to try next."""

from __future__ import annotations

import pytest

from penstock.autotune.policies.bottleneck_law import efficiency, probe, remembered
from penstock.autotune.trial import Decision, Trial
from support.windows import READ, rate

OTHER = {"other": ((1, 50.0), (2, 80.0))}


def after_gain(*, kept: bool) -> set[str]:
    """Return the operators whose curves are kept after one was given more workers."""
    growth = Decision(READ, "num_parallel_workers", 1, 3, "slow", "as seen", 3.0)
    trial = Trial((growth,), (rate(64),), (rate(128),))
    return set(remembered(OTHER, trial.outcomes(kept=kept)))


def test_a_gain_makes_the_curves_of_others_obsolete_while_it_is_kept() -> None:
    assert after_gain(kept=True) == {READ}
    assert after_gain(kept=False) == {"other", READ}


def test_the_fewest_workers_with_a_rate_as_good_as_the_best_count() -> None:
    assert probe(((2, 100.0), (8, 101.0)), 8, 1, 16) == 2


def test_efficiency_is_measured_against_the_next_smaller_number_tried() -> None:
    curve = ((1, 100.0), (2, 150.0), (4, 165.0))
    assert efficiency(curve, 4) == pytest.approx(0.1)


def test_nothing_is_tried_beyond_the_number_that_uses_all_of_something() -> None:
    free = ((1, 100.0), (16, 1560.0), (64, 1570.0))
    assert probe(free, 16, 1, 64, waits=True, only=True) is None
    # Another segment may have been the limit, or workers hinder each other.
    assert probe(free, 16, 1, 64, waits=True) == 32


def test_a_number_between_is_tried_where_more_workers_bring_less() -> None:
    crowd = ((1, 96.0), (2, 208.0), (5, 114.0))  # three bring 230
    assert probe(crowd, 2, 1, 64, waits=True, only=True) == 3
    crowded = ((1, 100.0), (16, 1300.0), (64, 1310.0))
    assert probe(crowded, 16, 1, 64, waits=True, only=True) == 32
