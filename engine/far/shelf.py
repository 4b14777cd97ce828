"""Slabs in which a worker process makes batches, or copies what it sends into.

Torch takes longer to make a few tensors than anything else about a small batch. A
solid layout says where each of them lies in a slab, in any process. So a batch of such
a layout travels as its slab and the layout, and the slab waits here, open, for the next
one. The arrays of any other data are copied into one slab, and the rest of it is
pickled: it comes from our own process, over our own pipe.

    sender      lend ─▶ memory, send(memory) ─▶ Sent   or   pack(data) ─▶ Sent
    receiver    Unpacker.receive(sent)
                Unpacker.returned() ─▶ Shelf.take_back

A slab belongs to the receiver while an array over it lives there. One that the receiver
keeps for long is given away: both sides let go of it, and its arrays live on.
"""

from __future__ import annotations

import errno
import threading
from typing import Any

from ...system.descriptors import descriptors_left
from ..batch.layout import ALIGN, Layout, block_bytes
from .handover import Returned, Sent, flattened, plain_dumps, spans
from .slabs import Slab, allocate_on, whole_pages

KEPT_FREE = 16
"""Descriptors that batches leave to the user. Without a slab, batches travel through
the pipe."""


class Shelf:
    """Slabs for one receiver. The lock guards everything.

    Args:
        keep: most slabs that the receiver may hold; the oldest ones beyond that are
            given away.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: list[Slab] = []
        self._lent: dict[int, Slab] = {}
        """By the identity of their memory, while batches are made in them."""
        self._out: dict[int, Slab] = {}
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
        with self._lock:
            slab = self._find(layout, rows)
            if slab is None:
                slab = self._slab(block_bytes(layout, rows), layout, rows)
                allocate, _ = allocate_on(slab.block)
                slab.memory = layout.open(rows, allocate)
            self._lent[id(slab.memory)] = slab
        return slab.memory

    def has(self, memory: Any) -> bool:
        """Whether this memory is lent."""
        slab = self._lent.get(id(memory))
        return slab is not None and slab.memory is memory

    def send(self, memory: Any) -> tuple[Sent, tuple[int, ...]]:
        """Return a batch made in lent memory as it is sent, with its descriptor.

        Raises:
            Exception: whatever pickling a class that the layout names raises; the
                memory is still lent.
        """
        with self._lock:
            slab = self._lent[id(memory)]
            layout = None if slab.layout is self._layout else slab.layout
            if layout is not None:
                plain_dumps(layout)
            del self._lent[id(memory)]
            self._layout = slab.layout
            place, descriptors = self._hand_over(slab)
        return Sent(None, (), layout, slab.rows, *place), descriptors

    def pack(self, data: Any) -> tuple[Sent, tuple[int, ...]]:
        """Return any data as it is sent, its arrays copied, and a descriptor.

        Raises:
            OSError: there is no shared memory for the copies, or no descriptor.
            Exception: whatever pickling the rest of the data raises.
        """
        body, arrays = flattened(data)
        if not arrays:
            return Sent(body), ()
        lengths = tuple(array.nbytes for array in arrays)
        with self._lock:
            slab = self._place(lengths)
            _, memory = allocate_on(slab.block)
            for array, span in zip(arrays, spans(lengths), strict=True):
                memory[span] = array  # without the GIL
            place, descriptors = self._hand_over(slab)
        return Sent(body, lengths, None, 0, *place), descriptors

    def put_back(self, memory: Any) -> None:
        """Note that a batch made in this memory, if it was lent, is not sent."""
        with self._lock:
            slab = self._lent.pop(id(memory), None)
            if slab is not None:
                self._free.append(slab)

    def take_back(self, returned: Returned) -> None:
        """Reuse the slabs that the receiver has let go, but none shared by a fork."""
        with self._lock:
            for key in returned.died:
                if key in self._out:
                    self._free.append(self._out.pop(key))
            shared = (self._out.pop(key, None) for key in returned.shared)
            self._drop([slab for slab in shared if slab is not None])

    def _place(self, lengths: tuple[int, ...]) -> Slab:
        """Return a slab with room for copies of arrays of so many bytes."""
        room = sum(-(-length // ALIGN) * ALIGN for length in lengths)
        if not room <= self._room <= 2 * room:
            self._room = room + room // 8
        size = whole_pages(self._room)
        return self._find(None, size) or self._slab(size, None, size)

    def _find(self, layout: Layout | None, rows: int) -> Slab | None:
        """Take a free slab for this; drop all of its kind if there is none."""
        alike = [s for s in self._free if (s.layout is None) == (layout is None)]
        for slab in alike:
            if slab.layout == layout and slab.rows == rows:
                self._free.remove(slab)
                return slab
        self._drop(alike)
        self._free = [slab for slab in self._free if slab not in alike]
        return None

    def _slab(self, nbytes: int, layout: Layout | None, rows: int) -> Slab:
        if descriptors_left() < KEPT_FREE:
            text = f"the last {KEPT_FREE} file descriptors are reserved for other uses"
            raise OSError(errno.EMFILE, text)
        self._made += 1
        return Slab(self._made, whole_pages(nbytes), layout, rows)

    def _hand_over(
        self, slab: Slab
    ) -> tuple[tuple[int, int, bool, tuple[int, ...]], tuple[int, ...]]:
        """Give a slab to the receiver; return how to find it, and a new descriptor."""
        new, slab.sent = not slab.sent, True
        self._out[slab.key] = slab
        if len(self._out) > self._keep:
            self._drop([self._out.pop(next(iter(self._out)))])
        forget, self._forget = tuple(self._forget), []
        descriptors = (slab.descriptor,) if new else ()
        return (slab.key, slab.nbytes, new, forget), descriptors

    def _drop(self, slabs: list[Slab]) -> None:
        for slab in slabs:
            slab.give_away()
            if slab.sent:
                self._forget.append(slab.key)
