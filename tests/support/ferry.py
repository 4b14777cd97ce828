"""Both sides of a handover through shared memory, in one process."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.engine.batch.layout import Layout, learn
from penstock.engine.far.slabs import Sent, Shelf, Unpacker

__all__ = ["Ferry", "ferries", "layout_of"]


def layout_of(sample: Any) -> Layout:
    """Return the layout of a sample's batches."""
    layout = learn(sample)
    assert layout is not None
    assert layout.solid
    return layout


class Ferry:
    """A shelf and its receiver, which gets copies of the descriptors."""

    def __init__(self, keep: int) -> None:
        self.shelf, self.unpacker = Shelf(keep), Unpacker()
        self.sent: list[Sent] = []

    def carry(self, layout: Layout, value: Any, rows: int = 4) -> Any:
        """Make a batch of this value in lent memory; return what arrives."""
        self.back()
        memory = self.shelf.lend(layout, rows)
        for part in memory if isinstance(memory, list | tuple) else [memory]:
            part.fill_(value)
        parcel = self.shelf.send(memory)
        assert parcel is not None
        laid, descriptors = parcel
        self.sent.append(laid)
        return self.unpacker.receive(laid, deque(map(os.dup, descriptors)))

    def pack(self, data: Any) -> tuple[Sent, Any]:
        """Bring any data over; return how it was sent, and what arrives."""
        self.back()
        packed, descriptors = self.shelf.pack(data)
        copies = deque(map(os.dup, descriptors))  # as a pipe does
        arrival = self.unpacker.receive(packed, copies)
        assert not copies
        return packed, arrival

    def back(self) -> None:
        """Tell the sender which arrays have died."""
        self.shelf.take_back(self.unpacker.returned())


@contextmanager
def ferries(keep: int = 40) -> Iterator[Ferry]:
    """Yield a ferry; what it has mapped ends with the `with`."""
    ferry = Ferry(keep)
    yield ferry
    shelf = vars(ferry).pop("shelf")
    for slab in [*shelf._free, *shelf._lent.values(), *shelf._out.values()]:  # noqa: SLF001 a worker process just ends
        os.close(slab.descriptor)
    vars(ferry).clear()
