"""Slabs: batches in shared memory without a name, used again and again.

A slab is a shared file, mapped by the worker process that writes to it and by the
trainer, to which its descriptor is sent once.

    sender      Shelf.lend ─▶ memory, send(memory) ─▶ Sent   or   pack(data) ─▶ Sent
    receiver    Unpacker.receive(sent) ─▶ data
                Unpacker.returned() ─▶ Shelf.take_back

Torch takes longer to make a few tensors than anything else about a small batch. A
solid layout says where each of them lies in a slab, in any process. So a batch of such
a layout travels as the number of its slab, which waits at the sender, open, for the
next batch. The arrays of any other data are copied into one slab, and the rest of it is
pickled.

A slab belongs to the receiver while an array over it lives there. One that the receiver
keeps for long is given away: both sides let go of it, and its arrays live on.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...system.descriptors import descriptors_left
from ...system.shared_memory import shared_file
from ..batch.layout import ALIGN, Allocate, Layout, block_bytes
from .handover import flattened, loads, plain_dumps

# Descriptors that batches leave to the user. Without a slab, batches travel through the
# pipe.
LEFT_TO_USER = 16
Block = ctypes.Array[ctypes.c_uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


# Everything that this process has mapped, by address.
_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()


def map_shared(descriptor: int, nbytes: int) -> Block:
    """Map a descriptor; unmapped when the block and all arrays over it are gone.

    Not by `mmap.mmap`, which keeps a duplicate of the descriptor open until then.

    Raises:
        OSError: there is no memory for it.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), f"mapping {nbytes} bytes")
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False
    _blocks[address] = block
    return block


def block_at(address: int) -> Block | None:
    """Return the block, mapped here by `map_shared`, that an address is in, or None."""
    for ref in _blocks.valuerefs():  # a copy: other threads may map meanwhile
        block = ref()
        if block is None:
            continue
        if 0 <= address - ctypes.addressof(block) < ctypes.sizeof(block):
            return block
    return None


def allocate_on(block: Block) -> tuple[Allocate, NDArray[np.uint8]]:
    """Return an allocator that cuts `block` into tensors from its start, and its array.

    The array lives as long as any tensor made on it: its own base is not an array, so
    numpy makes it, and not the block, the base of all its views. The same calls yield
    the same places in every process that maps the same slab.
    """
    place = 0
    memory = np.frombuffer(memoryview(block), np.uint8)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal place
        count, start = math.prod(shape), place
        place += -(-dtype.itemsize * count // ALIGN) * ALIGN
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        line = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        return line if len(shape) == 1 else line.view(shape)

    return allocate, memory


class Slab:
    """One block of shared memory.

    Args:
        key: its number among those of one sender.
        nbytes: its size.
        layout: the layout of the batches in it; None: it is for copies.
        rows: how many rows they have.

    Raises:
        OSError: there is no memory for it, or no file descriptor.
    """

    def __init__(
        self, key: int, nbytes: int, layout: Layout | None = None, rows: int = 0
    ) -> None:
        self.key, self.nbytes = key, nbytes
        self.layout, self.rows = layout, rows
        # Whether the receiver has its descriptor.
        self.sent = False
        # The open memory of a batch in it.
        self.memory: Any = None
        self.descriptor = shared_file("penstock", nbytes)
        try:
            self.block = map_shared(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise


class Sent(NamedTuple):
    """Data as it is sent: a batch in a slab, or pickled, with its arrays in a slab."""

    body: bytes | None
    """The data, pickled, without the memory of its arrays; None: it is a batch."""
    lengths: tuple[int, ...] = ()
    """Bytes of each array in the slab; if there are none, there is no slab."""
    key: int = 0
    size: int = 0
    """Bytes of the slab."""
    new: bool = False
    """Whether the slab's descriptor comes with this message, and what is in it."""
    layout: Layout | None = None
    """Layout of the batches in a new slab; None: it is for copies."""
    rows: int = 0
    """How many rows they have."""
    forget: tuple[int, ...] = ()
    """Keys of slabs that will not be used again."""

    @property
    def nbytes(self) -> int:
        """Bytes that the data takes, about."""
        return self.size if self.body is None else len(self.body) + sum(self.lengths)


# Keys of slabs that a receiver no longer claims, as all arrays over them have died:
# those that may be reused, and those that must not, as a fork has shared them.
Returned = tuple[tuple[int, ...], tuple[int, ...]]


class Unpacker:
    """The receiver's side."""

    def __init__(self) -> None:
        # By key, with the layout of the batches in it, and how many rows they have.
        self._slabs: dict[int, tuple[Block, Layout | None, int]] = {}
        self._marks: dict[int, SlabMark] = {}
        self._dead_marks: deque[SlabMark] = deque()
        self._shared_keys: set[int] = set()
        _unpackers.add(self)

    def receive(self, sent: Sent, descriptors: deque[int]) -> Any:
        """Return the data; consumes the descriptor that came with it.

        Raises:
            OSError: there is no memory to map a new slab.
            Exception: whatever unpickling the data raises.
        """
        if sent.body is not None and not sent.lengths:
            return loads(sent.body)
        for key in sent.forget:
            self._slabs.pop(key, None)
        if sent.new:
            descriptor = descriptors.popleft()
            try:
                block = map_shared(descriptor, sent.size)
                self._slabs[sent.key] = block, sent.layout, sent.rows
            finally:
                os.close(descriptor)
        block, layout, rows = self._slabs[sent.key]
        allocate, memory = allocate_on(block)
        # The callback is pure C: one in Python could swallow a Ctrl-C.
        mark = self._marks[sent.key] = SlabMark(memory, self._dead_marks.append)
        mark.key = sent.key
        if sent.body is None:
            assert layout is not None
            return layout.seal(layout.open(rows, allocate))
        return loads(sent.body, [memory[span] for span in spans(sent.lengths)])

    def returned(self) -> Returned:
        """Return the slabs whose claim has ended since the last call."""
        dead_keys: list[int] = []
        shared_keys: list[int] = []
        while self._dead_marks:
            key = self._dead_marks.popleft().key
            del self._marks[key]
            (shared_keys if key in self._shared_keys else dead_keys).append(key)
        self._shared_keys -= set(shared_keys)
        return tuple(dead_keys), tuple(shared_keys)

    def share(self) -> None:
        """Note that a fork is about to share what has been received."""
        self._shared_keys.update(tuple(self._marks))


_unpackers: weakref.WeakSet[Unpacker] = weakref.WeakSet()


def _share_all() -> None:
    for unpacker in list(_unpackers):
        unpacker.share()


os.register_at_fork(before=_share_all, after_in_child=_unpackers.clear)


class SlabMark(weakref.ref[NDArray[np.uint8]]):
    """Notices when all arrays over a slab have died."""

    __slots__ = ("key",)
    key: int


def spans(lengths: Iterable[int]) -> Iterator[slice]:
    """Yield where arrays of these lengths, in bytes, lie in a slab."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += -(-length // ALIGN) * ALIGN


# The sender


class Shelf:
    """Slabs for one receiver. The lock guards everything.

    Args:
        keep: most slabs that the receiver may hold; the oldest ones beyond that are
            given away.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: list[Slab] = []
        # By the identity of their memory, while batches are made in them.
        self._lent: dict[int, Slab] = {}
        # By key, those that the receiver holds, the oldest first.
        self._out: dict[int, Slab] = {}
        self._forget: list[int] = []
        self._keys = itertools.count(1)
        # Bytes of a slab for copies; the same for data of similar size.
        self._room = 0
        self._lock = threading.Lock()

    def lend(self, layout: Layout, rows: int) -> Any:
        """Return memory for a batch of a solid layout.

        Raises:
            OSError: there is no shared memory for it, or no descriptor.
        """
        with self._lock:
            slab = self._slab(layout, rows, block_bytes(layout, rows))
            if slab.memory is None:
                slab.memory = layout.open(rows, allocate_on(slab.block)[0])
            self._lent[id(slab.memory)] = slab
        return slab.memory

    def send(self, memory: Any) -> tuple[Sent, tuple[int, ...]] | None:
        """Return a batch made in lent memory as it is sent, with its descriptor.

        None if this memory was not lent.

        Raises:
            Exception: whatever pickling a class that the layout names raises; the
                memory is still lent.
        """
        with self._lock:
            slab = self._lent.get(id(memory))
            if slab is None:
                return None
            if not slab.sent:
                plain_dumps(slab.layout)
            del self._lent[id(memory)]
            return self._hand_over(slab, None)

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
        room = sum(-(-length // ALIGN) * ALIGN for length in lengths)
        with self._lock:
            if not room <= self._room <= 2 * room:
                self._room = room + room // 8
            slab = self._slab(None, 0, self._room)
            _, memory = allocate_on(slab.block)
            for array, span in zip(arrays, spans(lengths), strict=True):
                memory[span] = array  # without the GIL
            return self._hand_over(slab, body, lengths)

    def put_back(self, memory: Any) -> None:
        """Note that a batch made in this memory, if it was lent, is not sent."""
        with self._lock:
            slab = self._lent.pop(id(memory), None)
            if slab is not None:
                self._free.append(slab)

    def take_back(self, returned: Returned) -> None:
        """Reuse the slabs that the receiver has let go, but none shared by a fork."""
        dead_keys, shared_keys = returned
        with self._lock:  # those given away meanwhile are not there
            self._free += [self._out.pop(key) for key in dead_keys if key in self._out]
            self._drop([self._out.pop(key) for key in shared_keys if key in self._out])

    def _slab(self, layout: Layout | None, rows: int, nbytes: int) -> Slab:
        """Return a free slab for this; drop all of its kind if there is none."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages
        alike = [s for s in self._free if (s.layout is None) == (layout is None)]
        for slab in alike:
            if (slab.layout, slab.rows, slab.nbytes) == (layout, rows, size):
                self._free.remove(slab)
                return slab
        self._drop(alike)
        self._free = [slab for slab in self._free if slab not in alike]
        if descriptors_left() < LEFT_TO_USER:
            raise OSError(
                errno.EMFILE,
                f"the last {LEFT_TO_USER} file descriptors are reserved for other uses",
            )
        return Slab(next(self._keys), size, layout, rows)

    def _hand_over(
        self, slab: Slab, body: bytes | None, lengths: tuple[int, ...] = ()
    ) -> tuple[Sent, tuple[int, ...]]:
        """Give a slab to the receiver; return what is sent, and a new descriptor."""
        new, slab.sent = not slab.sent, True
        self._out[slab.key] = slab
        if len(self._out) > self._keep:
            self._drop([self._out.pop(next(iter(self._out)))])
        forget, self._forget = tuple(self._forget), []
        return Sent(
            body,
            lengths,
            key=slab.key,
            size=slab.nbytes,
            new=new,
            layout=slab.layout if new else None,
            rows=slab.rows if new else 0,
            forget=forget,
        ), (slab.descriptor,) if new else ()

    def _drop(self, slabs: list[Slab]) -> None:
        for slab in slabs:
            os.close(slab.descriptor)  # the memory lives on while arrays use it
            if slab.sent:
                self._forget.append(slab.key)
