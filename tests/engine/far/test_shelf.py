"""Slabs that wait, open, for the next batch of their layout: lent, sent, returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from support.ferry import Ferry, ferries, layout_of

ROWS = 4
IMAGE = layout_of((np.zeros((2, 3), np.uint8), 1.5))
OTHER = layout_of((np.zeros((5, 3), np.uint8), 1.5))


@pytest.fixture
def ferry() -> Iterator[Ferry]:
    """A ferry whose receiver may hold three slabs."""
    with ferries(3) as ferry:
        yield ferry


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
    assert {laid.key for laid in ferry.sent} == {ferry.sent[0].key}
    assert [laid.new for laid in ferry.sent] == [True] + [False] * 4


def test_a_batch_that_the_receiver_keeps_is_never_overwritten(ferry: Ferry) -> None:
    batches = [ferry.carry(IMAGE, value) for value in range(8)]  # more than it may hold
    assert [values(batch) for batch in batches] == [[n, n] for n in range(8)]
    assert len({laid.key for laid in ferry.sent}) == 8
    forgotten = [key for laid in ferry.sent for key in laid.forget]
    assert forgotten == [laid.key for laid in ferry.sent[: len(forgotten)]]
    assert len(forgotten) >= 4


def test_a_part_of_a_batch_keeps_its_slab(ferry: Ferry) -> None:
    images, numbers = ferry.carry(IMAGE, 1)
    del numbers
    row = images[2]
    del images
    ferry.carry(IMAGE, 2)
    assert row.unique().item() == 1


def test_a_layout_is_sent_once_for_each_slab(ferry: Ferry) -> None:
    for layout in (IMAGE, IMAGE, OTHER, OTHER, IMAGE):
        ferry.carry(layout, 3)
    assert [laid.layout for laid in ferry.sent] == [IMAGE, None, OTHER, None, IMAGE]
    assert [laid.new for laid in ferry.sent] == [True, False, True, False, True]


def test_slabs_of_a_layout_that_is_over_are_dropped(ferry: Ferry) -> None:
    for layout in (IMAGE, OTHER, OTHER):
        assert values(ferry.carry(layout, 4)) == [4, 4]
    first, second, _ = ferry.sent
    assert second.forget == (first.key,)


def test_memory_of_a_batch_that_is_not_sent_is_lent_again(ferry: Ferry) -> None:
    memory = ferry.shelf.lend(IMAGE, ROWS)
    ferry.shelf.put_back(memory)
    ferry.shelf.put_back(None)  # no memory of the shelf
    assert ferry.shelf.send(memory) is None
    assert ferry.shelf.lend(IMAGE, ROWS) is memory


def test_a_slab_that_a_fork_shares_is_not_used_again(ferry: Ferry) -> None:
    ferry.carry(IMAGE, 5)
    (first,) = ferry.sent
    ferry.unpacker.returned()
    ferry.shelf.take_back(((), (first.key,)))
    ferry.carry(IMAGE, 6)
    assert ferry.sent[-1].key != first.key
    assert ferry.sent[-1].forget == (first.key,)


def test_there_may_be_no_shared_memory(
    ferry: Ferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(28, "no space left")

    monkeypatch.setattr("penstock.engine.far.slabs.shared_file", refused)
    with pytest.raises(OSError, match="no space left"):
        ferry.shelf.lend(IMAGE, ROWS)


@pytest.mark.parametrize(
    "part",
    [
        lambda tensor: tensor.view(torch.int8),
        lambda tensor: tensor.numpy()[1:],
        torch.utils.dlpack.from_dlpack,
        lambda tensor: {"a": [tensor[::2]]},
    ],
)
def test_whatever_shares_its_memory_keeps_a_slab(part: Any, ferry: Ferry) -> None:
    view = part(ferry.carry(IMAGE, 1)[0])
    ferry.carry(IMAGE, 2)
    ferry.carry(IMAGE, 3)
    first, second, third = ferry.sent
    assert first.key not in (second.key, third.key)
    del view
    ferry.carry(IMAGE, 4)
    ferry.carry(IMAGE, 5)
    assert first.key in {laid.key for laid in ferry.sent[3:]}


def test_copies_and_batches_have_slabs_of_their_own(ferry: Ferry) -> None:
    for value in range(3):
        assert values(ferry.carry(IMAGE, value)) == [value, value]
        assert ferry.pack([torch.full((9,), value)])[1][0].tolist() == [value] * 9
    assert [laid.new for laid in ferry.sent] == [True, False, False]
