"""A permutation is one to one, as good as random, and the same everywhere."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.engine.plan import Shuffle


def all_of(length: int, seed: int = 0, round_: int = 0) -> NDArray[np.int64]:
    return Shuffle(length, seed).at(round_, np.arange(length))


def sigmas(observed: NDArray[np.int64]) -> float:
    """Return how many standard deviations chi-square exceeds its expected value."""
    expected = observed.sum() / observed.size
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = observed.size - 1
    return float((chi_square - freedom) / math.sqrt(2 * freedom))


LENGTHS = [*range(1, 40), 255, 256, 4095, 4096, 4097, 4225, 4226, 10_007, 70_000]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_index_comes_exactly_once(length: int) -> None:
    assert np.array_equal(np.sort(all_of(length, seed=3)), np.arange(length))


@pytest.mark.parametrize("length", [10, 4096, 4097, 10**12])
def test_any_number_of_positions_may_be_asked_for_in_any_order(length: int) -> None:
    shuffle = Shuffle(length, 5)
    positions = np.random.default_rng(0).integers(0, length, 300)
    one_by_one = [int(shuffle.at(2, positions[i : i + 1])[0]) for i in range(300)]
    assert shuffle.at(2, positions).tolist() == one_by_one


@pytest.mark.parametrize(
    ("length", "first"),
    [
        (10, [6, 2, 0, 4]),
        (4096, [815, 2362, 3563, 2961]),
        (4097, [537, 2314, 3799, 3354]),
        (10**12, [541725777801, 836630845638, 140231057724, 722110642609]),
    ],
)
def test_the_order_is_the_same_in_every_release(length: int, first: list[int]) -> None:
    assert Shuffle(length, 7).at(3, np.arange(4)).tolist() == first


@pytest.mark.parametrize("length", [2**40, 10**12, 2**63 - 1])
def test_the_longest_datasets_are_shuffled_within_their_bounds(length: int) -> None:
    positions = np.concatenate([np.arange(2000), length - 1 - np.arange(2000)])
    indices = Shuffle(length, 0).at(0, positions)
    assert indices.dtype == np.int64
    assert np.unique(indices).size == 4000
    assert indices.min() >= 0
    assert indices.max() < length


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_are_about_equally_frequent(length: int) -> None:
    orders = {o: i for i, o in enumerate(itertools.permutations(range(length)))}
    drawn = [
        orders[tuple(all_of(length, seed, round_).tolist())]
        for seed in range(30)
        for round_ in range(len(orders))
    ]
    assert abs(sigmas(np.bincount(drawn, minlength=len(orders)))) < 5


@pytest.mark.parametrize("length", [6, 7, 8])
def test_each_of_a_few_samples_is_equally_frequent_in_every_place(length: int) -> None:
    drawn = np.zeros((length, length), np.int64)
    for seed in range(2000):
        drawn[np.arange(length), all_of(length, seed)] += 1
    # Rows and columns each sum to 2000: degrees of freedom are fewer than cells.
    assert sigmas(drawn.ravel()) < 5


@pytest.mark.parametrize("length", [4097, 10**6, 10**9, 10**12])
def test_a_long_order_shows_no_structure(length: int) -> None:
    """Bin pairs in a row, second differences, two rounds, and low bits of pairs."""
    positions = np.arange(min(length, 2**16))
    for seed in range(5):
        here = Shuffle(length, seed).at(0, positions)
        there = Shuffle(length, seed).at(1, positions)
        bins, other, low = here * 64 // length, there * 64 // length, here % 64
        bends = (here[2:] - 2 * here[1:-1] + here[:-2]) % length * 1024 // length
        strides = (here[1024:] - here[:-1024]) % length * 1024 // length
        for observed, count in (
            (bins[1:] * 64 + bins[:-1], 4096),
            (bins * 64 + other, 4096),
            (low[1:] * 64 + low[:-1], 4096),
            (bends, 1024),
            (strides, 1024),
        ):
            assert sigmas(np.bincount(observed, minlength=count)) < 5


def test_a_seed_and_a_round_do_not_act_as_their_sum() -> None:
    orders = {
        tuple(all_of(50, seed, round_)) for seed in range(9) for round_ in range(9)
    }
    assert len(orders) == 81
