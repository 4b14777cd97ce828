"""Slabs in which a worker process makes batches, or copies what it sends into.

Torch takes longer to make a few tensors than anything else about a small batch. A
solid layout says where each of them lies in a slab, in any process. So a batch of such
a layout travels as its slab and the layout, and the slab waits here, open, for the next
one. The arrays of any other data are copied into one slab, and the rest of it is
pickled: it comes from our own process, over our own pipe.

    sender      lend ─▶ memory, send(memory) ─▶ Laid   or   pack(data) ─▶ Packed
    receiver    Unpacker.lay_out(laid)                  or   Unpacker.unpack(packed)
                Unpacker.returned() ─▶ Shelf.take_back

A slab belongs to the receiver while an array over it lives there. One that the receiver
keeps for long is given away: both sides let go of it, and its arrays live on.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...system.descriptors import descriptors_left
from ..batch.layout import ALIGN, Layout, block_bytes
from .handover import (
    Array,
    Laid,
    Packed,
    PartPickler,
    Returned,
    address_of,
    copied,
    part_of,
    plain_dumps,
)
from .slabs import Slab, allocate_on, whole_pages

__all__ = ["Shelf"]

KEPT_FREE = 16
"""Descriptors that batches leave to the user. Without a slab, batches travel through
the pipe."""


@dataclass(slots=True, eq=False)
class Shelved:
    """A slab, and the memory of a batch in it."""

    slab: Slab
    layout: Layout | None = None
    """None: it is for copies."""
    rows: int = 0
    memory: Any = None
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
        self._room = 0
        """Bytes of a slab for copies; the same for data of similar size."""
        self._lock = threading.Lock()

    def lend(self, layout: Layout, rows: int) -> Any:
        """Return memory for a batch of a solid layout.

        Raises:
            OSError: there is no shared memory for it, or no descriptor.
        """

        def fits(place: Shelved) -> bool:
            return place.layout == layout and place.rows == rows

        with self._lock:
            place = self._find(fits, copies=False)
            if place is None:
                slab = self._slab(block_bytes(layout, rows))
                allocate, _ = allocate_on(slab.block)
                place = Shelved(slab, layout, rows, layout.open(rows, allocate))
            self._lent[id(place.memory)] = place
        return place.memory

    def has(self, memory: Any) -> bool:
        """Whether this memory is lent."""
        place = self._lent.get(id(memory))
        return place is not None and place.memory is memory

    def send(self, memory: Any) -> tuple[Laid, tuple[int, ...]]:
        """Return a batch made in lent memory as it is sent, with its descriptor.

        Raises:
            Exception: whatever pickling a class that the layout names raises.
        """
        with self._lock:
            place = self._lent[id(memory)]
            if place.layout is not self._layout:
                try:
                    plain_dumps(place.layout)
                except Exception:
                    self._free.append(self._lent.pop(id(memory)))
                    raise
            del self._lent[id(memory)]
            descriptors, forget = self._hand_over(place)
            told = None if place.layout is self._layout else place.layout
            self._layout = place.layout
        slab = place.slab
        laid = Laid(slab.key, slab.nbytes, bool(descriptors), told, place.rows, forget)
        return laid, descriptors

    def pack(self, data: Any) -> tuple[Packed, tuple[int, ...]]:
        """Return any data as it is sent, its arrays copied, and a descriptor.

        Raises:
            OSError: there is no shared memory for the copies, or no descriptor.
            Exception: whatever pickling the rest of the data raises.
        """
        file = io.BytesIO()
        pickler = PartPickler(file)
        pickler.dump(data)
        arrays = pickler.arrays
        if not arrays:
            return Packed(file.getvalue(), (), (), ()), ()
        with self._lock:
            place = self._place(arrays)
            slab = place.slab
            allocate, _ = allocate_on(slab.block)
            parts = []
            for array in arrays:
                copy = copied(array, allocate((array.nbytes,), torch.uint8))
                parts.append(part_of(copy, slab.key, address_of(copy) - slab.address))
            descriptors, forget = self._hand_over(place)
        new = ((slab.key, slab.nbytes),) if descriptors else ()
        return Packed(file.getvalue(), tuple(parts), new, forget), descriptors

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

    def _place(self, arrays: list[Array]) -> Shelved:
        """Return a slab with room for copies of these arrays."""
        room = sum(-(-array.nbytes // ALIGN) * ALIGN for array in arrays)
        if not room <= self._room <= 2 * room:
            self._room = room + room // 8
        size = whole_pages(self._room)
        found = self._find(lambda place: place.slab.nbytes == size, copies=True)
        return found or Shelved(self._slab(size))

    def _find(self, fits: Callable[[Shelved], bool], *, copies: bool) -> Shelved | None:
        """Take a free slab that fits; drop all of its kind if none does."""
        alike = [place for place in self._free if (place.layout is None) == copies]
        for place in alike:
            if fits(place):
                self._free.remove(place)
                return place
        self._drop(alike)
        self._free = [place for place in self._free if place not in alike]
        return None

    def _slab(self, nbytes: int) -> Slab:
        if descriptors_left() < KEPT_FREE:
            text = f"the last {KEPT_FREE} file descriptors are reserved for other uses"
            raise OSError(errno.EMFILE, text)
        self._made += 1
        return Slab(self._made, whole_pages(nbytes))

    def _hand_over(self, place: Shelved) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Give a slab to the receiver; return a new descriptor, and what to forget."""
        slab = place.slab
        descriptors = () if place.sent else (slab.descriptor,)
        place.sent = True
        self._out[slab.key] = place
        if len(self._out) > self._keep:
            self._drop([self._out.pop(next(iter(self._out)))])
        forget, self._forget = tuple(self._forget), []
        return descriptors, forget

    def _drop(self, places: list[Shelved]) -> None:
        for place in places:
            place.slab.give_away()
            if place.sent:
                self._forget.append(place.slab.key)

    def __repr__(self) -> str:
        return f"<Shelf: {len(self._lent)} lent, {len(self._out)} out>"
