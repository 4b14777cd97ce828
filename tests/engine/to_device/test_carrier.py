"""Copies read bounded, pinned memory that nobody overwrites before they are done.

The device is a stand-in whose copies are done when the test says so.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from penstock.engine.batch.device import DeviceStage, ToDevice
from penstock.engine.far.slabs import block_at
from penstock.engine.feed import Delivery
from penstock.engine.to_device.lane import DEPTH, Carrier
from support.clocked_bus import ClockedBus
from support.ferry import ferries, layout_of
from support.given_host import PLAN, Given, as_it_is, images, lane_over, taken

PAGE = 4096
EIGHT = layout_of(np.zeros(8, np.uint8))
"""Samples of eight bytes."""


def test_pinned_memory_holds_one_batch_more_than_are_ahead() -> None:
    bus, host = ClockedBus(), Given([images(at, 100) for at in range(20)])
    lane = lane_over(bus)
    for host.ready in range(1, 21):
        taken(lane, host)
        nbytes = images(0, 100).nbytes
        assert bus.pinned_bytes <= (DEPTH + 1) * (nbytes + nbytes // 4)
    assert bus.from_pageable == 0
    assert bus.waited > 0  # it ticks only when the carrier waits for it
    lane.close()
    assert (bus.pinned_bytes, bus.done) == (0, bus.issued)


def test_no_more_batches_are_taken_ahead_while_copies_lag() -> None:
    bus, host = ClockedBus(), Given([images(at) for at in range(20)])
    host.ready = 20
    lane = lane_over(bus)
    taken(lane, host)
    taken(lane, host)
    assert (host.place, bus.waited) == (DEPTH + 1, 0)
    bus.tick()
    taken(lane, host)
    assert (host.place, bus.waited) == (DEPTH + 2, 0)


def test_a_slab_is_pinned_once_and_kept_until_its_copy_is_done() -> None:
    bus = ClockedBus()
    carrier = Carrier(bus, as_it_is(), 3)
    with ferries() as ferry:
        first = ferry.carry(EIGHT, 1)
        block = block_at(first.data_ptr())
        assert block is not None
        address = ctypes.addressof(block)
        crossing = carrier.send(Delivery(first, PLAN))
        assert bus.registered == {address: PAGE}
        assert (bus.pinned_bytes, bus.from_pageable) == (0, 0)
        del first
        second = ferry.carry(EIGHT, 2)  # not in memory that is still read
        bus.tick(2)
        assert crossing.data.unique().tolist() == [1]
        carrier.send(Delivery([], PLAN))
        again = ferry.carry(EIGHT, 3)
        assert [laid.key for laid in ferry.sent] == [1, 2, 1]
        carrier.send(Delivery(again, PLAN))
        assert bus.registered == {address: PAGE}
        carrier.close()
        del again, second, block
    assert bus.unregistered == [address]


def test_slabs_that_cannot_be_pinned_are_copied_to_pinned_memory() -> None:
    bus = ClockedBus()
    bus.refusing = {"register"}
    carrier = Carrier(bus, as_it_is(), 3)
    with ferries() as ferry:
        batch = ferry.carry(EIGHT, 5)
        crossing = carrier.send(Delivery(batch, PLAN))
        del batch
        ferry.carry(EIGHT, 9)  # in the same slab, as that has been read
        assert [laid.key for laid in ferry.sent] == [1, 1]
        bus.refusing.clear()
        bus.tick()
        assert crossing.data.unique().tolist() == [5]
        assert (bus.registered, bus.from_pageable) == ({}, 0)
        carrier.close()


def test_batches_are_copied_in_place_where_no_memory_can_be_pinned() -> None:
    bus, host = ClockedBus(), Given([images(at) for at in range(3)])
    bus.refusing = {"pinned"}
    lane = lane_over(bus)
    for at in range(3):
        assert torch.equal(taken(lane, host), images(at))
    assert bus.from_pageable == 3


def test_data_already_on_a_device_is_left_to_the_trainers_stream() -> None:
    bus = ClockedBus()
    data = (torch.zeros(3, device="meta"), torch.ones(3))
    to_meta = ToDevice(DeviceStage.of("meta"))
    crossing = Carrier(bus, to_meta, 3).send(Delivery(data, PLAN))
    assert (crossing.mark, bus.issued) == (None, 0)


def test_pinned_memory_is_as_large_as_the_batch() -> None:
    bus = ClockedBus()
    carrier = Carrier(bus, as_it_is(), 1)
    for rows in (1, 100, 90, 2):
        crossing = carrier.send(Delivery(images(3, rows), PLAN))
        nbytes = images(3, rows).nbytes
        assert nbytes <= bus.pinned_bytes <= 2 * nbytes + 64
        bus.tick()
        assert torch.equal(crossing.data, images(3, rows))
