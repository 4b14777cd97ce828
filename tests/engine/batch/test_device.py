"""Images go to the device as bytes and are normalised there."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.engine.batch.device import DeviceStage, ToDevice
from penstock.engine.far.slabs import Slab, allocate_on
from penstock.engine.feed import Delivery
from support.core_script import Script
from support.datasets import KINDS

PLAN = Script((4,)).batch(7)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.5)


class Images:
    """Sample i is (an image `uint8 [64, 64, 3]` of its own, i)."""

    nbytes = 64 * 64 * 3

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        values = torch.arange(self.nbytes, dtype=torch.int64) * (index + 1) % 251
        return values.to(torch.uint8).reshape(64, 64, 3), index


def described() -> ps.Pipeline:
    images = torch.arange(4 * 2 * 5 * 3, dtype=torch.uint8).reshape(4, 2, 5, 3)
    return ps.Pipeline.from_dataset([(im, at) for at, im in enumerate(images)]).batch(4)


class Watched(torch.Tensor):
    """Notes where it is asked to go, and stays."""

    def to(self, *where: Any, **how: Any) -> Any:
        self.asked = *where, how
        return self


@pytest.mark.parametrize(("place", "waits"), [("cpu", True), ("cuda", False)])
def test_only_a_copy_to_cuda_may_be_under_way_when_its_batch_is_handed_over(
    place: str, *, waits: bool
) -> None:
    tensor, device = torch.ones(2).as_subclass(Watched), torch.device(place)
    assert ToDevice(DeviceStage(device))([tensor]) == [tensor]
    assert tensor.asked == (device, {"non_blocking": not waits})


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_become_floats_on_the_device(dtype: Any, *, channels_last: bool) -> None:
    ((raw, _),) = described()
    pipe = described().to_device(
        "cpu", normalize=(MEAN, STD), dtype=dtype, channels_last=channels_last
    )
    ((images, labels),) = pipe
    expected = (raw / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    assert images.dtype == dtype
    assert images.shape == (4, 3, 2, 5)
    assert torch.allclose(images.float(), expected.permute(0, 3, 1, 2), atol=0.02)
    assert labels.tolist() == [0, 1, 2, 3]
    assert labels.dtype == torch.int64
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    assert "normalize=((0.4, 0.5, 0.6), (0.2, 0.25, 0.5))" in repr(pipe)


def test_floats_on_the_device_do_not_depend_on_the_default_type() -> None:
    usual = ps.image.IMAGENET_MEAN, ps.image.IMAGENET_STD
    ((expected, _),) = described().to_device("cpu", normalize=usual)
    torch.set_default_dtype(torch.float64)
    try:
        ((images, _),) = described().to_device("cpu", normalize=usual)
    finally:
        torch.set_default_dtype(torch.float32)
    assert images.equal(expected)


@pytest.mark.parametrize("wrong", [5, (MEAN,), (MEAN, (1, 2)), (MEAN, (0, 1, 1))])
def test_a_wrong_normalisation_is_an_error_with_an_example(wrong: Any) -> None:
    with pytest.raises(ps.SpecError, match=r"\(means, deviations\)"):
        described().to_device("cpu", normalize=wrong)


def test_a_batch_without_anything_to_normalise_is_an_error() -> None:
    pipe = ps.Pipeline.from_dataset(range(8)).batch(4)
    batches = iter(pipe.to_device("cpu", normalize=(MEAN, STD)))
    with pytest.raises(ps.SpecError, match=r"uint8 \[N, H, W, 3\]"):
        next(batches)


@pytest.mark.gpu
@pytest.mark.parametrize("host", ["trainer", "process"])
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_batches_on_a_cuda_device_are_those_in_host_memory(how: Any, host: Any) -> None:
    def images(**to: Any) -> ps.Pipeline:
        pipe = ps.Pipeline.from_dataset(Images(200), **how).batch(16)
        return pipe.options(host=host).to_device(**to, normalize=(MEAN, STD))

    with images(device="cpu") as home, images(device="cuda") as away:
        for ours, theirs in zip(home, away, strict=True):
            work = torch.empty(1 << 24, device="cuda")
            for _ in range(20):  # so that freed memory is still being read
                work.mul_(2)
            total = theirs[0].double().sum()
            assert theirs[0].device.type == "cuda"
            assert away.plan == home.plan
            assert torch.allclose(total.cpu(), ours[0].double().sum(), rtol=1e-6)
            assert torch.allclose(theirs[0].cpu(), ours[0], atol=1e-6)
            assert torch.equal(theirs[1].cpu(), ours[1])


@pytest.mark.gpu
def test_a_copy_from_the_ring_or_from_a_slab_blocks_nobody() -> None:
    """A copy issued behind a long kernel returns before the kernel is done."""
    from penstock.engine.to_device.cuda import Bus
    from penstock.engine.to_device.lane import Carrier

    bus = Bus(torch.device("cuda"))
    carrier = Carrier(bus, ToDevice(DeviceStage.of("cuda")), 3)
    slab = Slab(1, 1 << 20)
    allocate, _ = allocate_on(slab.block)
    address = ctypes.addressof(slab.block)
    shared = allocate((1 << 20,), torch.uint8).fill_(3)
    heap = torch.full((1 << 20,), 5, dtype=torch.uint8)
    carrier.send(Delivery((shared, heap), PLAN))
    assert shared.is_pinned()
    with bus.side():
        torch.cuda._sleep(200_000_000)  # noqa: SLF001 cycles: some 0.1 s
    crossing = carrier.send(Delivery((shared, heap), PLAN))
    assert crossing.mark is not None
    assert not crossing.mark.query()
    heap.zero_()
    batch = carrier.hand_over(crossing).data
    assert [tensor.sum().item() for tensor in batch] == [3 << 20, 5 << 20]
    carrier.close()
    os.close(slab.descriptor)
    del shared, allocate, slab, crossing, batch
    assert bus.register(address, 0) is False
    assert torch.ones(1, device="cuda").item() == 1  # nobody is blamed for that


@pytest.mark.gpu
def test_no_more_batches_than_the_depth_are_ahead_on_a_cuda_device() -> None:
    from penstock.engine.to_device.lane import DEPTH

    pipe = ps.Pipeline.from_dataset(Images(400), executor="thread").batch(4)
    nbytes = 4 * Images.nbytes
    with pipe.to_device("cuda") as device_pipe:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in device_pipe:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    assert nbytes <= peak <= (DEPTH + 2) * (nbytes + (1 << 12))
