"""Data between our processes: arrays in slabs, everything else pickled.

    sender      Shelf (shelf.py) ─▶ Sent, and the descriptor of a new slab
    receiver    Unpacker ─▶ data

Everything but arrays is pickled: it comes from our own process, over our own pipe.
`travel` makes exceptions fit for that.
"""

from __future__ import annotations

import io
import os
import pickle
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ExitError, WorkerError, set_on, users_frames
from ..batch.layout import ALIGN, Allocate, Layout
from .slabs import Block, allocate_on, map_shared

WORTH_BYTES = 4096
"""Pickling a numpy array below this size is faster than placing it."""
WITH_DATA = 4
"""The last protocol of pickle in which an array comes with its memory."""

BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By itemsize: a dtype that copies bits unchanged."""


class Sent(NamedTuple):
    """Data as it is sent: a batch in a slab, or pickled, with its arrays in a slab."""

    body: bytes | None
    """The data, pickled, without the memory of its arrays; None: it is a batch."""
    lengths: tuple[int, ...] = ()
    """Bytes of each array in the slab; if there are none, there is no slab."""
    layout: Layout | None = None
    """Layout of the batch; None: the same as before."""
    rows: int = 0
    key: int = 0
    size: int = 0
    """Bytes of the slab."""
    new: bool = False
    """Whether the slab's descriptor comes with this message."""
    forget: tuple[int, ...] = ()
    """Keys of slabs that will not be used again."""

    @property
    def nbytes(self) -> int:
        """Bytes that the data takes, about."""
        return self.size if self.body is None else len(self.body) + sum(self.lengths)


class Returned(NamedTuple):
    """Slabs that a receiver no longer claims."""

    died: tuple[int, ...]
    """Keys of slabs whose arrays have died: they may be reused."""
    shared: tuple[int, ...]
    """Keys of slabs that a fork has shared with others: they must not be reused."""


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

    def receive(self, sent: Sent, descriptors: deque[int]) -> Any:
        """Return the data; consumes the descriptor that came with it.

        Raises:
            Exception: whatever unpickling the data raises.
        """
        buffers = []
        if sent.body is None:
            # First, as later messages rely on it, and the memory may be refused.
            self._layout = layout = sent.layout or self._layout
            allocate, _ = self._open(sent, descriptors)
            assert layout is not None
            return layout.seal(layout.open(sent.rows, allocate))
        if sent.lengths:
            _, memory = self._open(sent, descriptors)
            buffers = [memory[span] for span in spans(sent.lengths)]
        return pickle.loads(sent.body, buffers=buffers)  # noqa: S301 from our own

    def returned(self) -> Returned:
        """Return the slabs whose claim has ended since the last call."""
        died: list[int] = []
        shared: list[int] = []
        while self._died:
            key = self._died.popleft().key
            del self._marks[key]
            (shared if key in self._shared else died).append(key)
        self._shared -= set(shared)
        return Returned(tuple(died), tuple(shared))

    def share(self) -> None:
        """Note that a fork is about to share what has been received."""
        self._shared.update(tuple(self._marks))

    def _open(
        self, sent: Sent, descriptors: deque[int]
    ) -> tuple[Allocate, NDArray[np.uint8]]:
        """Return an allocator on a slab, and the array that it makes views of."""
        for key in sent.forget:
            self._blocks.pop(key, None)
        if sent.new:
            descriptor = descriptors.popleft()
            try:
                self._blocks[sent.key] = map_shared(descriptor, sent.size)
            finally:
                os.close(descriptor)
        allocate, memory = allocate_on(self._blocks[sent.key])
        # The callback is pure C: one in Python could swallow a Ctrl-C.
        mark = self._marks[sent.key] = SlabMark(memory, self._died.append)
        mark.key = sent.key
        return allocate, memory


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
    """Pickles plain tensors by their bytes, and arrays so that they may be written to.

    torch's own way does not support all dtypes, takes longer, and keeps each sparse
    tensor for as long as the process lives.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return the parts of an array or a tensor."""
        if type(obj) is np.ndarray:
            if obj.nbytes < WORTH_BYTES:
                return obj.__reduce_ex__(WITH_DATA)
            if not obj.flags.writeable:
                return obj.copy("K").__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(obj) is not torch.Tensor:
            return NotImplemented
        if is_dense(obj):
            if not is_compact(obj):
                obj = copied(obj, torch.empty(obj.nbytes, dtype=torch.uint8))
            line = obj.as_strided((obj.numel(),), (1,)).view(torch.uint8)
            memory = pickle.PickleBuffer(line.numpy())
            return _tensor, (memory, obj.dtype, tuple(obj.shape), obj.stride())
        if obj.layout is torch.sparse_coo:
            parts = obj._indices(), obj._values(), obj.shape  # noqa: SLF001 as they are
            return _coordinates, (*parts, obj.is_coalesced())
        return NotImplemented


def dumps(
    message: object, apart: Callable[[pickle.PickleBuffer], object] | None = None
) -> bytes:
    """Return a message as bytes, for `loads` in another process of ours.

    Args:
        message: what to pickle.
        apart: called with the memory of each array, which then is not among the bytes.
    """
    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=apart).dump(message)
    return file.getvalue()


def plain_dumps(message: object) -> bytes:
    """Return the same for a message that holds no tensor: pickle needs no help."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def loads(body: bytes | bytearray) -> Any:
    """Return what `dumps` packed. It came over a pipe of our own."""
    return pickle.loads(body)  # noqa: S301 from our own process


Flat = tuple[bytes, list[NDArray[np.uint8]]]
"""A message that another machine can receive as it is: pickled without the memory of
its arrays, and the memory of each."""


def flattened(message: object) -> Flat:
    """Return a message for `restored`; its arrays are not copied yet.

    Raises:
        Exception: whatever pickling the rest of the message raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = dumps(message, buffers.append)
    return body, [np.asarray(buffer.raw()) for buffer in buffers]


def restored(flat: Flat) -> Any:
    """Return the message; its arrays have memory of their own, and may be written to.

    Raises:
        Exception: whatever unpickling the rest of the message raises.
    """
    body, arrays = flat
    copies = map(bytearray, arrays)
    return pickle.loads(body, buffers=copies)  # noqa: S301 from an actor of ours


def spans(lengths: Iterable[int]) -> Iterator[slice]:
    """Yield where arrays of these lengths, in bytes, lie in a slab."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += -(-length // ALIGN) * ALIGN


def _tensor(
    memory: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    line = torch.frombuffer(memory, dtype=dtype)
    return line if stride == (1,) else line.as_strided(shape, stride)


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


def is_compact(tensor: torch.Tensor) -> bool:
    """Whether its elements fill its memory, in whatever order."""
    return tensor.is_contiguous() or (
        tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    )


def copied(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Copy a dense tensor into memory of its size; keep its memory layout."""
    stride = torch.empty_like(tensor, device="meta").stride()
    place = memory.view(tensor.dtype).as_strided(tensor.shape, stride)
    as_bits = BITS[tensor.itemsize]  # torch cannot copy all its dtypes
    place.view(as_bits).copy_(tensor.view(as_bits))
    return place


class RemoteTraceback(Exception):
    """The traceback of an exception raised in another process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Travelling(Exception):
    """An exception on its way to another process, where it arrives as itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, self.args


def travel(error: BaseException) -> Travelling:
    """Make an exception picklable; it arrives with its traceback as its cause.

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
        error = _with_notes(WorkerError(f"{type(error).__qualname__}: {error}"), error)
    return Travelling(error, text)


def _arrived(error: BaseException, text: str) -> BaseException:
    """Return the exception; what would end this program becomes an `ExitError`."""
    if not isinstance(error, Exception):
        left = f"a sample's function raised {type(error).__name__}: {error}"
        error = _with_notes(ExitError(left), error)
    set_on(error, "__cause__", RemoteTraceback(text))
    return error


def _with_notes(error: Exception, of: BaseException) -> Exception:
    set_on(error, "__notes__", list(getattr(of, "__notes__", [])))
    return error
