"""Chunks split without loss, and failures say where they happened."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.in_flight import Chunk, Failure, runs
from penstock.engine.plan import Context
from support.core_script import Script


def chunk(rows: int, first_row: int = 5) -> Chunk:
    indices = np.arange(100, 100 + rows)
    return Chunk(3, first_row, indices, indices * 10, Context(1, 3, None))


@given(st.integers(0, 20), st.data())
def test_the_two_parts_of_a_split_chunk_are_the_chunk(
    rows: int, data: st.DataObject
) -> None:
    whole = chunk(rows)
    cut = data.draw(st.integers(0, rows))
    head, tail = whole.part(0, cut), whole.part(cut, rows)
    assert (len(head), len(tail)) == (cut, rows - cut)
    assert (head.first_row, tail.first_row) == (5, 5 + cut)
    assert [*head.indices, *tail.indices] == whole.indices.tolist()
    assert [*head.rounds, *tail.rounds] == whole.rounds.tolist()
    assert head.context is tail.context is whole.context
    assert head.step == tail.step == 3


def test_a_part_of_a_part_keeps_its_address() -> None:
    part = chunk(10).part(2, 8).part(3, 5)
    assert part.first_row == 5 + 2 + 3
    assert part.indices.tolist() == [105, 106]


@given(st.sets(st.integers(0, 30)).map(sorted))
def test_runs_cover_ascending_offsets_in_as_few_pieces_as_there_are_gaps(
    offsets: list[int],
) -> None:
    spans = runs(offsets, len(offsets))
    covered = [first + at for start, stop, first in spans for at in range(stop - start)]
    assert covered == offsets
    assert [start for start, _, _ in spans] == [0, *(s for _, s, _ in spans)][:-1] or (
        spans == []
    )
    gaps = sum(b != a + 1 for a, b in pairwise(offsets))
    assert len(spans) == (gaps + 1 if offsets else 0)


def test_no_offsets_mean_all_rows() -> None:
    assert runs(None, 7) == [(0, 7, 0)]


def test_a_failure_says_stage_sample_and_batch_once() -> None:
    error = ValueError("bad pixels")
    failure = Failure(error, "Map(ID:2) decode", 417, 9)
    plan = Script((16, 16)).batch(5)
    assert failure.annotated(plan) is error
    failure.annotated(plan)
    failure.annotated(plan, block=True)
    where = "penstock: in Map(ID:2) decode, sample index 417"
    assert error.__notes__ == [
        f"{where} (epoch 2, step 5, row 9 of the batch)",
        f"{where} (epoch 2, position 25)",
    ]
