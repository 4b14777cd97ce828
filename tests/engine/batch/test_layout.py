"""A batch placed row by row is what default_collate makes of its samples at once."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from penstock.engine.batch.array_rows import TableRows
from penstock.engine.batch.buffer import (
    BatchBuffer,
    Buffers,
    FailedBatch,
    Finished,
    on_heap,
)
from penstock.engine.batch.layout import Misfit, learn, write_rows
from penstock.engine.core.in_flight import InFlightBatch
from support.core_script import Script
from support.samples import OTHER_PAIR, PAIR, assert_same, makers

Rows = list[int] | range


def collated(buffers: Buffers, samples: list[Any], chunks: list[Rows]) -> Any:
    """Return the batch that `chunks` of `samples` make, placed in this order."""
    script = Script((len(samples),))
    plan = script.batch(0)
    buffer = BatchBuffer(buffers, plan)
    for rows in chunks:
        buffer.place(rows, [samples[row] for row in rows])
    return buffers.finish(
        InFlightBatch(plan, script.rows(plan), buffer=buffer, remaining=[0])
    )


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
    if draw(st.booleans()):  # with gaps, as a filter leaves them
        all_rows = list(range(rows))
        chunks = [part for part in (all_rows[::2], all_rows[1::2]) if part]
    return draw(st.permutations(chunks))


def check_like_torch(data: st.DataObject, strategy: st.SearchStrategy[Any]) -> None:
    """Place batches of drawn samples in drawn chunks; each equals torch's."""
    buffers = Buffers("Batch(ID:1)")
    make = data.draw(strategy)
    makers = [make, make, data.draw(strategy)]
    for maker in data.draw(st.permutations(makers)):  # batches share layouts
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        rows = data.draw(st.integers(1, 6))
        samples = [maker(rng) for _ in range(rows)]
        expected = by_torch(samples)
        batch = collated(buffers, samples, data.draw(cuts(rows)))
        if isinstance(expected, Exception):
            assert isinstance(batch, FailedBatch)
            assert type(batch.error) is type(expected)
        else:
            assert isinstance(batch, Finished), batch
            assert_same(batch.data, expected)


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_a_batch_placed_in_chunks_is_what_default_collate_makes(
    data: st.DataObject,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_like_torch(data, makers())


def in_place(samples: list[Any], chunks: list[Rows]) -> Any:
    """Return the batch that samples of one layout make without default_collate."""
    layout = learn(samples[0])
    assert layout is not None
    memory = layout.open(len(samples), on_heap)
    for rows in chunks:
        write_rows(layout, memory, rows, [samples[row] for row in rows])
    return memory


SAMPLES: dict[str, Callable[[int], Any]] = {
    "array": lambda n: np.full((2, 3), n, np.uint8),
    "large arrays": lambda n: np.full((1, 300, 300), n, np.float64),
    "large arrays, strided": lambda n: np.full((300, 1000), n, np.float64)[:, ::2],
    "strided": lambda n: np.full((4, 6), n, np.uint8)[::2, ::2],
    "reversed": lambda n: np.arange(n, n + 4)[::-1],
    "in Fortran's order": lambda n: np.full((2, 3), n, order="F"),
    "vector of nothing": lambda n: np.zeros(0),
    "array of nothing": lambda n: np.zeros((3, 0, 2)),
    "tensor": lambda n: torch.full((3,), n, dtype=torch.bfloat16),
    "tensor of no dimension": torch.tensor,
    "int": lambda n: -n,
    "float": lambda n: n / 7,
    "bool": lambda n: n % 2 == 0,
    "text": "x".__mul__,
    "bytes": b"x".__mul__,
    "tuple": lambda n: (np.full(2, n), n),
    "list": lambda n: [np.full(2, n), float(n)],
    "namedtuple": lambda n: PAIR(torch.full((2,), n), n),
    "dict": lambda n: {"a": n, "b": (n, {"c": np.full(1, n)}), "text": "x" * n},
    "nothing in it": lambda n: {"a": (), "b": [], "c": {}},
}


def straight(sample: Any) -> Any:
    """Return a copy of an array that torch takes: it refuses negative strides."""
    return sample.copy() if isinstance(sample, np.ndarray) else sample


@pytest.mark.parametrize("kind", SAMPLES)
def test_usual_samples_are_written_in_place(kind: str) -> None:
    samples = [SAMPLES[kind](n) for n in range(6)]
    assert_same(
        in_place(samples, [range(4, 6), [0, 2, 3], [1]]),
        default_collate([straight(sample) for sample in samples]),
    )


def test_rows_of_a_memory_map_are_written_into_the_batch(tmp_path: Path) -> None:
    table = np.memmap(tmp_path / "table", np.float32, "w+", shape=(6, 3))
    table[:] = np.arange(18).reshape(6, 3)
    samples = [(table[n], n) for n in range(6)]
    assert type(samples[0][0]) is np.memmap
    batch = in_place(samples, [range(4, 6), [0, 2, 3], [1]])
    assert_same(batch, default_collate(samples))


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_sample_that_was_written_can_be_read_back(kind: str) -> None:
    samples = [SAMPLES[kind](n) for n in range(6)]
    layout = learn(samples[0])
    assert layout is not None
    memory = in_place(samples, [range(6)])
    copies = [layout.read(memory, row) for row in range(6)]
    assert [type(sample) for sample in copies] == [type(sample) for sample in samples]
    assert_same(
        default_collate(copies),
        default_collate([straight(sample) for sample in samples]),
    )


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_layout_travels_to_other_processes(kind: str) -> None:
    layout = learn(SAMPLES[kind](1))
    assert pickle.loads(pickle.dumps(layout)) == layout  # noqa: S301 our own


def test_a_layout_knows_the_bytes_of_a_row() -> None:
    sample = {"a": np.zeros((3, 5), np.float16), "b": (1, True, torch.zeros(2))}
    layout = learn(sample)
    assert layout is not None
    assert layout.row_bytes == 3 * 5 * 2 + 8 + 1 + 2 * 4


@pytest.mark.parametrize(
    "sample",
    [
        None,
        1j,
        np.uint64(1),
        np.array(1),
        np.zeros(2, ">f4"),
        np.zeros(2, "U1"),
        np.ma.zeros(2),
        torch.zeros(2, requires_grad=True),
        torch.zeros(2).to_sparse(),
        torch.nn.Parameter(torch.zeros(1)),
        (1, None),
        {"a": {1, 2}},
    ],
    ids=repr,
)
def test_samples_whose_batch_is_not_certain_to_the_bit_are_left_to_torch(
    sample: Any,
) -> None:
    assert learn(sample) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_torch() -> None:
    tensor = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert learn(tensor) is None
    layout = learn(torch.zeros(2))
    assert layout is not None
    with pytest.raises(Misfit):
        layout.write(layout.open(2, on_heap), 0, [tensor])


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (np.zeros((2, 2)), np.zeros((2, 3))),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), [0.0, 0.0]),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (1, 1.0),
        (1, True),
        (1, 2**63),
        (1.0, 1),
        ("a", b"a"),
        ((1, 2), (1, 2, 3)),
        ((1, 2), 1),
        ((1, 2), [1, 2]),
        (PAIR(1, 2), OTHER_PAIR(1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, 1),
    ],
    ids=repr,
)
def test_a_sample_of_another_kind_does_not_fit(usual: Any, odd: Any) -> None:
    layout = learn(usual)
    assert layout is not None
    memory = layout.open(2, on_heap)
    with pytest.raises(Misfit):
        layout.write(memory, 0, [odd])


def test_a_column_does_not_fit_among_vectors() -> None:
    samples = [np.zeros(4), np.zeros((4, 1))]
    batch = collated(Buffers("Batch(ID:1)"), samples, [range(2)])
    assert isinstance(batch, FailedBatch)


@pytest.mark.parametrize("sample", [("a", 1), ["a", 1], PAIR(b"a", 1)], ids=repr)
def test_text_within_a_sequence_is_collated_as_by_torch(sample: Any) -> None:
    samples = [sample, sample]
    batch = collated(Buffers("Batch(ID:1)"), samples, [range(1, 2), range(1)])
    assert_same(batch.data, default_collate(samples))


@pytest.mark.parametrize("value", ["text", [1, 2], {"a": 1}, 1], ids=repr)
@pytest.mark.parametrize("column", [np.arange(2), np.arange(2.0), ["a", "b"]], ids=repr)
def test_a_column_whose_type_has_changed_is_collated_as_by_torch(
    value: Any, column: Any
) -> None:
    buffers, script = Buffers("Batch(ID:1)"), Script((2,))
    plan, before = script.batch(0), [{"x": value}] * 2
    assert_same(buffers.together(plan, before), default_collate(before))
    table = TableRows.of({"x": column}, 2)
    assert_same(buffers.together(plan, table), default_collate(list(table)))
    buffer = BatchBuffer(buffers, plan)
    buffer.place(range(2), table)
    assert_same(buffer.collect(()), default_collate(list(table)))


def test_keys_come_in_the_order_of_the_first_row() -> None:
    samples = [{"a": 1, "b": 2}, {"b": 3, "a": 4}]
    batch = collated(Buffers("Batch(ID:1)"), samples, [range(1, 2), range(1)])
    assert list(batch.data) == ["a", "b"]


def test_a_reversed_array_is_handled_alike_in_chunks_of_any_size() -> None:
    samples = [np.zeros((3, 224, 224), np.uint8)[:, :, ::-1]] * 2
    buffers = Buffers("Batch(ID:1)")
    one_by_one = collated(buffers, samples, [range(1), range(1, 2)])
    together = collated(buffers, samples, [range(2)])
    assert type(one_by_one) is type(together)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_left_to_torch() -> None:
    assert learn(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)) is None


@pytest.mark.parametrize("numbers", [[1, 2], [0.5, 1.5], [True, False]])
def test_a_batch_of_numbers_can_be_resized_like_torchs(numbers: list[Any]) -> None:
    layout = learn(numbers[0])
    assert layout is not None
    batch = layout.together(numbers, torch.empty)
    assert torch.equal(batch, default_collate(numbers))
    assert batch.resize_(4).shape == (4,)
