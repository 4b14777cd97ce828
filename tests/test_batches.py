"""A batch is what torch's collate makes of its samples, and nothing else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_structure
from torch.utils.data import default_collate

import penstock as ps
from support.datasets import KINDS, Numbers
from support.functions import digest, indices

Kind = Mapping[str, Any]
ROWS = 11
"""Two batches of 4 and a tail of 3."""


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def image(index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.arange(12, dtype=np.uint8).reshape(3, 4) + np.uint8(index)


SAMPLES: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "bool": lambda i: i % 2 == 0,
    "text": str,
    "bytes": lambda i: bytes([i]),
    "array": image,
    "vector": lambda i: np.full(3, i, np.float64),
    "number of numpy": np.float32,
    "transposed array": lambda i: image(i).T,
    "tensor": lambda i: torch.full((2, 3), i, dtype=torch.bfloat16),
    "tensor of no dimension": torch.tensor,
    "empty array": lambda i: np.empty((0, 3), np.int16),
    "tuple": lambda i: (image(i), i),
    "list": lambda i: [i, float(i)],
    "namedtuple": lambda i: Pair(torch.full((2,), i), i),
    "dict": lambda i: {"image": image(i), "name": f"sample {i}", "label": i},
    "nested": lambda i: {"pair": Pair(torch.ones(2) * i, i), "rest": (i, [str(i)])},
    "text beside an array": lambda i: (image(i), str(i)),
    "int, sometimes float": lambda i: float(i) if i % 3 == 2 else i,
}


CROSSING = ("text", "tensor", "nested", "text beside an array", "int, sometimes float")
"""What crosses to the trainer differently: as memory, pickled, or both."""
PAIRS = [
    (name, kind)
    for name in SAMPLES
    for kind in KINDS
    if kind == "2 threads" or name in CROSSING
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=["inline", "2 threads"])
def here(request: pytest.FixtureRequest) -> Kind:
    """Return workers of the trainer's process, for what says the same of others."""
    return KINDS[request.param]


def chunked(samples: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(samples[at : at + size]) for at in range(0, len(samples), size)]


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare types and contents."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_batches_are_those_of_default_collate_and_have_their_plan(
    name: str, kind: str
) -> None:
    samples = [SAMPLES[name](index) for index in range(ROWS)]
    expected = chunked(samples, 4)
    with ps.Pipeline.from_dataset(samples, **KINDS[kind]).batch(4) as pipe:
        for epoch in range(2):
            for at, (ours, rows) in enumerate(zip(pipe, expected, strict=True)):
                assert_same(ours, default_collate(rows))
                assert pipe.plan is not None
                assert (pipe.plan.epoch, pipe.plan.batch) == (epoch, at)


@pytest.mark.parametrize("name", ["tensor", "tuple", "list", "dict", "text", "nested"])
@pytest.mark.parametrize("tuned", [False, True])
def test_batches_are_saved_mapped_and_copied_as_those_of_torch(
    name: str, *, tuned: bool, tmp_path: Path
) -> None:
    samples = [SAMPLES[name](index) for index in range(4)]
    ps.set_enable_autotune(tuned)
    loader = ps.DataLoader(samples, 4, sample_seeding=True)
    with ps.Pipeline.from_dataset(samples).batch(4) as pipe, closing(loader):
        batches = [*pipe, *loader]
    expected = default_collate(samples)
    for batch in batches:
        assert_same(batch, expected)
        assert_same(pickle.loads(pickle.dumps(batch)), expected)  # noqa: S301 our own
        assert_same(copy.deepcopy(batch), expected)
        assert tree_structure(batch) == tree_structure(expected)
        if name != "nested":  # which holds a class of ours
            torch.save(batch, tmp_path / "batch")
            assert_same(torch.load(tmp_path / "batch", weights_only=True), expected)


def test_a_pipelines_plan_is_that_of_the_last_batch(kind: Kind) -> None:
    with ps.Pipeline.from_dataset(Numbers(ROWS), **kind).batch(4) as pipe:
        assert pipe.plan is None
        assert [pipe.plan.batch for _ in pipe] == [*range(-(-ROWS // 4))]  # type: ignore[union-attr]
        assert pipe.plan is not None
        assert pipe.plan.last
        assert (pipe.plan.n_local, pipe.plan.n_global, pipe.plan.n_rows) == (3, 3, 3)


def test_to_device_cpu_changes_nothing(here: Kind) -> None:
    plain = ps.Pipeline.from_dataset(Numbers(ROWS), **here).batch(4)
    with plain, plain.to_device("cpu") as on_device:
        batches = list(on_device)
        assert digest(batches) == digest(plain)
    assert {batch[0].device.type for batch in batches} == {"cpu"}


def test_to_device_moves_every_tensor(kind: Kind) -> None:
    samples = [SAMPLES["nested"](index) for index in range(ROWS)]
    with ps.Pipeline.from_dataset(samples, **kind).batch(4).to_device("meta") as pipe:
        batch = next(iter(pipe))
    assert type(batch["pair"]).__name__ == "Pair"
    assert batch["pair"].image.device.type == "meta"
    assert batch["pair"].label.device.type == "meta"
    assert batch["rest"][1] == [("0", "1", "2", "3")]


# A collate_fn of the user's


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Pad vectors of different lengths, `float32 [rows, longest]`."""
    vectors = [torch.from_numpy(sample) for sample in samples]
    rows = torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True)
    return {"rows": rows, "lengths": torch.tensor([len(v) for v in vectors])}


def test_a_collate_fn_is_given_the_samples_in_order(here: Kind) -> None:
    samples = [np.full(1 + i % 4, i, np.float32) for i in range(ROWS)]
    pipe = ps.Pipeline.from_dataset(samples, **here).batch(4, collate_fn=padded)
    with pipe:
        for ours, rows in zip(pipe, chunked(samples, 4), strict=True):
            assert_same(ours, padded(rows))
            assert pipe.plan is not None
            assert pipe.plan.n_rows == len(rows)


def doubled(samples: list[Any]) -> list[float]:
    """Change the samples, and draw only for the later ones."""
    for sample in samples:
        np.multiply(sample, 2, out=sample)
    if samples[0][0] > 8:
        torch.rand(())
    return [float(sample[0]) for sample in samples]


WAYS: Mapping[str, Callable[[Any], Any]] = {
    "as it is": lambda p: p.batch(2, collate_fn=doubled),
    "after a filter": lambda p: p.filter(len).batch(2, collate_fn=doubled),
    "before a map": lambda p: p.batch(2, collate_fn=doubled).map(list),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_collate_fn_gets_each_sample_once_and_may_change_it(
    kind: Kind, way: str
) -> None:
    pipe = ps.Pipeline.from_dataset(range(10), **kind)
    pipe = pipe.map(lambda n: np.array([float(n)]), **kind)
    with WAYS[way](pipe) as pipe:
        assert [n for batch in pipe for n in batch] == [2.0 * n for n in range(10)]


def test_a_collate_fn_may_return_anything(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset([*range(ROWS)], **kind)
    with pipe.batch(4, collate_fn=sum) as summed:
        assert list(summed) == [6, 22, 27]
        assert summed.plan is not None


def test_samples_of_unequal_shapes_are_an_error_that_names_them(kind: Kind) -> None:
    samples = [np.zeros(3 if index != 5 else 2, np.float32) for index in range(8)]
    with ps.Pipeline.from_dataset(samples, **kind).batch(4) as pipe:
        loop = iter(pipe)
        assert next(loop).shape == (4, 3)
        with pytest.raises(RuntimeError, match="stack expects each tensor") as caught:
            next(loop)
    note = "\n".join(caught.value.__notes__)
    assert "Batch(ID:1)" in note
    assert "float32 [2]" in note
    assert "batch(collate_fn=...)" in note


def test_a_column_is_not_a_vector_of_the_same_length(here: Kind) -> None:
    samples = [np.zeros((3, 1) if index == 5 else 3, np.float32) for index in range(8)]
    with ps.Pipeline.from_dataset(samples, **here).batch(4) as pipe:
        loop = iter(pipe)
        next(loop)
        with pytest.raises(RuntimeError, match="stack expects each tensor"):
            next(loop)


# Which samples, and how many


def found(pipe: ps.Pipeline) -> list[list[int]]:
    with pipe:
        return list(indices(pipe))


def test_the_tail_is_kept_short_or_dropped(here: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(ROWS), **here)
    with_tail, without_tail = pipe.batch(4), pipe.batch(4, drop_last=True)
    assert (len(with_tail), len(without_tail)) == (3, 2)
    assert found(with_tail) == chunked(range(ROWS), 4)
    assert found(without_tail) == chunked(range(8), 4)


def test_an_epoch_may_be_a_single_short_batch(here: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(3), **here).batch(4)
    with pipe:
        assert [list(indices(pipe)) for _ in range(3)] == [[[0, 1, 2]]] * 3


def test_take_select_and_repeat_choose_samples_before_they_are_read() -> None:
    reads: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    pipe = ps.Pipeline.from_dataset(Watched(100), executor="inline")
    selection = pipe.select([9, 7, 5, 3, 1]).take(3).repeat(2).batch(4)
    assert len(selection) == 2
    assert found(selection) == [[9, 7, 5, 9], [7, 5]]
    assert reads == [9, 7, 5, 9, 7, 5]


def test_take_after_a_shuffle_takes_other_samples_each_epoch() -> None:
    with (
        ps.Pipeline.from_dataset(Numbers(100)).shuffle(seed=0).take(8).batch(8) as pipe
    ):
        epochs = [next(indices(pipe)) for _ in range(3)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 3


def test_take_before_a_shuffle_takes_the_same_samples_each_epoch() -> None:
    with (
        ps.Pipeline.from_dataset(Numbers(100)).take(8).shuffle(seed=0).batch(8) as pipe
    ):
        epochs = [next(indices(pipe)) for _ in range(3)]
    assert all(sorted(epoch) == [*range(8)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_each_pass_of_repeat_has_its_own_order() -> None:
    with (
        ps.Pipeline.from_dataset(Numbers(20))
        .shuffle(seed=0)
        .repeat(2)
        .batch(20) as pipe
    ):
        first, second = indices(pipe)
    assert sorted(first) == sorted(second) == [*range(20)]
    assert first != second


def test_ranks_share_each_global_batch() -> None:
    def rank(number: int) -> list[list[int]]:
        pipe = ps.Pipeline.from_dataset(Numbers(24), shard=ps.Shard(number, 2))
        return found(pipe.shuffle(seed=1).batch(4))

    alone = found(ps.Pipeline.from_dataset(Numbers(24)).shuffle(seed=1).batch(8))
    assert [a + b for a, b in zip(rank(0), rank(1), strict=True)] == alone


# Batches outlive what made them


def test_batches_stay_valid_and_unchanged_for_as_long_as_they_are_held(
    kind: Kind,
) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(160), **kind).shuffle(seed=1).batch(8)
    with pipe:
        batches = [batch for _ in range(2) for batch in pipe]
        expected = digest(batches)
        for _ in pipe:
            pass
        assert digest(batches) == expected
    assert digest(batches) == expected
    for values, index in batches:
        assert torch.equal(values, index.float()[:, None].expand(-1, 4))


def test_a_part_of_a_batch_keeps_its_memory(kind: Kind) -> None:
    with ps.Pipeline.from_dataset(Numbers(160), **kind).batch(8) as pipe:
        parts = [batch[0][1:3].numpy() for _ in range(3) for batch in pipe]
        for _ in pipe:
            pass
    first_rows = [part[0, 0] for part in parts]
    assert first_rows == [float(at) for _ in range(3) for at in range(1, 160, 8)]


def test_a_batch_may_be_written_to(kind: Kind) -> None:
    with ps.Pipeline.from_dataset(Numbers(80), **kind).batch(8) as pipe:
        for batch in pipe:
            batch[0].fill_(-1)
            batch[1].add_(1)
        assert list(indices(pipe)) == chunked(range(80), 8)


# How long an epoch is


@pytest.mark.parametrize(
    ("length", "size", "drop_last", "batches"),
    [(10, 5, False, 2), (11, 5, False, 3), (11, 5, True, 2), (1, 5, False, 1)],
)
def test_the_length_is_the_number_of_batches_in_an_epoch(
    *, length: int, size: int, drop_last: bool, batches: int
) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(length)).batch(size, drop_last=drop_last)
    with pipe:
        assert len(pipe) == batches
        assert [len(list(pipe)) for _ in range(2)] == [batches] * 2
        assert len(pipe) == batches


def test_the_length_within_a_loop_is_that_of_the_whole_epoch() -> None:
    with ps.Pipeline.from_dataset(Numbers(40)).repeat(2).batch(8) as pipe:
        loop = iter(pipe)
        next(loop)
        assert len(pipe) == 10


def test_a_collate_fn_gets_rows_of_a_memory_map_as_memory_maps(tmp_path: Path) -> None:
    table = np.memmap(tmp_path / "table", np.float32, "w+", shape=(ROWS, 3))
    table[:] = np.arange(3 * ROWS).reshape(ROWS, 3)
    types = []

    def collate(rows: list[Any]) -> torch.Tensor:
        types.extend(map(type, rows))
        return default_collate(rows)

    expected = [default_collate(rows).tolist() for rows in chunked(table, 4)]
    for collate_fn in (None, collate):
        batches = ps.Pipeline.from_dataset(table).batch(4, collate_fn=collate_fn)
        assert [batch.tolist() for batch in batches] == expected
    assert set(types) == {np.memmap}
