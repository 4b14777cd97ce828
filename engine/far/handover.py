"""Data between our processes: arrays in slabs, everything else pickled.

    sender      Shelf (shelf.py) ─▶ Laid or Packed, and the descriptor of a new slab
    receiver    Unpacker ─▶ data

Everything but arrays is pickled: it comes from our own process, over our own pipe.
`travel` makes exceptions fit for that.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ExitError, WorkerError, add_note, set_on, users_frames
from ..batch.layout import Layout
from .slabs import Block, allocate_on, map_shared

__all__ = [
    "Flat",
    "Laid",
    "Packed",
    "Pickler",
    "RemoteTraceback",
    "Returned",
    "Unpacker",
    "copied",
    "dumps",
    "flattened",
    "is_dense",
    "loads",
    "plain_dumps",
    "recall",
    "restored",
    "travel",
]

WORTH_BYTES = 4096
"""Pickling a numpy array below this size is faster than placing it."""

BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By itemsize: a dtype that copies bits unchanged."""

Array = torch.Tensor | NDArray[Any]


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


class ArrayPart(NamedTuple):
    """One array of the data."""

    key: int
    """The slab it lies in."""
    offset: int
    """Offset of its first byte there."""
    dtype: torch.dtype | np.dtype[Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """In elements; None for a numpy array, whose rows are contiguous."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.dtype.itemsize * math.prod(self.shape)


class Packed(NamedTuple):
    """Data ready to be sent."""

    body: bytes
    """The data without its arrays, pickled, with numbers in their places."""
    parts: tuple[ArrayPart, ...]
    new: tuple[tuple[int, int], ...]
    """Keys and sizes of slabs that the receiver has not mapped yet."""
    forget: tuple[int, ...]
    """Keys of slabs that will not be reused."""

    @property
    def nbytes(self) -> int:
        """Bytes that the data takes, about: those of its arrays, and the rest."""
        return len(self.body) + sum(part.nbytes for part in self.parts)


class Returned(NamedTuple):
    """Slabs that a receiver no longer claims."""

    died: tuple[int, ...]
    """Keys of slabs whose arrays have died: they may be reused."""
    shared: tuple[int, ...]
    """Keys of slabs that a fork has shared with others: they must not be reused."""

    def plus(self, others: Returned) -> Returned:
        """Return these and others."""
        return Returned(self.died + others.died, self.shared + others.shared)


NOTHING_RETURNED = Returned((), ())


class Unpacker:
    """The receiver's side."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._marks: dict[int, SlabMark] = {}
        self._died: deque[SlabMark] = deque()
        self._shared: set[int] = set()
        self._layout: Layout | None = None
        """The layout of the batch laid out last."""
        _unpackers.add(self)

    def unpack(self, packed: Packed, descriptors: deque[int]) -> Any:
        """Return the data; consumes the descriptors that came with it.

        Raises:
            Exception: whatever unpickling the rest of the data raises.
        """
        for key, nbytes in packed.new:
            self._map(key, nbytes, descriptors)
        memories = {key: self._open(key) for key in {part.key for part in packed.parts}}
        for key in packed.forget:
            self._blocks.pop(key, None)
        arrays = [array_of(part, memories[part.key]) for part in packed.parts]
        return PartUnpickler(packed.body, arrays).load()

    def lay_out(self, laid: Laid, descriptors: deque[int]) -> Any:
        """Return a batch that lies in a slab as its layout says."""
        # First what later messages rely on, as the memory may be refused.
        self._layout = layout = laid.layout or self._layout
        for old in laid.forget:
            self._blocks.pop(old, None)
        key = laid.key
        if laid.new:
            self._map(key, laid.nbytes, descriptors)
        assert layout is not None
        allocate, memory = allocate_on(self._blocks[key])
        self._mark(key, memory)
        return layout.seal(layout.open(laid.rows, allocate))

    def returned(self) -> Returned:
        """Return the slabs whose claim has ended since the last call."""
        died: list[int] = []
        shared: list[int] = []
        while self._died:
            mark = self._died.popleft()
            if self._marks.get(mark.key) is mark:  # otherwise it was received again
                del self._marks[mark.key]
                (shared if mark.key in self._shared else died).append(mark.key)
        self._shared -= set(shared)
        return Returned(tuple(died), tuple(shared))

    def share(self) -> None:
        """Note that a fork is about to share what has been received."""
        self._shared.update(tuple(self._marks))

    def _open(self, key: int) -> NDArray[np.uint8]:
        """Return the array over a slab that all arrays in it are views of."""
        known = self._marks.get(key)
        memory = None if known is None else known()
        if memory is None:
            memory = np.frombuffer(memoryview(self._blocks[key]), np.uint8)
            self._mark(key, memory)
        return memory

    def _map(self, key: int, nbytes: int, descriptors: deque[int]) -> None:
        descriptor = descriptors.popleft()
        try:
            self._blocks[key] = map_shared(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _mark(self, key: int, memory: NDArray[np.uint8]) -> None:
        # The callback is pure C: one in Python could swallow a Ctrl-C.
        mark = self._marks[key] = SlabMark(memory, self._died.append)
        mark.key = key


_unpackers: weakref.WeakSet[Unpacker] = weakref.WeakSet()


def _share_all() -> None:
    for unpacker in list(_unpackers):
        unpacker.share()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_share_all, after_in_child=_unpackers.clear)


class SlabMark(weakref.ref[NDArray[np.uint8]]):
    """Notices when all arrays over a slab have died."""

    __slots__ = ("key",)
    key: int


class Pickler(pickle.Pickler):
    """Pickles plain tensors by their bytes.

    torch's own way does not support all dtypes, takes longer, and keeps each sparse
    tensor for as long as the process lives.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return the parts of a tensor."""
        if type(obj) is not torch.Tensor:
            return NotImplemented
        if is_dense(obj):
            if obj.is_contiguous():
                memory = obj.reshape(-1).view(torch.uint8)
            else:
                memory = torch.empty(obj.nbytes, dtype=torch.uint8)
                obj = copied(obj, memory)
            return array_of, (part_of(obj, 0, 0), memory.numpy())
        if obj.layout is torch.sparse_coo:
            parts = obj._indices(), obj._values(), obj.shape  # noqa: SLF001 as they are
            return _coordinates, (*parts, obj.is_coalesced())
        return NotImplemented


class PartPickler(Pickler):
    """Collects arrays in `arrays`, and writes their numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arrays: list[Array] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of an array that is sent separately, or None."""
        if not (is_dense(obj) or is_large(obj)):
            return None
        number = self._numbers.setdefault(id(obj), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(obj)
        return number


class PartUnpickler(pickle.Unpickler):
    """Restores the arrays to their places."""

    def __init__(self, body: bytes, arrays: list[Array]) -> None:
        super().__init__(io.BytesIO(body))
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Array:
        """Return the array with this number."""
        array: Array = self._arrays[pid]
        return array


def dumps(message: object) -> bytes:
    """Return a message as bytes, for `loads` in another process of ours."""
    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()


def plain_dumps(message: object) -> bytes:
    """Return the same for a message that holds no tensor: pickle needs no help."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def loads(body: bytes | bytearray) -> Any:
    """Return what `dumps` packed. It came over a pipe of our own."""
    return pickle.loads(body)  # noqa: S301 from our own process


class Flat(NamedTuple):
    """A message as one block of bytes, which another machine can receive as it is."""

    sizes: tuple[int, ...]
    """Bytes of its pickled body, and of each of its arrays."""
    block: NDArray[np.uint8]
    """`uint8 [sum(sizes)]`"""


def flattened(message: object) -> Flat:
    """Return a message for `restored`; each of its arrays is copied once.

    Raises:
        Exception: whatever pickling the rest of the message raises.
    """
    file, arrays = io.BytesIO(), list[pickle.PickleBuffer]()
    Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=arrays.append).dump(message)
    parts = [file.getbuffer(), *(array.raw() for array in arrays)]
    sizes = tuple(part.nbytes for part in parts)
    block = np.empty(sum(sizes), np.uint8)
    for part, place in zip(parts, cut(block, sizes), strict=True):
        place[:] = part
    return Flat(sizes, block)


def restored(flat: Flat) -> Any:
    """Return the message; its arrays have memory of their own, and may be written to.

    Raises:
        Exception: whatever unpickling the rest of the message raises.
    """
    body, *arrays = cut(flat.block, flat.sizes)
    copies = map(bytearray, arrays)
    return pickle.loads(body, buffers=copies)  # noqa: S301 from an actor of our own


def cut(block: NDArray[np.uint8], sizes: Sequence[int]) -> list[memoryview]:
    """Return consecutive parts of a block."""
    view, stops = block.data, list(accumulate(sizes))
    return [view[at - n : at] for at, n in zip(stops, sizes, strict=True)]


def _coordinates(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, *coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=False, is_coalesced=coalesced[0]
    )


def is_dense(value: Any) -> bool:
    """Whether it is a plain CPU tensor that its elements fully describe."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.numel() > 0
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_nested
        and not value.is_conj()
        and not value.is_neg()
        and not value.__dict__
    )


def is_large(value: Any) -> bool:
    """Whether it is a plain numpy array large enough to be sent separately."""
    return (
        type(value) is np.ndarray
        and value.nbytes >= WORTH_BYTES
        and not value.dtype.hasobject
        and value.flags.c_contiguous
    )


def address_of(array: Array) -> int:
    """Return the address of the first element; 0 if there is none."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    return int(array.ctypes.data)


def part_of(array: Array, key: int, offset: int) -> ArrayPart:
    """Describe an array that lies in a slab."""
    if isinstance(array, torch.Tensor):
        shape, stride = tuple(array.shape), tuple(array.stride())
        return ArrayPart(key, offset, array.dtype, shape, stride)
    return ArrayPart(key, offset, array.dtype, array.shape, None)


def copied(array: Array, memory: torch.Tensor) -> Array:
    """Copy an array into memory of its size; keep its memory layout if it is dense."""
    if isinstance(array, torch.Tensor):
        stride = torch.empty_like(array, device="meta").stride()
        place = memory.view(array.dtype).as_strided(array.shape, stride)
        as_bits = BITS[array.itemsize]  # torch cannot copy all its dtypes
        place.view(as_bits).copy_(array.view(as_bits))
        return place
    target = np.ndarray(array.shape, array.dtype, memory.numpy())
    target[...] = array
    return target


def array_of(part: ArrayPart, memory: NDArray[np.uint8]) -> Array:
    """Return the array that a part describes, over its slab's memory."""
    dtype = part.dtype
    if isinstance(dtype, np.dtype):
        array: Array = np.ndarray(part.shape, dtype, memory, part.offset)
        return array
    assert part.stride is not None
    span = 1
    for size, step in zip(part.shape, part.stride, strict=True):
        span += (size - 1) * step
    line = torch.frombuffer(memory, dtype=dtype, count=span, offset=part.offset)
    return line if part.stride == (1,) else line.as_strided(part.shape, part.stride)


TRACEBACK = "penstock: traceback in the worker process:\n"


class RemoteTraceback(Exception):
    """The traceback of an exception raised in another process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def travel(error: BaseException) -> BaseException:
    """In the sender: make an exception picklable, keeping its traceback as text.

    An exception that pickle does not restore as it was (many with arguments of their
    own are not) travels as a `WorkerError` that quotes it.
    """
    frames = users_frames(error)
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        copy = pickle.loads(dumps(error))  # noqa: S301 our own exception
    except Exception:  # noqa: BLE001 whatever it raises, it cannot travel
        copy = None
    if type(copy) is not type(error):
        notes = getattr(error, "__notes__", [])
        error = WorkerError(f"{type(error).__qualname__}: {error}")
        set_on(error, "__notes__", list(notes))
    set_on(error, "__cause__", None)
    set_on(error, "__context__", None)
    add_note(error, TRACEBACK + text)
    return error


def recall(error: BaseException) -> BaseException:
    """In the receiver: attach the sender's traceback to the exception, as its cause.

    What would end this program, as SystemExit does, becomes an `ExitError`.
    """
    if not isinstance(error, Exception):
        left = ExitError(f"a sample's function raised {type(error).__name__}: {error}")
        set_on(left, "__notes__", getattr(error, "__notes__", []))
        error = left
    notes = getattr(error, "__notes__", [])
    for note in [note for note in notes if note.startswith(TRACEBACK)]:
        notes.remove(note)
        set_on(error, "__cause__", RemoteTraceback(note.removeprefix(TRACEBACK)))
    return error
