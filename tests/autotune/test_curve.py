"""Rates by numbers of workers: what they say, and which number is tried next."""

from __future__ import annotations

import pytest

from penstock.autotune.policies.curve import efficiency, probe


def test_of_rates_as_good_as_the_best_the_fewest_workers_count() -> None:
    assert probe(((2, 100.0), (8, 101.0)), 8, 1, 16) == 2


def test_efficiency_is_measured_from_the_next_fewer_tried() -> None:
    curve = ((1, 100.0), (2, 150.0), (4, 165.0))
    assert efficiency(curve, 4) == pytest.approx(0.1)
