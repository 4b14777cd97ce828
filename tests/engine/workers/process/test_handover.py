"""A batch crosses unchanged, and the memory it crossed in comes back or is released."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.batch.layout import learn
from penstock.engine.workers.process.handover import Packed, Packer, Unpacker, dumps
from penstock.engine.workers.process.slabs import SlabPool
from support.batches import COLLATES, Refusing, same
from support.datasets import Numbers


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


class Ferry:
    """Both sides of a handover, in one process."""

    def __init__(self) -> None:
        self.slabs = SlabPool(KEEP)
        self.packer = Packer(self.slabs)
        self.unpacker = Unpacker()

    def carry(self, data: Any) -> tuple[Packed, Any]:
        """Bring a batch over, after telling the child which arrays have died."""
        self.packer.take_back(self.unpacker.returned())
        packed, descriptors = self.packer.pack(data)
        copies = deque(map(os.dup, descriptors))  # as a pipe does
        found = self.unpacker.unpack(packed, copies)
        assert not copies
        return packed, found

    def made_in_place(self, value: float) -> torch.Tensor:
        """Return a batch that is written straight into a slab, as the engine does."""
        layout = learn(np.zeros(4, np.float32))
        assert layout is not None
        _, allocate = self.slabs.lend(layout, 8)
        return allocate((8, 4), torch.float32).fill_(value)


@pytest.fixture
def ferry() -> Iterator[Ferry]:
    ferry = Ferry()
    yield ferry
    ferry.slabs.close()
    vars(ferry).clear()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("collate", COLLATES.values(), ids=COLLATES)
def test_a_batch_arrives_unchanged(
    collate: Callable[[list[Any]], Any], ferry: Ferry
) -> None:
    for _ in range(3):
        data = collate(SAMPLES)
        assert same(ferry.carry(data)[1], data)


def test_a_tensor_that_a_batch_holds_twice_arrives_as_one(ferry: Ferry) -> None:
    tensor = torch.ones(3)
    _, (first, second, third) = ferry.carry([tensor, tensor, torch.ones(3)])
    assert first is second
    assert first is not third


def test_a_batch_made_in_a_slab_is_not_copied(ferry: Ferry) -> None:
    tensor = ferry.made_in_place(1.0)
    packed, found = ferry.carry({"x": tensor, "y": [tensor[2:4]]})
    tensor.fill_(5.0)
    assert len(packed.new) == 1
    assert len(packed.body) < 200
    assert torch.equal(found["x"], tensor)
    assert found["y"][0].tolist() == [[5.0] * 4] * 2


def test_loose_arrays_share_one_slab(ferry: Ferry) -> None:
    packed, _ = ferry.carry([torch.ones(5), np.ones(5000), torch.ones(7)])
    assert len({part.key for part in packed.parts}) == 1


def test_memory_is_reused_only_after_its_last_array_has_died(
    ferry: Ferry,
) -> None:
    _, first = ferry.carry(ferry.made_in_place(1.0))
    row = first[3]
    del first
    _, second = ferry.carry(ferry.made_in_place(2.0))
    assert row.tolist() == [1.0] * 4
    packed, third = ferry.carry(ferry.made_in_place(3.0))
    assert (row[0], second[0, 0], third[0, 0]) == (1.0, 2.0, 3.0)
    assert packed.new
    del row, second, third
    assert ferry.carry(ferry.made_in_place(4.0))[
        0
    ].new  # they died too late to be reused for it
    assert ferry.carry(ferry.made_in_place(5.0))[0].new == ()


@pytest.mark.parametrize("where", ["slab", "heap"])
def test_a_steady_trainer_receives_no_new_slabs(where: str, ferry: Ferry) -> None:
    def carry(value: float) -> Packed:
        data = (
            ferry.made_in_place(value) if where == "slab" else torch.full((8, 4), value)
        )
        packed, found = ferry.carry(data)
        assert found[0, 0] == value
        return packed

    for value in range(4):
        carry(float(value))
    before = descriptors()
    assert [carry(float(value)).new for value in range(30)] == [()] * 30
    assert descriptors() == before


@pytest.mark.parametrize("where", ["slab", "heap"])
def test_batches_that_the_trainer_keeps_cost_no_descriptor(
    where: str, ferry: Ferry
) -> None:
    kept, seen = [], []
    for value in range(2 * KEEP):
        data = (
            ferry.made_in_place(value) if where == "slab" else torch.full((8, 4), value)
        )
        kept.append(ferry.carry(data)[1])
        seen.append(descriptors())
        del data
    assert max(seen[KEEP + 5 :]) == seen[KEEP + 5]
    assert [tensor[7, 3].item() for tensor in kept] == list(range(2 * KEEP))
    kept.clear()
    assert ferry.carry(torch.zeros(2))[1].tolist() == [0.0, 0.0]


def test_memory_that_a_fork_shares_is_not_reused(ferry: Ferry) -> None:
    packed, batch = ferry.carry(ferry.made_in_place(1.0))
    ferry.unpacker.share()  # as before a fork there; the sender is another process
    shared = packed.parts[0].key
    del batch
    later = [ferry.carry(ferry.made_in_place(2.0))[0] for _ in range(5)]
    assert shared not in {part.key for packed in later for part in packed.parts}
    assert shared in {key for packed in later for key in packed.forget}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_crosses(dtype: torch.dtype, ferry: Ferry) -> None:
    raw = torch.arange(64, dtype=torch.uint8).reshape(4, 16) % 2
    tensor = raw.view(dtype)
    for found in (pickle.loads(dumps(tensor)), ferry.carry(tensor)[1]):  # noqa: S301
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(found.view(torch.uint8), raw)


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
    found = pickle.loads(dumps({"x": tensor}))["x"]  # noqa: S301 our own
    assert torch.equal(found, tensor)
    assert (type(found), found.requires_grad) == (type(tensor), tensor.requires_grad)
    assert found.stride() == torch.empty_like(tensor, device="meta").stride()


def test_memory_that_arrives_twice_is_held_by_both_batches(ferry: Ferry) -> None:
    tensor = ferry.made_in_place(1.0)
    packed, descriptors = ferry.packer.pack(tensor)
    ferry.unpacker.unpack(packed, deque(map(os.dup, descriptors)))  # it dies at once
    first, second = ferry.carry(tensor)[1], ferry.carry(tensor)[1]
    del tensor, second
    for value in range(2, 5):
        ferry.carry(ferry.made_in_place(float(value)))
    assert first[0, 0] == 1.0


def test_batches_of_unequal_size_cross_whole(ferry: Ferry) -> None:
    for size in (3, 50_000, 1, 700, 49_000, 50_001):
        assert ferry.carry(torch.arange(size))[1].tolist() == list(range(size))


def test_a_batch_that_cannot_be_pickled_is_an_error_and_the_next_crosses(
    ferry: Ferry,
) -> None:
    with pytest.raises(TypeError, match="it stays here"):
        ferry.carry([torch.ones(3), Refusing()])
    assert ferry.carry([torch.ones(3)])[1][0].tolist() == [1.0] * 3
