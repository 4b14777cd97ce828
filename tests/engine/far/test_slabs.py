"""Shared memory: mapped by several processes, alive while an array over it is."""

from __future__ import annotations

import os
import resource

import pytest
import torch

from penstock.engine.batch.layout import block_bytes, learn
from penstock.engine.far.slabs import (
    Slab,
    allocate_on,
    map_shared,
)

PAGE = os.sysconf("SC_PAGE_SIZE")


def test_two_mappings_of_a_slab_are_one_memory() -> None:
    slab = Slab(1, PAGE)
    here, _ = allocate_on(slab.block)
    there, _ = allocate_on(map_shared(slab.descriptor, PAGE))
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        ours, theirs = here((2, 3), dtype), there((2, 3), dtype)
        ours.fill_(1)
        assert theirs.dtype == dtype
        assert torch.equal(ours, theirs)
    os.close(slab.descriptor)


def test_leaves_begin_on_separate_cache_lines() -> None:
    slab = Slab(1, PAGE)
    allocate, memory = allocate_on(slab.block)
    leaves = [allocate((3,), torch.uint8) for _ in range(4)]
    starts = [leaf.data_ptr() - memory.ctypes.data for leaf in leaves]
    assert starts == [0, 64, 128, 192]
    os.close(slab.descriptor)


def test_a_leaf_may_be_empty_or_of_any_dtype() -> None:
    slab = Slab(1, PAGE)
    allocate, _ = allocate_on(slab.block)
    for shape in ((0,), (2, 0, 3), (1,), (2, 2)):
        for dtype in (torch.float64, torch.complex64, torch.int16, torch.bool):
            leaf = allocate(shape, dtype)
            assert (tuple(leaf.shape), leaf.dtype) == (shape, dtype)
    os.close(slab.descriptor)


def test_a_slabs_memory_lives_while_a_tensor_of_it_does() -> None:
    slab = Slab(1, PAGE)
    allocate, memory = allocate_on(slab.block)
    tensor = allocate((4,), torch.int64)
    view = tensor[1:3]
    tensor.fill_(9)
    del tensor, allocate, memory
    os.close(slab.descriptor)
    del slab
    assert view.tolist() == [9, 9]


def test_a_descriptor_is_not_inherited_and_has_our_name() -> None:
    slab = Slab(4, PAGE)
    assert not os.get_inheritable(slab.descriptor)
    assert "penstock" in os.readlink(f"/proc/self/fd/{slab.descriptor}")
    os.close(slab.descriptor)


def test_a_failed_allocation_is_an_error_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            Slab(1, 2 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("leaves", [1, 16, 200])
def test_a_slab_has_room_for_the_leaves_of_a_batch(leaves: int) -> None:
    layout = learn(tuple(range(leaves)))
    assert layout is not None
    slab = Slab(1, block_bytes(layout, 3))
    allocate, _ = allocate_on(slab.block)
    memory = layout.open(3, allocate)
    layout.write(memory, 0, [tuple(range(leaves))] * 3)
    assert [part.tolist() for part in memory] == [[n] * 3 for n in range(leaves)]
    os.close(slab.descriptor)
