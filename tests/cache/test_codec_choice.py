"""The codec with the least expected cost is chosen, and every cost is shown."""

import itertools
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.codec import CODECS
from penstock.cache.picking import (
    SLIGHT,
    TIE,
    Measured,
    Picker,
    measure,
)

RAW_BYTES = 150_000
PHOTOGRAPHS = (
    Measured("raw", RAW_BYTES, 15_000, 15_000),
    Measured("lz4", 0.93 * RAW_BYTES, 110_000, 30_000),
    Measured("zstd", 0.86 * RAW_BYTES, 300_000, 160_000),
    Measured("filter", 0.49 * RAW_BYTES, 450_000, 290_000),
)
MASKS = (
    Measured("raw", RAW_BYTES, 15_000, 15_000),
    Measured("lz4", 0.10 * RAW_BYTES, 30_000, 20_000),
    Measured("zstd", 0.06 * RAW_BYTES, 60_000, 60_000),
    Measured("filter", 0.07 * RAW_BYTES, 150_000, 190_000),
)
NOISE = tuple(replace(each, nbytes=RAW_BYTES) for each in PHOTOGRAPHS)
SLOW_DISK, FAST_DISK, MEMORY = 100e6, 3e9, math.inf


Case = tuple[Picker, float, tuple[Measured, ...]]


def facts(
    measured: tuple[Measured, ...] = PHOTOGRAPHS,
    compute_ns: float = 1_500_000,
    capacity_bytes: float = 20e9,
    read_bytes_per_s: float = MEMORY,
) -> Case:
    """Return 100,000 photographs, which all fit into memory unless told otherwise."""
    picker = Picker("auto", "Cache(ID:2)", 100_000, capacity_bytes, read_bytes_per_s)
    return picker, compute_ns, measured


def costs_of(case: Case) -> list[tuple[float, float]]:
    picker, compute_ns, measured = case
    return [picker.expected(each, compute_ns) for each in measured]


def chosen(case: Case) -> str:
    picker, compute_ns, measured = case
    return picker.choice(measured, compute_ns).name


HALF = 7.5e9
"""The bytes of half of the photographs, raw."""


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (facts(), "raw"),
        (facts(NOISE, capacity_bytes=HALF), "raw"),
        (facts(NOISE, read_bytes_per_s=SLOW_DISK), "raw"),
        (facts(read_bytes_per_s=FAST_DISK), "raw"),
        (facts(MASKS, read_bytes_per_s=FAST_DISK), "lz4"),
        (facts(read_bytes_per_s=SLOW_DISK), "filter"),
        (facts(capacity_bytes=HALF), "filter"),
        (facts(capacity_bytes=HALF, compute_ns=200_000), "raw"),
        (facts(MASKS, capacity_bytes=HALF), "lz4"),
        (facts(MASKS, capacity_bytes=HALF / 6, compute_ns=10**7), "zstd"),
        (facts(capacity_bytes=0), "raw"),
    ],
    ids=[
        "all fits in memory",
        "nothing makes it smaller, it does not fit",
        "nothing makes it smaller, the disk is slow",
        "all fits on a fast disk",
        "all fits on a fast disk, and lz4 does much",
        "all fits on a slow disk",
        "half fits, and it is dear to compute",
        "half fits, and it is cheap to compute",
        "half fits, and lz4 makes all fit",
        "a twelfth fits, and it is very dear to compute",
        "nothing fits",
    ],
)
def test_the_codec_suits_the_tier(case: Case, name: str) -> None:
    assert chosen(case) == name


def test_a_cost_is_the_expected_cost_of_hits_and_misses() -> None:
    half = facts(capacity_bytes=HALF * 0.49, read_bytes_per_s=1e9)
    *_, (cost_ns, hit) = costs_of(half)
    read_ns = 290_000 + 0.49 * 150_000
    assert hit == pytest.approx(0.5)
    assert cost_ns == pytest.approx(0.5 * (read_ns + 450_000 / 10) + 0.5 * 1_500_000)


numbers = st.floats(1, 1e9)
measurements = st.lists(
    st.builds(
        Measured,
        name=st.sampled_from([each.name for each in CODECS.values()]),
        nbytes=st.floats(150, 180_000),
        encode_ns=numbers,
        decode_ns=numbers,
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda each: each.name,
)


@given(
    measurements,
    st.builds(
        dict,
        compute_ns=numbers,
        capacity_bytes=st.floats(0, 1e12),
        read_bytes_per_s=st.floats(1e3, 1e11),
    ),
)
def test_no_earlier_codec_is_as_good_and_no_other_is_much_better(
    measured: list[Measured], others: dict[str, float]
) -> None:
    case = facts(tuple(measured), **others)
    choice, found = chosen(case), costs_of(case)
    costs = {
        each.name: cost_ns for each, (cost_ns, _) in zip(measured, found, strict=True)
    }
    bound = min(costs.values()) * (1 + TIE) + SLIGHT * others["compute_ns"]
    assert costs[choice] <= bound
    simpler = list(costs)[: list(costs).index(choice)]
    assert all(costs[name] > bound for name in simpler)
    assert all(0 <= hit <= 1 for _, hit in found)


def test_the_log_shows_each_cost_and_the_share_that_is_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    chosen(facts(capacity_bytes=HALF))
    assert "raw 0.758 ms (50% found)" in caplog.text


def test_codecs_are_timed_with_the_clock_that_is_given() -> None:
    image = np.add.outer(np.arange(60), np.arange(60)).astype(np.uint8)
    ticks = itertools.count(0, 7)
    found = measure([image, image], clock=lambda: next(ticks))
    assert [each.name for each in found] == ["raw", "lz4", "zstd", "filter"]
    assert {(each.encode_ns, each.decode_ns) for each in found} == {(7, 7)}
    raw, *packed = [each.nbytes for each in found]
    assert raw > image.nbytes
    assert all(0.01 < nbytes / raw < 0.7 for nbytes in packed)
