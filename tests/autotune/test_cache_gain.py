"""What a cache would save and cost at each place where one may stand."""

from __future__ import annotations

from dataclasses import replace

from penstock.autotune.explain import cache_advice
from penstock.engine.observe.observation import Observation, PartObservation
from support.windows import starved

READ = PartObservation("Folder(ID:0) read", 0.0001, 100 * 1024, 1000)
DECODE = PartObservation("Map(ID:1) decode", 0.0019, 1 << 20, 1000)
AUGMENT = PartObservation("Map(ID:2) augment", 0.0010, 1 << 18, None)


def seen(*parts: PartObservation) -> Observation:
    """Return a window of one segment with these operations."""
    observation = starved()
    segment = replace(observation.segments[0], parts=parts)
    return replace(observation, segments=(segment,))


def test_a_place_is_reported_with_what_it_saves_and_what_it_costs() -> None:
    (line,) = cache_advice(seen(READ, DECODE, AUGMENT))
    assert line == (
        "a cache after Map(ID:1) decode would save 0.85 of 3.00 ms of work a sample,"
        " and need 1.1 GiB (1,000 samples of 1.0 MiB): at most 1.4x faster"
    )


def test_a_place_that_saves_next_to_nothing_is_not_reported() -> None:
    assert not [*cache_advice(seen(READ, replace(AUGMENT, run_s_per_row=0.002)))]


def test_a_cache_has_no_place_behind_a_random_operation() -> None:
    assert not [*cache_advice(seen(AUGMENT, DECODE))]


def test_an_operation_that_was_not_measured_is_not_reported() -> None:
    assert not [*cache_advice(seen(replace(DECODE, bytes_per_row=0.0)))]


def test_an_operation_as_fast_as_a_cache_is_not_cached() -> None:
    fast = replace(READ, run_s_per_row=0.00002, bytes_per_row=100.0)
    assert not [*cache_advice(seen(fast))]
