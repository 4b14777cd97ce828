"""Placed row by row, a batch is what default_collate makes of the samples at once."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from penstock.pipeline.buffers import Buffers, Failed, Finished, heap
from penstock.pipeline.flight import Flight
from penstock.pipeline.layout import Misfit, learn, write_rows
from support.flow_model import Script
from support.samples import OTHER_PAIR, PAIR, assert_same, makers

Rows = list[int] | range


def collated(buffers: Buffers, samples: list[Any], chunks: list[Rows]) -> Any:
    """Return what `chunks` of `samples` make, placed in this order."""
    script = Script((len(samples),))
    plan = script.batch(0)
    buffer = buffers.of(plan)
    for rows in chunks:
        buffer.place(rows, [samples[row] for row in rows])
    return buffers.finish(Flight(plan, script.rows(plan), buffer, [0]))


def by_torch(samples: list[Any]) -> Any:
    """Return torch's batch, or the exception it raises."""
    try:
        return default_collate(samples)
    except Exception as error:  # noqa: BLE001 whatever it raises is what is wanted
        return error


@st.composite
def cuts(draw: st.DrawFn, rows: int) -> list[Rows]:
    """Draw chunks of a batch, in the order in which they come."""
    edges = draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=3))
    starts = sorted({0, *(edge for edge in edges if edge < rows)})
    chunks: list[Rows] = [
        range(start, stop)
        for start, stop in zip(starts, [*starts[1:], rows], strict=True)
    ]
    if draw(st.booleans()):  # as a filter leaves them: not one run
        whole = list(range(rows))
        chunks = [part for part in (whole[::2], whole[1::2]) if part]
    return draw(st.permutations(chunks))


def check_like_torch(data: st.DataObject, strategy: st.SearchStrategy[Any]) -> None:
    """Place batches of drawn samples in drawn chunks; each is as torch has it."""
    buffers = Buffers("Batch(ID:1)")
    make = data.draw(strategy)
    others = [make, make, data.draw(strategy)]
    for maker in data.draw(st.permutations(others)):  # layouts are kept between them
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        rows = data.draw(st.integers(1, 6))
        samples = [maker(rng) for _ in range(rows)]
        expected = by_torch(samples)
        got = collated(buffers, samples, data.draw(cuts(rows)))
        if isinstance(expected, Exception):
            assert isinstance(got, Failed)
            assert type(got.error) is type(expected)
        else:
            assert isinstance(got, Finished), got
            assert_same(got.data, expected)


@given(st.data())
@settings(max_examples=400)
def test_a_batch_placed_in_chunks_is_what_default_collate_makes(
    data: st.DataObject,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_like_torch(data, makers())
