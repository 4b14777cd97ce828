"""Batches are put into pinned memory by whoever finishes them, not by the trainer."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import penstock as ps
from penstock.engine.batch.buffer import Buffers, on_heap
from penstock.engine.to_device import pinning
from penstock.engine.workers.process.slabs import SlabPool
from support.datasets import KINDS, Numbers


class Pinned:
    """Stands in for torch's allocator of pinned memory, which needs a CUDA device."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.threads: set[str] = set()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = on_heap(shape, dtype)
        self.addresses.add(memory.data_ptr())
        self.threads.add(threading.current_thread().name)
        return memory

    def contains(self, batch: Any) -> bool:
        """Whether all tensors of a batch are in memory from here."""
        return all(tensor.data_ptr() in self.addresses for tensor in batch)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """Make loaders with `pin_memory=True` use what stands in for pinned memory."""
    made = Pinned()
    monkeypatch.setattr(pinning, "allocate", made.allocate)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    theirs = torch.utils.data._utils.pin_memory  # noqa: SLF001
    monkeypatch.setattr(theirs, "pin_memory", lambda data: data)
    return made


def stacked(samples: list[Any]) -> Any:
    """Collate as by default."""
    return default_collate(samples)


@pytest.mark.parametrize("collate_fn", [None, stacked])
@pytest.mark.parametrize("threads", [True, False])
def test_a_loader_s_workers_pin_its_batches(
    memory: Pinned, collate_fn: Any, *, threads: bool
) -> None:
    data = Numbers(40)
    wanted = list(DataLoader(data, 8))
    given: Any = {"num_workers": 2, "pin_memory": True, "collate_fn": collate_fn}
    ours = ps.DataLoader(data, 8, **given, thread_safe=threads, sample_seeding=True)
    with closing(ours):
        found = list(ours)
    assert len(found) == len(wanted)
    for batch, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, batch, theirs))
    mine = threading.current_thread().name
    if collate_fn is None:
        assert all(map(memory.contains, found))
        assert mine not in memory.threads


@pytest.mark.parametrize("loose", [True, False])
def test_what_is_in_shared_memory_is_moved_only_if_asked(*, loose: bool) -> None:
    pool = SlabPool()
    _, allocate = pool.lend_bytes(64)
    shared, heap = allocate((8,), torch.float32).fill_(1), torch.ones(3, 4).t()
    batch = {"images": [shared, heap], "again": heap, "name": "a"}
    moved = (pinning.pin_loose if loose else pinning.pin)(batch)
    assert (moved["images"][0] is shared) == loose
    assert moved["images"][1] is not heap
    assert moved["images"][1] is moved["again"]
    assert moved["again"].stride() == heap.stride()
    assert torch.equal(moved["again"], heap)
    assert torch.equal(moved["images"][0], shared)
    assert pinning.pin_loose([shared, "a"])[0] is shared
    pool.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex128])
def test_every_dtype_is_copied_bit_by_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype).transpose(0, 2)
    (moved,) = pinning.pin([tensor])
    assert moved is not tensor
    assert torch.equal(moved, tensor)
    assert moved.stride() == tensor.stride()


def test_a_batch_with_nothing_to_move_is_itself() -> None:
    for batch in (["a", 1], torch.empty(0), torch.eye(3).to_sparse()):
        assert pinning.pin(batch) is batch


def test_another_process_does_not_use_cuda() -> None:
    buffers = pinning.pinned(Buffers("Batch(ID:1)"), slabs=True)
    assert (buffers.allocate, buffers.pin) == (pinning.allocate, pinning.pin)
    assert buffers.elsewhere == Buffers("Batch(ID:1)")


@pytest.mark.gpu
@pytest.mark.parametrize("collate_fn", [None, stacked])
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_batches_on_their_way_to_the_device_are_not_staged(
    how: Any, collate_fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine.to_device.pinned import PinnedRing

    staged: list[int] = []
    stage = PinnedRing.stage

    def noted(ring: PinnedRing, tensors: Any) -> Any:
        staged.append(len(tensors))
        return stage(ring, tensors)

    monkeypatch.setattr(PinnedRing, "stage", noted)
    pipe = ps.Pipeline.from_dataset(Numbers(400), **how).batch(8, collate_fn=collate_fn)
    with pipe.to_device("cuda") as moved:
        found = [label for batch in moved for label in batch[1].tolist()]
    assert found == list(range(400))
    if collate_fn is None:
        assert set(staged) == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_s_batches_are_pinned(*, workers: int) -> None:
    data, given = Numbers(64), {"num_workers": workers, "pin_memory": True}
    theirs = DataLoader(data, 8, **given)
    ours = ps.DataLoader(data, 8, **given, sample_seeding=True)
    with closing(ours):
        for batch, wanted in zip(ours, theirs, strict=True):
            assert isinstance(batch, type(wanted))
            assert all(tensor.is_pinned() for tensor in batch)
            moved = [tensor.to("cuda", non_blocking=True).cpu() for tensor in batch]
            assert all(map(torch.equal, moved, wanted))
