"""Batches are filled row by row; failures are replaced or raised, odd samples named."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate

from penstock.engine.batch.buffer import (
    BatchBuffer,
    Buffers,
    FailedBatch,
    Finished,
    Gathered,
    donors,
    on_heap,
)
from penstock.engine.batch.layout import Layout, describe, size_of
from penstock.engine.core.in_flight import Failure, InFlightBatch
from support.core_script import Script
from support.samples import assert_same


@dataclass
class Boxed:
    """A sample of a class of the user's own."""

    image: Any
    name: str


class Refusing:
    """Raises when it is looked at."""

    @property
    def nbytes(self) -> int:
        raise RuntimeError("not for you")


def finish(
    buffers: Buffers,
    samples: Sequence[Any],
    failed: Sequence[int] = (),
    image_size: int | None = None,
) -> Finished | FailedBatch:
    """Place all samples but the failed rows one at a time, the last first."""
    script = Script((len(samples),), (image_size,))
    plan = script.batch(0)
    buffer = BatchBuffer(buffers, plan)
    for row in reversed(range(len(samples))):
        if row not in failed:
            buffer.place([row], [samples[row]])
    in_flight = InFlightBatch(plan, script.rows(plan), buffer=buffer, remaining=[0])
    in_flight.failures = [
        Failure(ValueError(f"row {row}"), "Map(ID:1) f", row, row) for row in failed
    ]
    batch = buffers.finish(in_flight)
    return batch.collate() if isinstance(batch, Gathered) else batch


def buffers(**options: Any) -> Buffers:
    return Buffers("Batch(ID:3)", **options)


def data_of(finished: Finished | FailedBatch) -> Any:
    assert isinstance(finished, Finished)
    return finished.data


def test_a_batch_raises_its_first_error_by_row() -> None:
    failed = finish(buffers(), [0, 1, 2, 3], failed=[2, 1])
    assert isinstance(failed, FailedBatch)
    assert str(failed.error) == "row 1"
    assert failed.error.__notes__ == [
        "penstock: in Map(ID:1) f, sample index 1 (epoch 0, step 0, row 1 of the batch)"
    ]


KINDS: dict[str, Callable[[int], Any]] = {
    "written in place": lambda n: (np.full(3, n), n, {"name": str(n)}),
    "by default_collate": lambda n: {"n": np.float32(n)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failed", [[1], [3], [0, 3], [0, 1, 2]])
def test_a_failed_row_is_replaced_by_the_next_healthy_one(
    kind: str, failed: list[int]
) -> None:
    samples = [KINDS[kind](n) for n in range(4)]
    finished = finish(buffers(substitute=True), samples, failed)
    filled = list(samples)
    for row in failed:
        donor = next(r % 4 for r in range(row, row + 4) if r % 4 not in failed)
        filled[row] = samples[donor]
    assert_same(data_of(finished), default_collate(filled))
    assert isinstance(finished, Finished)
    assert [failure.row for failure in finished.failures] == failed


def test_a_batch_without_a_healthy_row_cannot_be_filled() -> None:
    assert isinstance(finish(buffers(substitute=True), [0, 1], [0, 1]), FailedBatch)


@given(st.integers(1, 12), st.data())
def test_every_failed_row_has_one_healthy_donor(rows: int, data: st.DataObject) -> None:
    failed = sorted(data.draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1)))
    pairs = donors(tuple(failed), rows)
    assert [row for row, _ in pairs] == failed
    assert not {donor for _, donor in pairs} & set(failed)


def test_a_collate_fn_gets_the_samples_in_row_order() -> None:
    assert data_of(finish(buffers(collate=list), "abc")) == ["a", "b", "c"]


def test_a_collate_fn_receives_substitutes_too() -> None:
    batch = finish(buffers(collate=list, substitute=True), "abc", failed=[1])
    assert data_of(batch) == ["a", "c", "c"]


def test_an_error_in_a_collate_fn_names_its_batch() -> None:
    def collate(samples: list[Any]) -> Any:
        raise KeyError("pad")

    failed = finish(buffers(collate=collate), "abc")
    assert isinstance(failed, FailedBatch)
    assert isinstance(failed.error, KeyError)
    (note,) = failed.error.__notes__
    assert "Batch(ID:3)" in note
    assert "epoch 0, step 0" in note
    assert "collate_fn" in note


def test_ragged_samples_are_named_with_the_cure() -> None:
    samples = [np.zeros((2, 3), np.uint8)] * 3 + [np.zeros((2, 4), np.uint8)]
    failed = finish(buffers(), samples)
    assert isinstance(failed, FailedBatch)
    assert isinstance(failed.error, RuntimeError)
    (note,) = failed.error.__notes__
    assert "Batch(ID:3) (epoch 0, step 0)" in note
    assert "most are uint8 [2, 3]" in note
    assert "sample index 3: uint8 [2, 4]" in note
    assert "batch(collate_fn=...)" in note


def test_samples_that_make_no_batch_are_described() -> None:
    failed = finish(buffers(), [{1}, {2}])
    assert isinstance(failed, FailedBatch)
    assert isinstance(failed.error, TypeError)
    assert "all are set" in failed.error.__notes__[0]


class Shapeless:
    """Raises when it is asked for its shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("not for you")


@pytest.mark.parametrize("collate", [None, sum])
def test_a_sample_that_raises_when_it_is_looked_at_does_not_hide_the_error(
    collate: Any,
) -> None:
    failed = finish(buffers(collate=collate), [Shapeless(), Shapeless()])
    assert isinstance(failed, FailedBatch)
    assert isinstance(failed.error, TypeError)
    assert "they cannot be described (RuntimeError)" in failed.error.__notes__[0]


def test_long_samples_are_described_in_a_few_words() -> None:
    ragged = [[0] * 512, [0] * 511, {str(key): [[0] * 99] * 99 for key in range(99)}]
    failed = finish(buffers(), ragged)
    assert isinstance(failed, FailedBatch)
    (note,) = failed.error.__notes__
    assert "int, ... 512 in all)" in note
    assert "int, ... 511 in all)" in note
    assert len(note) < 2000


def test_a_batch_after_a_filter_has_the_kept_samples_by_row() -> None:
    batch = data_of(finish(buffers(keep=True), "abcd", failed=[]))
    assert list(batch.items()) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]


def test_each_image_size_has_its_own_layout() -> None:
    maker = buffers()
    small, large = np.zeros((4, 4), np.uint8), np.ones((6, 6), np.uint8)
    for image, size in ((small, 4), (large, 6), (small, 4)):
        batch = data_of(finish(maker, [image, image], image_size=size))
        assert_same(batch, default_collate([image, image]))
    assert {
        size: layout and layout.row_bytes for size, layout in maker.layouts.items()
    } == {4: 16, 6: 36}


def test_memory_is_lent_once_for_all_rows_of_a_batch() -> None:
    lent: list[int] = []

    def lend(layout: Layout, rows: int) -> Any:
        lent.append(rows * layout.row_bytes)
        return layout.open(rows, on_heap)

    maker = buffers(lend=lend)
    plan = Script((4,)).batch(0)
    buffer = BatchBuffer(maker, plan)
    assert buffer.place(range(2), [1, 2]) == 2 * 8
    assert buffer.place(range(2, 4), [3, 4]) == 2 * 8
    assert lent == [4 * 8]


def test_a_sample_that_does_not_fit_counts_by_its_own_bytes() -> None:
    plan = Script((2,)).batch(0)
    buffer = BatchBuffer(buffers(), plan)
    buffer.place([0], [np.zeros(4)])
    assert buffer.place([1], [np.zeros(5)]) == 40


@pytest.mark.parametrize(
    ("sample", "nbytes"),
    [
        (np.zeros((2, 3), np.float32), 24),
        (torch.zeros(2, dtype=torch.float64), 16),
        ("abc", 3),
        (b"abcd", 4),
        (bytearray(5), 5),
        (("ab", [b"c"]), 3),
        ({"a": "ab", "b": np.zeros(1)}, 10),
        (1, 64),
        (object(), 64),
        ([], 0),
        (Boxed(np.zeros(3), "ab"), 26),
        (UserDict(a=np.zeros(3)), 24),
        (Image.new("RGB", (10, 20)), 800),
        (Image.new("L", (10, 20)), 200),
        (torch.eye(3).to_sparse(), 3 * (4 + 16)),
        (Refusing(), 64),
        (["abc"] * 1000, 3000),
    ],
    ids=lambda value: re.sub(r" (at )?0x\w+", "", repr(value)),
)
def test_a_samples_size_is_that_of_its_arrays_and_texts(
    sample: Any, nbytes: int
) -> None:
    assert size_of(sample) == nbytes


def test_a_sample_that_contains_itself_has_a_size() -> None:
    knot: list[Any] = [np.zeros(1)]
    knot.append(knot)
    assert size_of(knot) > 0


def test_a_long_list_is_not_searched_to_its_end() -> None:
    looked = 0

    class Counted(UserDict[str, int]):
        def values(self) -> Any:
            nonlocal looked
            looked += 1
            return super().values()

    assert size_of([Counted(a=1)] * 6400) == 6400 * 64
    assert looked <= 16


@pytest.mark.parametrize("sample", [np.ones(3), 1.5, torch.ones(2)], ids=repr)
def test_a_batch_is_in_host_memory_whatever_torchs_default_device_is(
    sample: Any,
) -> None:
    with torch.device("meta"):
        batch = data_of(finish(buffers(), [sample, sample]))
    assert_same(batch, default_collate([sample, sample]))


def test_a_sample_with_a_shape_and_no_dtype_is_described() -> None:
    assert describe(SimpleNamespace(shape=(1, 2))) == "SimpleNamespace"


def test_a_sample_is_described_by_dtype_and_shape() -> None:
    sample = {"image": torch.zeros(3, 4, dtype=torch.bfloat16), "label": (1, "x")}
    assert describe(sample) == "{image: bfloat16 [3, 4], label: (int, str)}"


def test_what_is_kept_of_batches_does_not_keep_the_memory_of_the_rest() -> None:
    shape, labels = (3, 1 << 20), []
    begun_bytes = psutil.Process().memory_info().rss
    for _ in range(300):
        images = on_heap(shape, torch.uint8)
        images.fill_(1)
        labels.append(on_heap((1 << 11,), torch.int64).fill_(1))
    grown_bytes = psutil.Process().memory_info().rss - begun_bytes
    assert grown_bytes < 100 * images.nbytes


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16])
def test_large_memory_is_like_small_memory(dtype: torch.dtype) -> None:
    small, large = (on_heap((n, 256), dtype) for n in (2, 1 << 10))
    assert (small.dtype, small.shape) == (dtype, (2, 256))
    assert (large.dtype, large.shape) == (dtype, (1 << 10, 256))
    assert large.is_contiguous()
    assert large.is_cpu
