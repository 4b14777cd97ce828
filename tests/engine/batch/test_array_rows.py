"""Rows of arrays, read together, make the batches that torch makes one by one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data as torchs
from torch.utils.data import Subset, TensorDataset, default_collate

import penstock as ps
from penstock.engine.batch.array_rows import ArrayRowReader, ArrayRows
from penstock.engine.batch.layout import describe
from support.datasets import KINDS
from support.samples import assert_same

# The warning comes once in a process, from penstock or from torch.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

LENGTH = 23
RNG = np.random.default_rng(0)
WIDE = RNG.random((LENGTH, 4)).astype(np.float32)
FLAT = torch.arange(LENGTH)
PLACES: list[int] = RNG.permutation(LENGTH).tolist()


class Subclass(torch.Tensor):
    """A tensor whose rows may be anything."""


class Numbered(TensorDataset):
    """A dataset that overrides what a sample is."""

    def __getitem__(self, index: int) -> Any:
        return index, super().__getitem__(index)


DATASETS: dict[str, Any] = {
    "array": WIDE,
    "one dimension": np.arange(LENGTH, dtype=np.int16),
    "three dimensions": RNG.random((LENGTH, 2, 3)),
    "rows of nothing": np.zeros((LENGTH, 0), np.uint8),
    "big-endian": WIDE.astype(">f4"),
    "uint64": np.arange(LENGTH, dtype=np.uint64),
    "text": np.array([str(number) for number in range(LENGTH)]),
    "objects": np.array([{"a": number} for number in range(LENGTH)]),
    "records": np.zeros(LENGTH, [("a", np.int32), ("b", np.float32)]),
    "transposed": np.asfortranarray(WIDE),
    "every other": np.repeat(WIDE, 2, axis=0)[::2],
    "read-only": np.broadcast_to(WIDE[:1], (LENGTH, 4)),
    "tensor": torch.from_numpy(WIDE),
    "tensor of one dimension": FLAT,
    "bfloat16": torch.from_numpy(WIDE).bfloat16(),
    "expanded": torch.ones(1, 3).expand(LENGTH, 3),
    "with a gradient": torch.ones(LENGTH, 3, requires_grad=True),
    "complex, conjugated": torch.ones(LENGTH, 3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(LENGTH).to_sparse(),
    "subclass": torch.ones(LENGTH, 3).as_subclass(Subclass),
    "tensors": TensorDataset(torch.from_numpy(WIDE), FLAT),
    "one tensor": TensorDataset(FLAT),
    "tensors of two kinds": TensorDataset(FLAT, torch.eye(LENGTH).to_sparse()),
    "part of tensors": Subset(TensorDataset(FLAT, FLAT + 1), PLACES),
    "part of a part": Subset(Subset(WIDE, PLACES), torch.tensor(PLACES)),
    "part of another": Subset(list(range(LENGTH)), PLACES),
    "from behind": Subset(torch.from_numpy(WIDE), [-1 - at for at in PLACES]),
    "subclass of tensors": Numbered(FLAT),
}


CROSSING = ("tensors", "objects", "sparse", "with a gradient", "part of a part")
"""What crosses to the trainer differently: as memory, pickled, or not at all."""
PAIRS = [
    pytest.param(
        (name, kind),
        marks=[pytest.mark.long] if kind == "3 processes" else [],
        id=f"{name}-{kind}",
    )
    for name in DATASETS
    for kind in KINDS
    if kind == "2 threads" or name in CROSSING
]


@pytest.fixture(params=DATASETS)
def dataset(request: pytest.FixtureRequest) -> Any:
    return DATASETS[request.param]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Any:
    name, kind = request.param
    return DATASETS[name], KINDS[kind]


@pytest.fixture
def _tuned() -> Iterator[None]:
    ps.set_enable_autotune(True)
    return


def outcome(loader: Any) -> list[Any]:
    """Return the batches, or the type of the exception."""
    batches: list[Any] = []
    try:
        batches.extend(loader)
    except Exception as error:  # noqa: BLE001 it is compared
        batches.append(type(error))
    return batches


def test_rows_read_together_are_the_samples(dataset: Any) -> None:
    indices = [3, 0, 3, LENGTH - 1]
    reader = ArrayRowReader.of(dataset)
    if reader is None:
        return
    for getter in (reader, pickle.loads(pickle.dumps(reader))):  # noqa: S301 ours
        rows, expected = getter(indices), [getter.dataset[index] for index in indices]
        assert len(rows) == len(expected)
        for samples in (list(rows), [rows[at] for at in range(4)], rows[0:4]):
            assert list(map(type, samples)) == list(map(type, expected))
            for one, other in zip(samples, expected, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_gives_torchs_batches(
    dataset: Any,
    shuffle: bool,  # noqa: FBT001
    _tuned: None,  # noqa: PT019
) -> None:
    torch.manual_seed(0)
    expected = outcome(torchs.DataLoader(dataset, 4, shuffle=shuffle))
    torch.manual_seed(0)
    with closing(ps.DataLoader(dataset, 4, shuffle=shuffle)) as loader:
        batches = outcome(loader)
    assert_same(batches, expected)


def test_a_pipeline_gives_torchs_batches(pair: Any) -> None:
    dataset, kind = pair
    expected = outcome(torchs.DataLoader(dataset, 4))
    with ps.Pipeline.from_dataset(dataset, **kind).batch(4) as pipe:
        batches = outcome(pipe)
    assert_same(batches, expected)


def test_a_function_sees_the_dataset_s_own_samples(pair: Any) -> None:
    dataset, kind = pair
    expected = [seen(dataset[index]) for index in range(LENGTH)]
    pipe = ps.Pipeline.from_dataset(dataset, **kind).map(seen, **kind)
    with pipe.batch(4, collate_fn=list) as seen_by:
        assert [sample for batch in seen_by for sample in batch] == expected


def seen(sample: Any) -> tuple[type, str]:
    return type(sample), describe(sample)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_memory_map_is_read_in_place(tmp_path: Path, kind: Any) -> None:
    mapped = np.memmap(tmp_path / "rows", WIDE.dtype, "w+", shape=WIDE.shape)
    mapped[:] = WIDE
    for _ in range(2):
        with ps.Pipeline.from_dataset(mapped, **kind).batch(4) as pipe:
            assert_same(list(pipe), outcome(torchs.DataLoader(mapped, 4)))
        mapped += 1
    del mapped


@pytest.mark.parametrize("indices", [[-1, 0], [LENGTH], ["a"], [[0, 1]], [True]])
def test_a_sampler_may_draw_any_kind_of_index(
    indices: list[Any],
    _tuned: None,  # noqa: PT019
) -> None:
    for dataset in (WIDE, torch.from_numpy(WIDE), DATASETS["tensors"]):
        expected = outcome(torchs.DataLoader(dataset, 2, sampler=indices))
        with closing(ps.DataLoader(dataset, 2, sampler=indices)) as loader:
            assert_same(outcome(loader), expected)


def test_tensors_may_be_replaced_and_changed_between_batches(
    _tuned: None,  # noqa: PT019
) -> None:
    def batches(kind: Any) -> Iterator[Any]:
        data = TensorDataset(torch.zeros(40, 2), torch.arange(40))
        for at, batch in enumerate(kind(data, 4)):
            yield batch
            if at < 4:
                data.tensors[0][:] += 1
            else:
                data.tensors = (torch.ones(40, 3, requires_grad=True), torch.ones(40))

    assert_same(outcome(batches(ps.DataLoader)), outcome(batches(torchs.DataLoader)))


def test_batches_are_memory_of_their_own() -> None:
    tensor = torch.from_numpy(WIDE.copy())
    with ps.Pipeline.from_dataset(tensor).batch(4) as pipe:
        for batch in pipe:
            batch.fill_(-1)
    assert_same(tensor, torch.from_numpy(WIDE))


def test_rows_are_gathered_without_making_samples() -> None:
    rows = ArrayRowReader(DATASETS["tensors"])([2, 1])
    assert isinstance(rows, ArrayRows)
    assert_same(default_collate(list(rows))[1], torch.tensor([2, 1]))
