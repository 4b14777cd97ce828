"""Only the samples being worked on are blamed, and only until they get through."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.core.in_flight import Chunk
from penstock.engine.far.far_pool import LIMIT, Blame
from penstock.engine.plan import Context


def chunk(step: int, first: int, rows: int) -> Chunk:
    numbers = np.arange(first, first + rows)
    return Chunk(step, first, numbers, numbers, Context(0, step, None))


def test_nobody_is_blamed_at_first() -> None:
    blame = Blame()
    assert not blame
    assert blame.first(chunk(0, 0, 8)) is None
    assert blame.verdict(chunk(0, 0, 8)) is None


@pytest.mark.parametrize(("first", "found"), [(0, 5), (4, 1), (5, 0), (6, None)])
def test_a_suspect_is_found_wherever_the_chunk_begins(
    first: int, found: int | None
) -> None:
    blame = Blame()
    blame.add(chunk(3, 2, 6), [3], "died")
    assert blame.first(chunk(3, first, 8 - first)) == found
    assert blame.first(chunk(4, first, 8 - first)) is None


def test_a_sample_is_given_up_after_its_last_death() -> None:
    blame, one = Blame(), chunk(1, 5, 1)
    for death in range(LIMIT):
        assert blame.verdict(one) is None
        blame.add(one, [0], f"death {death}")
    assert blame.verdict(one) == f"death {LIMIT - 1}"
    assert blame.verdict(chunk(1, 4, 2)) is None


def test_a_sample_that_got_through_is_acquitted() -> None:
    blame = Blame()
    blame.add(chunk(1, 0, 4), [1, 3], "died")
    blame.acquit(chunk(1, 0, 2))
    assert blame.first(chunk(1, 0, 4)) == 3
    blame.acquit(chunk(1, 2, 2))
    assert not blame
