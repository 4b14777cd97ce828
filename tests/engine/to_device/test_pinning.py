"""Batches are put into pinned memory by whoever finishes them, not by the trainer."""

from __future__ import annotations

import os
import threading
from contextlib import closing, nullcontext
from typing import Any, Self

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import penstock as ps
from penstock.engine import run
from penstock.engine.batch.buffer import Buffers
from penstock.engine.far.slabs import Slab, allocate_on, block_at
from penstock.engine.to_device import lane
from penstock.engine.to_device.lane import Pinning
from support.datasets import KINDS, Numbers


class Memory:
    """Stands in for torch's allocator of pinned memory, which needs a CUDA device."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.threads: set[str] = set()
        self.refusing = False

    def allocate(self, *shape: Any, **how: Any) -> torch.Tensor:
        """Replace `torch.empty` where pinned memory is asked for."""
        if not how.pop("pin_memory", False):
            return EMPTY(*shape, **how)
        self.threads.add(threading.current_thread().name)
        if self.refusing:
            raise RuntimeError("no pinned memory")
        memory = EMPTY(*shape, **how)
        self.addresses.add(memory.data_ptr())
        return memory

    def contains(self, batch: Any) -> bool:
        """Whether all tensors of a batch are in memory from here."""
        return all(tensor.data_ptr() in self.addresses for tensor in batch)


EMPTY = torch.empty
KINDS_OF_WORKERS = {
    "threads": {"num_workers": 2, "thread_safe": True},
    "processes": {"num_workers": 2},
    "none": {"num_workers": 0},
}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Let loaders and pipelines believe that there is a CUDA device."""
    allocator = Memory()
    monkeypatch.setattr(lane.torch, "empty", allocator.allocate)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    theirs = torch.utils.data._utils.pin_memory  # noqa: SLF001
    monkeypatch.setattr(theirs, "pin_memory", lambda data: data)
    return allocator


def stacked(samples: list[Any]) -> Any:
    """Collate as by default."""
    return default_collate(samples)


class Noted(list[Any]):
    """A list that holds more than its items."""

    def __init__(self, items: list[Any], note: str) -> None:
        super().__init__(items)
        self.note = note


def noted(samples: list[Any]) -> Any:
    """Collate into a list of the user's own class."""
    return Noted(default_collate(samples), f"{len(samples)} samples")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "collate_fn", "refusing"),
    [
        (kind, collate_fn, refusing)
        for kind in KINDS_OF_WORKERS
        for collate_fn in (None, stacked, noted)
        for refusing in (False, True)
        if kind != "processes" or collate_fn is not stacked or not refusing
    ],
)
def test_a_loader_s_workers_pin_its_batches(
    memory: Memory, kind: str, collate_fn: Any, *, refusing: bool
) -> None:
    memory.refusing = refusing
    data = Numbers(64)
    expected = list(DataLoader(data, 8, collate_fn=collate_fn))
    options: Any = {"pin_memory": True, "collate_fn": collate_fn}
    options |= KINDS_OF_WORKERS[kind]
    ours = ps.DataLoader(data, 8, **options, sample_seeding=True)
    with closing(ours):
        batches = list(ours)
    assert len(batches) == len(expected)
    for batch, theirs in zip(batches, expected, strict=True):
        assert all(map(torch.equal, batch, theirs))
        assert getattr(batch, "note", "") == getattr(theirs, "note", "")
    if refusing:
        assert memory.addresses == set()
    elif collate_fn is None and kind != "none":
        assert all(map(memory.contains, batches))
        assert threading.current_thread().name not in memory.threads
    elif kind == "processes":  # the trainer collates until it is known to be safe
        assert memory.contains(batches[-1])


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("collate_fn", [None, stacked])
def test_a_pipeline_to_cuda_has_its_batches_pinned_or_in_shared_memory(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, how: Any, collate_fn: Any
) -> None:
    monkeypatch.setattr(run, "ways_to", lambda stage: (None, None))
    pipe = ps.Pipeline.from_dataset(Numbers(64), **how).batch(8, collate_fn=collate_fn)
    with pipe.to_device("cuda") as on_device:
        batches = iter(on_device)
        for _ in range(7):
            next(batches)
        last = next(batches)
        for tensor in last:
            shared = block_at(tensor.data_ptr()) is not None
            inline = how["executor"] == "inline"
            made_here = inline or (collate_fn is not None and not shared)
            assert shared or made_here or tensor.data_ptr() in memory.addresses
        assert torch.equal(last[1], torch.arange(56, 64))


@pytest.mark.parametrize("slabs", [True, False])
def test_what_is_in_shared_memory_is_moved_only_if_asked(
    memory: Memory, *, slabs: bool
) -> None:
    slab = Slab(1, os.sysconf("SC_PAGE_SIZE"))
    allocate, _ = allocate_on(slab.block)
    shared, heap = allocate((8,), torch.float32).fill_(1), torch.ones(3, 4).t()
    batch = {"images": [shared, heap], "again": heap, "name": "a"}
    pin = Pinning(0, slabs=slabs).pin
    copy = pin(batch)
    assert (copy["images"][0] is not shared) == slabs
    assert copy["images"][1] is not heap
    assert copy["images"][1] is copy["again"]
    assert copy["again"].stride() == heap.stride()
    assert torch.equal(copy["again"], heap)
    assert torch.equal(copy["images"][0], shared)
    assert (pin([shared, "a"])[0] is not shared) == slabs
    assert copy["again"].data_ptr() in memory.addresses
    os.close(slab.descriptor)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex128])
def test_every_dtype_is_copied_bit_by_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype).transpose(0, 2)
    (copy,) = Pinning(0, slabs=True).pin([tensor])
    assert copy is not tensor
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()


class Fragile(tuple[Any, ...]):
    """A tuple that cannot be made again from its items."""

    __slots__ = ()

    def __new__(cls, items: list[Any], more: int) -> Self:
        assert more
        return super().__new__(cls, items)


def test_a_batch_that_has_nothing_to_move_or_cannot_move_is_itself(
    memory: Memory,
) -> None:
    pinning = Pinning(0, slabs=True)
    nothing = (
        ["a", 1],
        EMPTY(0),
        torch.eye(3).to_sparse(),
        torch.ones(1).requires_grad_(),
    )
    for batch in (*nothing, Fragile([torch.ones(2)], 1)):
        assert pinning.pin(batch) is batch
    memory.refusing = True
    pinning.pin([torch.ones(2)])  # finds out
    batch = [torch.ones(2)]
    assert pinning.pin(batch) is batch


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("begun", [False, True])
def test_pinning_uses_the_current_device_but_begins_nothing(
    monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: calls.append(3) or 3)
    buffers = lane.pinned(Buffers("Batch(ID:1)"), None, slabs=True)
    assert calls == [3] * begun
    monkeypatch.setattr(torch.cuda, "device", lambda at: nullcontext(calls.append(at)))
    buffers.allocate((2,), torch.int64)
    assert calls[-1] == (3 if begun else 0)


@pytest.mark.usefixtures("memory")
def test_another_process_does_not_use_cuda() -> None:
    buffers = Buffers("Batch(ID:1)")
    changed = lane.pinned(buffers, None, slabs=True)
    assert changed.pin is not None
    assert changed.elsewhere == buffers


@pytest.mark.gpu
@pytest.mark.parametrize("collate_fn", [None, stacked])
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_batches_on_their_way_to_the_device_are_not_staged(
    how: Any, collate_fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine.to_device.cuda import Bus

    staged: list[torch.Tensor] = []
    pin = Bus.pin

    def noted(bus: Bus, tensor: torch.Tensor) -> torch.Tensor:
        staged.append(tensor)
        return pin(bus, tensor)

    monkeypatch.setattr(Bus, "pin", noted)
    pipe = ps.Pipeline.from_dataset(Numbers(400), **how).batch(8, collate_fn=collate_fn)
    with pipe.to_device("cuda") as on_device:
        labels = [label for batch in on_device for label in batch[1].tolist()]
    assert labels == list(range(400))
    if collate_fn is None:
        assert staged == []


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_s_batches_are_pinned(
    monkeypatch: pytest.MonkeyPatch, *, workers: int
) -> None:
    data, options = Numbers(64), {"num_workers": workers, "pin_memory": True}
    theirs = list(DataLoader(data, 8, **options))
    if workers:  # not by the trainer
        by_trainer = torch.utils.data._utils.pin_memory  # noqa: SLF001
        monkeypatch.setattr(by_trainer, "pin_memory", lambda data: data)
    ours = ps.DataLoader(data, 8, **options, sample_seeding=True)
    with closing(ours):
        for batch, expected in zip(ours, theirs, strict=True):
            assert isinstance(batch, type(expected))
            assert all(tensor.is_pinned() for tensor in batch)
            copies = [tensor.to("cuda", non_blocking=True).cpu() for tensor in batch]
            assert all(map(torch.equal, copies, expected))
