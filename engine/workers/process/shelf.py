"""Slabs in which a worker process makes batches, each with its tensors made once.

Torch takes longer to make a few tensors than anything else about a small batch. A
solid layout says where each of them lies in a slab, in any process. So a batch travels
as its slab and its layout, and the slab waits here, open, for the next one.

    sender      Shelf.lend(layout, rows) ─▶ memory   Shelf.send(memory) ─▶ Laid
    receiver    Unpacker.lay_out(laid, ...) ─▶ batch  Unpacker.returned() ─▶ Shelf
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...batch.layout import Layout, block_bytes
from .handover import Returned
from .slabs import Slab, allocate_on, whole_pages

__all__ = ["Laid", "Shelf"]


class Laid(NamedTuple):
    """A batch that lies in a slab of the sender's."""

    key: int
    nbytes: int
    new: bool
    """Whether the slab's descriptor comes with this message."""
    layout: Layout | None
    """None: that of the batch sent before."""
    rows: int
    forget: tuple[int, ...]
    """Keys of slabs that will not be used again."""


@dataclass(slots=True, eq=False)
class Shelved:
    """A slab, and the memory of a batch in it."""

    slab: Slab
    layout: Layout
    rows: int
    memory: Any
    sent: bool = False
    """Whether the receiver has its descriptor."""


class Shelf:
    """Slabs for one receiver. The lock guards everything.

    Args:
        keep: most slabs that the receiver may hold; the oldest ones beyond that are
            given away.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: list[Shelved] = []
        self._lent: dict[int, Shelved] = {}
        """By the identity of their memory, while batches are made in them."""
        self._out: dict[int, Shelved] = {}
        """By key, those that the receiver holds, the oldest first."""
        self._forget: list[int] = []
        self._made = 0
        self._layout: Layout | None = None
        """The layout of the batch sent last."""
        self._lock = threading.Lock()

    def lend(self, layout: Layout, rows: int) -> Any:
        """Return memory for a batch of a solid layout.

        Raises:
            OSError: there is no shared memory for it.
        """
        with self._lock:
            place = next(
                (p for p in self._free if p.layout == layout and p.rows == rows), None
            )
            if place is None:
                self._drop(list(self._free))  # their size is over
                self._free.clear()
                place = self._make(layout, rows)
            else:
                self._free.remove(place)
            self._lent[id(place.memory)] = place
        return place.memory

    def has(self, memory: Any) -> bool:
        """Whether this memory is lent."""
        place = self._lent.get(id(memory))
        return place is not None and place.memory is memory

    def send(self, memory: Any) -> tuple[Laid, tuple[int, ...]]:
        """Return a batch made in lent memory as it is sent, with its descriptor."""
        with self._lock:
            place = self._lent.pop(id(memory))
            slab = place.slab
            new, place.sent = not place.sent, True
            self._out[slab.key] = place
            if len(self._out) > self._keep:
                oldest = next(iter(self._out))
                self._drop([self._out.pop(oldest)])
            told = None if place.layout is self._layout else place.layout
            self._layout = place.layout
            forget, self._forget = tuple(self._forget), []
        laid = Laid(slab.key, slab.nbytes, new, told, place.rows, forget)
        return laid, (slab.descriptor,) if new else ()

    def put_back(self, memory: Any) -> None:
        """Note that a batch made in this memory, if it was lent, is not sent."""
        with self._lock:
            place = self._lent.pop(id(memory), None)
            if place is not None:
                self._free.append(place)

    def take_back(self, returned: Returned) -> None:
        """Reuse the slabs that the receiver has let go, but none shared by a fork."""
        with self._lock:
            for key in returned.died:
                if key in self._out:
                    self._free.append(self._out.pop(key))
            shared = (self._out.pop(key, None) for key in returned.shared)
            self._drop([place for place in shared if place is not None])

    def close(self) -> None:
        """Give all slabs away; batches in them live on."""
        with self._lock:
            self._drop([*self._free, *self._lent.values(), *self._out.values()])
            self._free.clear()
            self._lent.clear()
            self._out.clear()

    def _make(self, layout: Layout, rows: int) -> Shelved:
        self._made += 1
        slab = Slab(-self._made, whole_pages(block_bytes(layout, rows)))
        allocate, _ = allocate_on(slab.block)
        return Shelved(slab, layout, rows, layout.open(rows, allocate))

    def _drop(self, places: list[Shelved]) -> None:
        for place in places:
            place.slab.give_away()
            if place.sent:
                self._forget.append(place.slab.key)

    def __repr__(self) -> str:
        return f"<Shelf: {len(self._lent)} lent, {len(self._out)} out>"
