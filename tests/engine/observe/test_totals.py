"""Records that add and subtract: totals, means over time and over rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import add
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.observe.observation import MEAN, PARTS, SHARE, TOTAL, Totals


@dataclass(frozen=True)
class Part(Totals):
    cost: float = field(metadata=MEAN)
    rows: int = field(metadata=TOTAL)

    weight: ClassVar[str] = "rows"


@dataclass(frozen=True)
class Queue(Totals):
    level: float = field(metadata=MEAN)
    empty: float = field(metadata=SHARE)


@dataclass(frozen=True)
class Whole(Totals):
    seconds: float = field(metadata=TOTAL)
    state: str
    queue: Queue | None = field(metadata=PARTS)
    parts: tuple[Part, ...] = field(metadata=PARTS)

    weight: ClassVar[str] = "seconds"


NUMBERS = st.integers(1, 1000)
SHARES = st.integers(0, 1000).map(lambda share: share / 1000)
QUEUES = st.builds(Queue, NUMBERS, SHARES)
PARTS_OF_TWO = st.tuples(*[st.builds(Part, NUMBERS, NUMBERS)] * 2)
WHOLES = st.builds(Whole, NUMBERS, st.text(), QUEUES, PARTS_OF_TWO)


@given(WHOLES, WHOLES)
def test_what_is_taken_from_a_sum_leaves_the_rest(first: Whole, second: Whole) -> None:
    rest = (first + second) - first
    assert (rest.seconds, rest.state) == (second.seconds, second.state)
    assert rest.queue is not None
    assert second.queue is not None
    assert rest.queue.level == pytest.approx(second.queue.level)
    assert rest.queue.empty == pytest.approx(second.queue.empty, abs=1e-9)
    for mine, theirs in zip(rest.parts, second.parts, strict=True):
        assert mine.rows == theirs.rows
        assert mine.cost == pytest.approx(theirs.cost)


def test_means_weigh_by_time_or_by_their_own_rows() -> None:
    first = Whole(1.0, "a", Queue(8.0, 0.0), (Part(1.0, 30),))
    second = Whole(3.0, "b", Queue(4.0, 1.0), (Part(2.0, 10),))
    both = first + second
    assert both == Whole(4.0, "b", Queue(5.0, 0.75), (Part(1.25, 40),))


def test_a_part_that_one_of_them_lacks_is_that_of_the_end() -> None:
    second = Whole(3.0, "b", None, ())
    assert (Whole(1.0, "a", Queue(8.0, 0.0), ()) + second).queue is None
    whole = Whole(4.0, "b", Queue(2.0, 0.5), ())
    assert (whole - Whole(1.0, "a", None, ())).queue == whole.queue


def test_nothing_happened_in_no_time() -> None:
    whole = Whole(4.0, "b", Queue(2.0, 0.5), (Part(1.0, 3),))
    assert whole - whole == Whole(0.0, "b", Queue(0.0, 0.0), (Part(0.0, 0),))


def test_a_share_never_exceeds_the_whole() -> None:
    early = Whole(1.0, "a", Queue(0.0, 0.0), ())
    late = Whole(1.5, "b", Queue(1.0, 1.0), ())
    assert (late - early).queue == Queue(3.0, 1.0)


def test_windows_add_up_even_if_a_total_was_estimated_too_high_at_first() -> None:
    totals = [Part(1.0, rows) for rows in (0, 20, 15, 30)]
    windows = [b - a for a, b in pairwise(totals)]
    assert [window.rows for window in windows] == [20, -5, 15]
    assert reduce(add, windows).rows == 30
