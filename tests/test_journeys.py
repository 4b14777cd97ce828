"""A sample, a decision and a cache hit cross no more modules than they did."""

from __future__ import annotations

import os

import journeys
import pytest

LIMITS = {
    "by threads": 15,
    "by processes, trainer": 21,
    "by processes, worker": 14,
    "decision": 26,
    "cache hit": 7,
}
"""Modules that a journey may cross. These figures only fall: to 14 by threads, 18 in a
worker process, and 16 for a decision. The READMEs of `engine`, `autotune` and `cache`
tell of them."""


def no_longer(crossed: frozenset[str], journey: str) -> None:
    """Assert that something of ours ran, and that it crosses few modules."""
    assert 0 < len(crossed) <= LIMITS[journey], sorted(crossed)


def test_a_sample_by_threads_crosses_few_modules() -> None:
    crossed = journeys.of_samples("thread")[os.getpid()]
    no_longer(crossed, "by threads")
    assert "penstock.engine.workers" in crossed


@pytest.mark.long
def test_a_sample_by_processes_crosses_few_modules_on_both_sides() -> None:
    crossed = journeys.by_processes()
    for journey, modules in crossed.items():
        no_longer(modules, journey)
    assert "penstock.engine.far.worker" in crossed["by processes, worker"]


@pytest.mark.long
def test_a_decision_crosses_few_modules() -> None:
    crossed = journeys.of_decision()
    no_longer(crossed, "decision")
    assert "penstock.autotune.policies.bottleneck_law" in crossed


def test_a_cache_hit_crosses_few_modules() -> None:
    crossed = journeys.of_hit()
    no_longer(crossed, "cache hit")
    assert "penstock.cache.memory" in crossed
