"""Shared memory is lent with a batch and free again when its last array dies."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.engine.batch.layout import Layout, learn
from penstock.engine.workers.process.slabs import (
    Slab,
    SlabPool,
    allocate_on,
    map_shared,
)

PAGE = os.sysconf("SC_PAGE_SIZE")


def flat(nbytes: int) -> Layout:
    """Return the layout of a sample of this many bytes."""
    layout = learn(np.zeros(nbytes, np.uint8))
    assert layout is not None
    return layout


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.fixture
def pool() -> SlabPool:
    """A pool that gives away every slab after the first three handed over."""
    return SlabPool(keep=3)


def test_two_mappings_of_a_slab_are_one_memory() -> None:
    slab = Slab(1, PAGE)
    here, _ = allocate_on(slab.block)
    there, _ = allocate_on(map_shared(slab.descriptor, PAGE))
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        ours, theirs = here((2, 3), dtype), there((2, 3), dtype)
        ours.fill_(1)
        assert theirs.dtype == dtype
        assert torch.equal(ours, theirs)
    slab.give_away()


def test_leaves_begin_on_separate_cache_lines() -> None:
    slab = Slab(1, PAGE)
    allocate, memory = allocate_on(slab.block)
    leaves = [allocate((3,), torch.uint8) for _ in range(4)]
    starts = [leaf.data_ptr() - memory.ctypes.data for leaf in leaves]
    assert starts == [0, 64, 128, 192]
    slab.give_away()


def test_a_leaf_may_be_empty_or_of_any_dtype() -> None:
    slab = Slab(1, PAGE)
    allocate, _ = allocate_on(slab.block)
    for shape in ((0,), (2, 0, 3), (1,), (2, 2)):
        for dtype in (torch.float64, torch.complex64, torch.int16, torch.bool):
            leaf = allocate(shape, dtype)
            assert (tuple(leaf.shape), leaf.dtype) == (shape, dtype)
    slab.give_away()


def test_a_slab_lives_while_a_tensor_of_it_does(pool: SlabPool) -> None:
    slab, allocate = pool.lend(flat(100), 1)
    tensor = allocate((4,), torch.int64)
    view = tensor[1:3]
    tensor.fill_(9)
    del tensor, allocate
    pool.close()
    assert not is_open(slab.descriptor)
    key = slab.key
    del slab
    assert view.tolist() == [9, 9]
    assert key == 1


def test_a_slab_is_lent_again_after_its_batch_has_died(pool: SlabPool) -> None:
    slab, allocate = pool.lend(flat(100), 1)
    tensor = allocate((4,), torch.int64)
    del allocate
    other, again = pool.lend(flat(100), 1)
    assert other is not slab
    del tensor
    third, _ = pool.lend(flat(100), 1)
    assert third is slab
    assert repr(pool) == "<SlabPool: 2 lent, 0 free>"
    del again, _
    pool.close()


@pytest.mark.parametrize(
    "part",
    [
        lambda tensor: tensor.view(torch.uint8),
        lambda tensor: tensor.numpy()[1:],
        torch.utils.dlpack.from_dlpack,
        lambda tensor: {"a": [tensor[::2]]},
    ],
)
def test_a_batch_is_alive_while_any_part_of_it_is(
    part: Callable[[torch.Tensor], object], pool: SlabPool
) -> None:
    slab, allocate = pool.lend(flat(100), 1)
    kept = part(allocate((4,), torch.int64))
    del allocate
    assert pool.lend(flat(100), 1)[0] is not slab
    del kept
    assert slab in [pool.lend(flat(100), 1)[0] for _ in range(2)]
    pool.close()


def test_slabs_of_another_size_are_released(pool: SlabPool) -> None:
    small, allocate = pool.lend(flat(100), 1)
    del allocate
    assert small.descriptor >= 0
    large, allocate = pool.lend(flat(100 * PAGE), 1)
    assert large.nbytes >= 100 * PAGE
    assert small.descriptor == -1
    del allocate
    pool.close()


def test_batches_that_the_trainer_keeps_cost_no_descriptor(pool: SlabPool) -> None:
    kept, slabs = [], []
    for value in range(8):
        slab, allocate = pool.lend(flat(100), 1)
        kept.append(allocate((4,), torch.int64).fill_(value))
        slabs.append(slab)
        pool.hand_over(slab.key)
        del allocate
    still_open = [slab.key for slab in slabs if slab.descriptor >= 0]
    assert still_open == [6, 7, 8]
    assert [tensor[0].item() for tensor in kept] == list(range(8))
    pool.close()


def test_a_slab_that_is_still_being_written_is_not_given_away(pool: SlabPool) -> None:
    first, allocate = pool.lend(flat(100), 1)
    tensor, kept = allocate((1,), torch.int64), []
    for _ in range(20):
        slab, allocate = pool.lend(flat(100), 1)
        kept.append(allocate((1,), torch.int64))
        pool.hand_over(slab.key)
    assert is_open(first.descriptor)
    assert {first.key} <= pool.keys()
    pool.hand_over(first.key)
    del tensor, allocate
    assert pool.lend(flat(100), 1)[0] is first
    pool.close()


def test_memory_that_a_fork_shares_is_not_lent_again(pool: SlabPool) -> None:
    slabs, kept = [], []
    for value in range(2):
        slab, allocate = pool.lend(flat(100), 1)
        slabs.append(slab)
        kept.append(allocate((4,), torch.int64).fill_(value))
        del allocate
    pool.hand_over(slabs[0].key)
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    kept.clear()
    lent = [pool.lend(flat(100), 1) for _ in range(4)]
    assert [slab for slab, _ in lent if slab in slabs] == [slabs[1]]
    assert slabs[0].descriptor == -1
    pool.close()


def test_a_fork_takes_no_lock_of_the_pool(pool: SlabPool) -> None:
    with pool.lock:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def test_a_slab_given_away_does_not_come_back(pool: SlabPool) -> None:
    kept = []
    first, allocate = pool.lend(flat(100), 1)
    pool.hand_over(first.key)
    tensor = allocate((1,), torch.int64)
    for _ in range(5):
        slab, allocate = pool.lend(flat(100), 1)
        pool.hand_over(slab.key)
        kept.append(allocate((1,), torch.int64))
    del tensor
    assert first not in [pool.lend(flat(100), 1)[0] for _ in range(3)]
    pool.close()


def test_closing_closes_every_descriptor_and_batches_live_on(pool: SlabPool) -> None:
    slab, allocate = pool.lend(flat(100), 1)
    tensor = allocate((4,), torch.int64).fill_(5)
    free, other = pool.lend(flat(100), 1)
    del other
    descriptors = slab.descriptor, free.descriptor
    pool.close()
    assert not any(map(is_open, descriptors))
    assert tensor.tolist() == [5, 5, 5, 5]


def test_a_descriptor_is_not_inherited_and_has_our_name() -> None:
    slab = Slab(4, PAGE)
    assert not os.get_inheritable(slab.descriptor)
    assert "penstock" in os.readlink(f"/proc/self/fd/{slab.descriptor}")
    assert repr(slab) == f"<Slab 4: {PAGE} bytes, fd {slab.descriptor}>"
    slab.give_away()
    slab.give_away()


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
def test_a_slab_has_room_for_the_leaves_of_a_batch(leaves: int, pool: SlabPool) -> None:
    layout = learn(tuple(range(leaves)))
    assert layout is not None
    _, allocate = pool.lend(layout, 3)
    memory = layout.open(3, allocate)
    layout.write(memory, 0, [tuple(range(leaves))] * 3)
    assert [part.tolist() for part in memory] == [[n] * 3 for n in range(leaves)]
    del allocate, memory
    pool.close()
