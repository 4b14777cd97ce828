"""Slabs that wait, open, for the next batch of their layout: lent, sent, returned."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.batch.layout import Layout, learn
from penstock.engine.workers.process.handover import Returned, Unpacker
from penstock.engine.workers.process.shelf import Laid, Shelf

ROWS = 4


def layout_of(sample: Any) -> Layout:
    layout = learn(sample)
    assert layout is not None
    assert layout.solid
    return layout


IMAGE = layout_of((np.zeros((2, 3), np.uint8), 1.5))
OTHER = layout_of((np.zeros((5, 3), np.uint8), 1.5))


class Ferry:
    """A shelf and its receiver, which gets copies of the descriptors."""

    def __init__(self, keep: int = 3) -> None:
        self.shelf, self.unpacker = Shelf(keep), Unpacker()
        self.seen: list[Laid] = []

    def carry(self, layout: Layout, value: int) -> Any:
        """Make a batch of this value in lent memory; return what arrives."""
        memory = self.shelf.lend(layout, ROWS)
        for part in memory:
            part.fill_(value)
        laid, descriptors = self.shelf.send(memory)
        self.seen.append(laid)
        return self.unpacker.lay_out(laid, deque(map(os.dup, descriptors)))

    def back(self) -> None:
        self.shelf.take_back(self.unpacker.returned())


@pytest.fixture
def ferry() -> Iterator[Ferry]:
    made = Ferry()
    yield made
    made.shelf.close()
    vars(made).clear()  # what it has mapped ends with it


def values(batch: Any) -> list[float]:
    return [part.unique().item() for part in batch]


def test_a_batch_arrives_as_its_layout_says(ferry: Ferry) -> None:
    images, numbers = ferry.carry(IMAGE, 7)
    assert (images.shape, images.dtype) == ((ROWS, 2, 3), torch.uint8)
    assert (numbers.shape, numbers.dtype) == ((ROWS,), torch.float64)
    assert values((images, numbers)) == [7, 7]


def test_a_slab_is_used_again_once_its_batch_has_died(ferry: Ferry) -> None:
    for value in range(5):
        assert values(ferry.carry(IMAGE, value)) == [value, value]
        ferry.back()
    assert {laid.key for laid in ferry.seen} == {ferry.seen[0].key}
    assert [laid.new for laid in ferry.seen] == [True] + [False] * 4


def test_a_batch_that_the_receiver_keeps_is_never_overwritten(ferry: Ferry) -> None:
    kept = []
    for value in range(8):  # more than it may hold
        kept.append(ferry.carry(IMAGE, value))
        ferry.back()
    assert [values(batch) for batch in kept] == [[n, n] for n in range(8)]
    assert len({laid.key for laid in ferry.seen}) == 8
    forgotten = [key for laid in ferry.seen for key in laid.forget]
    assert forgotten == [laid.key for laid in ferry.seen[: len(forgotten)]]
    assert len(forgotten) >= 4


def test_a_part_of_a_batch_keeps_its_slab(ferry: Ferry) -> None:
    images, numbers = ferry.carry(IMAGE, 1)
    del numbers
    row = images[2]
    del images
    ferry.back()
    ferry.carry(IMAGE, 2)
    assert row.unique().item() == 1


def test_a_layout_is_sent_once_until_it_changes(ferry: Ferry) -> None:
    for layout in (IMAGE, IMAGE, OTHER, OTHER, IMAGE):
        ferry.carry(layout, 3)
        ferry.back()
    assert [laid.layout for laid in ferry.seen] == [IMAGE, None, OTHER, None, IMAGE]


def test_slabs_of_a_layout_that_is_over_are_dropped(ferry: Ferry) -> None:
    for layout in (IMAGE, OTHER, OTHER):
        assert values(ferry.carry(layout, 4)) == [4, 4]
        ferry.back()
    first, second, _ = ferry.seen
    assert second.forget == (first.key,)


def test_memory_of_a_batch_that_is_not_sent_is_lent_again(ferry: Ferry) -> None:
    memory = ferry.shelf.lend(IMAGE, ROWS)
    assert ferry.shelf.has(memory)
    ferry.shelf.put_back(memory)
    ferry.shelf.put_back(None)  # no memory of the shelf
    assert not ferry.shelf.has(memory)
    assert ferry.shelf.lend(IMAGE, ROWS) is memory


def test_a_slab_that_a_fork_shares_is_not_used_again(ferry: Ferry) -> None:
    ferry.carry(IMAGE, 5)
    (first,) = ferry.seen
    ferry.unpacker.returned()
    ferry.shelf.take_back(Returned((), (first.key,)))
    ferry.carry(IMAGE, 6)
    assert ferry.seen[-1].key != first.key
    assert ferry.seen[-1].forget == (first.key,)


def test_there_may_be_no_shared_memory(
    ferry: Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(28, "no space left")

    monkeypatch.setattr("penstock.engine.workers.process.slabs.shared_file", refused)
    with pytest.raises(OSError, match="no space left"):
        ferry.shelf.lend(IMAGE, ROWS)
