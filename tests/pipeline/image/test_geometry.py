"""The distribution of crops, and its edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.image.geometry import (
    Box,
    central_box,
    random_box,
    short_side_size,
)

RATIO = (3 / 4, 4 / 3)


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    seed=st.integers(0, 2**32),
    least=st.floats(0.01, 1.0),
)
def test_a_box_lies_inside_its_image(
    height: int, width: int, seed: int, least: float
) -> None:
    rng = np.random.default_rng(seed)
    box = random_box(height, width, (least, 1.0), RATIO, rng)
    assert 0 <= box.top <= height - box.height
    assert 0 <= box.left <= width - box.width
    assert min(box.height, box.width) >= 1


def test_area_and_aspect_stay_in_their_ranges_and_fill_them() -> None:
    rng = np.random.default_rng(0)
    boxes = [random_box(1000, 1000, (0.1, 0.5), RATIO, rng) for _ in range(4000)]
    shares = np.array([box.height * box.width / 1e6 for box in boxes])
    aspects = np.log([box.width / box.height for box in boxes])
    rounding = 0.01
    assert shares.min() >= 0.1 - rounding
    assert shares.max() <= 0.5 + rounding
    assert shares.mean() == pytest.approx(0.3, abs=0.01)
    assert shares.std() == pytest.approx(0.4 / math.sqrt(12), abs=0.01)
    assert np.abs(aspects).max() <= math.log(4 / 3) + rounding
    assert aspects.mean() == pytest.approx(0, abs=0.01)
    assert aspects.std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.01)


def test_every_position_is_drawn() -> None:
    rng = np.random.default_rng(0)
    boxes = [random_box(4, 4, (1 / 16, 1 / 16), (1, 1), rng) for _ in range(400)]
    assert {(box.top, box.left) for box in boxes} == {
        (top, left) for top in range(4) for left in range(4)
    }


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (30, 3000, Box(0, 1480, 30, 40)),  # wider than 4:3: 30 by 40 in the middle
        (4000, 30, Box(1980, 0, 40, 30)),  # narrower than 3:4: 40 by 30
        (3000, 3000, Box(0, 0, 3000, 3000)),
        (1, 9, Box(0, 4, 1, 1)),
    ],
)
def test_the_box_is_the_largest_central_one_where_no_draw_fits(
    height: int, width: int, expected: Box
) -> None:
    class Misfit(np.random.Generator):
        def uniform(self, low: float, high: float) -> float:  # type: ignore[override]
            return high

    rng = Misfit(np.random.PCG64(0))
    assert random_box(height, width, (1.0, 1.0), RATIO, rng) == expected


@given(
    height=st.integers(16, 2000),
    width=st.integers(16, 2000),
    factor=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 2**32),
)
def test_a_reduced_box_is_in_the_reduced_image_and_half_a_pixel_off_at_most(
    height: int, width: int, factor: int, seed: int
) -> None:
    box = random_box(height, width, (0.3, 1), RATIO, np.random.default_rng(seed))
    small = box.reduced(factor)
    bottom, right = small.top + small.height, small.left + small.width
    assert bottom <= -(-height // factor)
    assert right <= -(-width // factor)
    assert abs(small.top - box.top / factor) <= 0.5
    assert abs(bottom - (box.top + box.height) / factor) <= 0.5


def test_a_central_box_leaves_equal_margins() -> None:
    assert central_box(10, 20, 4, 4) == Box(3, 8, 4, 4)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((375, 500), (256, 341)), ((500, 375), (341, 256)), ((9, 9), (256, 256))],
)
def test_the_short_side_becomes_the_size_and_the_aspect_stays(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert short_side_size(*size, 256) == expected
