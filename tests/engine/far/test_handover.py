"""A batch crosses unchanged, and the memory it crossed in comes back or is released."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.far.handover import dumps, flattened, restored
from penstock.engine.far.slabs import Sent
from support.batches import COLLATES, Refusing, same
from support.datasets import Numbers
from support.ferry import Ferry, ferries


def keeps_bytes(dtype: torch.dtype) -> bool:
    """Return whether bytes can become tensors of this dtype; quantised ones cannot."""
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype)
    except RuntimeError:
        return False
    return not str(dtype).startswith(("torch.q", "torch.bits"))


KEEP = 40
DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
DTYPES = sorted({t for t in DTYPES if keeps_bytes(t)}, key=str)
SAMPLES = [Numbers(50)[index] for index in range(8)]


@pytest.fixture
def ferry() -> Iterator[Ferry]:
    with ferries(KEEP) as ferry:
        yield ferry


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("collate", COLLATES.values(), ids=COLLATES)
def test_a_batch_arrives_unchanged(
    collate: Callable[[list[Any]], Any], ferry: Ferry
) -> None:
    for _ in range(3):
        data = collate(SAMPLES)
        assert same(ferry.pack(data)[1], data)


def test_a_tensor_that_a_batch_holds_twice_arrives_as_one(ferry: Ferry) -> None:
    tensor = torch.ones(3)
    _, (first, second, third) = ferry.pack([tensor, tensor, torch.ones(3)])
    assert first is second
    assert first is not third


def test_loose_arrays_share_one_slab(ferry: Ferry) -> None:
    parcel, _ = ferry.pack([torch.ones(5), np.ones(5000), torch.ones(7)])
    assert parcel.lengths == (20, 40_000, 28)


def test_a_steady_trainer_receives_no_new_slabs(ferry: Ferry) -> None:
    def carry(value: float) -> Sent:
        parcel, batch = ferry.pack(torch.full((8, 4), value))
        assert batch[0, 0] == value
        return parcel

    for value in range(4):
        carry(float(value))
    before = descriptors()
    assert [carry(float(value)).new for value in range(30)] == [False] * 30
    assert descriptors() == before


def test_batches_that_the_trainer_keeps_cost_no_descriptor(ferry: Ferry) -> None:
    batches, descriptor_counts = [], []
    for value in range(2 * KEEP):
        batches.append(ferry.pack(torch.full((8, 4), value))[1])
        descriptor_counts.append(descriptors())
    assert max(descriptor_counts[KEEP + 5 :]) == descriptor_counts[KEEP + 5]
    assert [tensor[7, 3].item() for tensor in batches] == list(range(2 * KEEP))
    batches.clear()
    assert ferry.pack(torch.zeros(2))[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("part", [lambda a: a, lambda a: a[3:, 1:], torch.from_numpy])
def test_an_array_that_the_trainer_keeps_is_never_overwritten(
    part: Any, ferry: Ferry
) -> None:
    arrays = [part(ferry.pack(np.full((90, 90), at))[1]) for at in range(5)]
    assert [int(array.max()) for array in arrays] == list(range(5))
    assert [int(array.min()) for array in arrays] == list(range(5))


def test_memory_that_a_fork_shares_is_not_reused(ferry: Ferry) -> None:
    parcel, batch = ferry.pack(torch.ones(4))
    ferry.unpacker.share()  # as before a fork there; the sender is another process
    shared_key = parcel.key
    del batch
    later = [ferry.pack(torch.full((4,), 2.0))[0] for _ in range(5)]
    assert shared_key not in {parcel.key for parcel in later}
    assert shared_key in {key for parcel in later for key in parcel.forget}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_crosses(dtype: torch.dtype, ferry: Ferry) -> None:
    raw = torch.arange(64, dtype=torch.uint8).reshape(4, 16) % 2
    tensor = raw.view(dtype)
    for arrival in (pickle.loads(dumps(tensor)), ferry.pack(tensor)[1]):  # noqa: S301
        assert (arrival.dtype, arrival.shape) == (dtype, tensor.shape)
        assert torch.equal(arrival.view(torch.uint8), raw)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.arange(12).reshape(3, 4).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(10)[::3],
        torch.ones(1).expand(3, 2),
        torch.ones(0, 3),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_a_message_carries_tensors_of_any_memory_layout(tensor: torch.Tensor) -> None:
    copy = pickle.loads(dumps({"x": tensor}))["x"]  # noqa: S301 our own
    assert torch.equal(copy, tensor)
    assert (type(copy), copy.requires_grad) == (type(tensor), tensor.requires_grad)
    assert copy.stride() == torch.empty_like(tensor, device="meta").stride()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3000),
        np.arange(3000).reshape(30, 100).T,
        np.arange(3000)[::2],
        np.broadcast_to(np.arange(3), (1000, 3)),
        np.frombuffer(bytes(9000), np.uint8),
        np.frombuffer(bytes(9), np.uint8),
        np.zeros((0, 3)),
        np.array([{1}, None]),
    ],
)
def test_an_array_of_any_kind_crosses_and_may_be_written_to(
    array: np.ndarray[Any, Any], ferry: Ferry
) -> None:
    for arrival in (
        pickle.loads(dumps(array)),  # noqa: S301 our own
        ferry.pack(array)[1],
        restored(flattened(array)),
    ):
        assert np.array_equal(arrival, array)
        assert (arrival.dtype, arrival.shape) == (array.dtype, array.shape)
        assert arrival.flags.writeable


def test_a_tensor_that_fills_its_memory_keeps_its_layout(ferry: Ferry) -> None:
    batch = torch.arange(240).reshape(4, 3, 4, 5).to(memory_format=torch.channels_last)
    for arrival in (ferry.pack(batch[1:])[1], restored(flattened(batch[1:]))):
        assert torch.equal(arrival, batch[1:])
        assert arrival.stride() == batch.stride()


def test_batches_of_unequal_size_cross_whole(ferry: Ferry) -> None:
    for size in (3, 50_000, 1, 700, 49_000, 50_001):
        assert ferry.pack(torch.arange(size))[1].tolist() == list(range(size))


def test_a_batch_that_cannot_be_pickled_is_an_error_and_the_next_crosses(
    ferry: Ferry,
) -> None:
    with pytest.raises(TypeError, match="it stays here"):
        ferry.pack([torch.ones(3), Refusing()])
    assert ferry.pack([torch.ones(3)])[1][0].tolist() == [1.0] * 3
