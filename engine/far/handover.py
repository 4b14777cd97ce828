"""What is sent between our processes, pickled: messages, exceptions and programs.

    messages     dumps ─▶ loads, over our own pipe; flattened ─▶ restored, through Ray
    exceptions   travel, then as part of a message
    programs     pack ─▶ loads, to interpreters that are not forked from the trainer

Programs are sent by cloudpickle: functions and classes of the program's own file,
lambdas and closures travel by value. If something in them cannot be sent, the error
names it as user code would.
"""

from __future__ import annotations

import io
import mmap
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ExitError, SpecError, WorkerError, set_on, users_frames
from ...system.printing import name_of
from ..program.program import Filter, Map, Read, ReadOn
from ..witness.reach import ObjectPart, walk

# Pickling a numpy array below this size is faster than placing it.
WORTH_BYTES = 4096

# By itemsize: a dtype that copies bits unchanged.
BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


class Pickler(pickle.Pickler):
    """Pickles plain tensors by their bytes, and arrays so that they may be written to.

    torch's own way does not support all dtypes, takes longer, and keeps each sparse
    tensor for as long as the process lives.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return the parts of an array or a tensor."""
        if type(obj) is np.ndarray:
            if obj.nbytes < WORTH_BYTES:
                return obj.__reduce_ex__(4)  # the last one that includes its memory
            if not obj.flags.writeable:
                return obj.copy("K").__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(obj) is not torch.Tensor:
            return NotImplemented
        if is_dense(obj):
            fills_its_memory = obj.is_contiguous() or (
                obj.stride() == torch.empty_like(obj, device="meta").stride()
            )
            if not fills_its_memory:
                place = torch.empty(obj.nbytes, dtype=torch.uint8, device="cpu")
                obj = copied(obj, place.view(obj.dtype))
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


def loads(
    body: bytes | bytearray | memoryview | mmap.mmap, apart: Iterable[Any] = ()
) -> Any:
    """Return what `dumps` or `pack` packed. It came from a process of our own.

    Args:
        body: the bytes.
        apart: the memory of each array that is not among them.

    Raises:
        Exception: whatever unpickling the user's objects raises.
    """
    return pickle.loads(body, buffers=apart)  # noqa: S301 from our own process


# A message that another machine can receive as it is: pickled without the memory of its
# arrays, and the memory of each.
Flat = tuple[bytes, list[NDArray[np.uint8]]]


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
    return loads(body, map(bytearray, arrays))


def _tensor(
    memory: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    line = torch.frombuffer(memory, dtype=dtype)
    return line if stride == (1,) else line.as_strided(shape, stride)


def _coordinates(*parts: Any) -> torch.Tensor:
    # A function of a module: to pickle a partial would take twice as long.
    indices, values, shape, coalesced = parts
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=False, is_coalesced=coalesced
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


def copied(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Copy a dense tensor into memory of its size and dtype; keep its memory layout.

    This takes one core, whatever torch's threads are.
    """
    stride = torch.empty_like(tensor, device="meta").stride()
    place = memory.as_strided(tensor.shape, stride)
    as_bits = BITS[tensor.itemsize]  # torch cannot copy all its dtypes
    np.copyto(place.view(as_bits).numpy(), tensor.view(as_bits).numpy())
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
    lines = traceback.format_exception(type(error), error, users_frames(error))
    try:
        copy = pickle.loads(dumps(error))  # noqa: S301 our own exception
    except Exception:  # noqa: BLE001 whatever it raises, it cannot travel
        copy = None
    if type(copy) is not type(error):
        error = _quoting(WorkerError, error)
    return Travelling(error, "".join(lines))


def _arrived(error: BaseException, text: str) -> BaseException:
    """Return the exception; what would end this program becomes an `ExitError`."""
    if not isinstance(error, Exception):
        error = _quoting(ExitError, error, "a sample's function raised ")
    set_on(error, "__cause__", RemoteTraceback(text))
    return error


def _quoting(kind: type[Exception], error: BaseException, text: str = "") -> Exception:
    """Return another error that quotes one, as far as it can say what it is."""
    text += type(error).__qualname__
    with suppress(Exception):  # whatever its `__str__` raises
        text += f": {error}"
    other = kind(text)
    set_on(other, "__notes__", list(getattr(error, "__notes__", [])))
    return other


# Programs


FORKED = 'options(multiprocessing_context="fork")'
# What `__main__` is called in a process that multiprocessing did not fork.
SPAWNED_MAIN = "__mp_main__"


def pack(thing: Any, name: str, elsewhere: str = FORKED) -> bytes:
    """Return `thing`, which errors call `name`, as bytes.

    Args:
        thing: what to pack.
        name: its name in errors.
        elsewhere: the setting with which it need not be sent.

    Raises:
        SpecError: it holds something that cannot be sent; names the innermost part.
    """
    body = io.BytesIO()
    try:
        program_pickler()(body, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    except Exception as error:
        raise SpecError(_explain(_obstacle(thing, name), error, elsewhere)) from error
    return body.getvalue()


class OnGpu(pickle.PicklingError):
    """A tensor is on a GPU, which a copy of it would open in every worker."""


@cache
def program_pickler() -> Any:
    """Return the pickler class: cloudpickle's, but refusing tensors on a GPU.

    If its objects have a list `objects`, they add to it whatever they begin to pickle.
    """
    import cloudpickle

    if SPAWNED_MAIN in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[SPAWNED_MAIN])

    def reducer_override(self: Any, thing: Any) -> Any:
        if self.objects is not None:
            self.objects.append(thing)
        if isinstance(thing, torch.Tensor) and thing.is_cuda:
            raise OnGpu(f"it is on {thing.device}")
        return cloudpickle.Pickler.reducer_override(self, thing)

    return type(
        "Pickler",
        (cloudpickle.Pickler,),
        {"reducer_override": reducer_override, "objects": None},
    )


def _obstacle(thing: Any, name: str) -> ObjectPart:
    """Return the innermost part of `thing` that cannot be sent, and its path.

    That is what pickling began last: what a class holds back is not to blame.
    """
    pickler = program_pickler()(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
    pickler.objects = []
    with suppress(Exception):  # the same again
        pickler.dump(thing)
    whole = ObjectPart(name, thing)
    named_parts = [whole, *_given(thing)]
    parts = {
        id(p.thing): p for root in named_parts for p in walk(root.thing, root.path)
    }
    last = parts.get(id(pickler.objects[-1])) if pickler.objects else None
    roots = {id(root.thing): root for root in named_parts}
    inside = (
        roots[id(item)] for item in reversed(pickler.objects) if id(item) in roots
    )
    return last or next(inside, whole)


def _given(thing: Any) -> Iterator[ObjectPart]:
    """Yield the user's objects in operations within `thing`, under the user's names."""
    for part in walk(thing, ""):
        match part.thing:
            case Read(get=get):
                yield ObjectPart("dataset", getattr(get, "__self__", get))
            case ReadOn(dataset=dataset):
                yield ObjectPart("dataset", dataset)
            case Map(function=function) | Filter(predicate=function):
                yield ObjectPart(name_of(function), function)


def _explain(obstacle: ObjectPart, error: Exception, elsewhere: str) -> str:
    kind = type(obstacle.thing)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if isinstance(error, OnGpu):
        cure = (
            "keep it on the CPU (.cpu()) and let .to_device() copy the batches, or use "
            'executor="thread"'
        )
    else:
        cure = (
            "create it when it is first used (drop it in __getstate__), or use "
            f'{elsewhere}, or executor="thread"'
        )
    return (
        f"`{obstacle.path}` (a {name}) cannot be sent to worker processes that are "
        f"not forked from the trainer: {error}; {cure}"
    )
