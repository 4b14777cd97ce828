"""What several threads must not share, searched for in a dataset or a function.

Types are recognised by name, so no library is loaded to look for its objects. None of
the user's code runs: a property may open a file, a `__getattr__` may raise. Attributes
are read from where the interpreter keeps them, and containers by the built-in types'
own methods. The search is bounded, however large the object is.
"""

from __future__ import annotations

import ctypes
import enum
import io
import itertools
import logging
import mmap
import pathlib
import random
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

POSITION = "has one position, which every read moves"
HANDLE = "may be used by one thread at a time"
ITERATOR = "hands out what it holds once, in order"
STREAM = "draws from one stream, in order"
SEEKS = "moves the position of a descriptor, of which there is one"
STATE = "changes while samples are made"

TYPES: Mapping[str, str] = {
    "random.Random": STREAM,
    "numpy.Generator": STREAM,
    "numpy.RandomState": STREAM,
    "torch.Generator": STREAM,
    "zipfile.ZipFile": POSITION,
    "zipfile.ZipExtFile": POSITION,
    "tarfile.TarFile": POSITION,
    "h5py.HLObject": HANDLE,  # files, groups and datasets
    "netCDF4.Dataset": HANDLE,
    "netCDF4.Variable": HANDLE,
    "tables.File": HANDLE,
    "tables.Node": HANDLE,
    "sqlite3.Connection": HANDLE,
    "sqlite3.Cursor": HANDLE,
    # Threads may share an environment if each begins its own transactions, which
    # cannot be seen from here.
    "lmdb.Environment": HANDLE,
    "lmdb.Transaction": HANDLE,
    "lmdb.Cursor": HANDLE,
    "pyarrow.NativeFile": POSITION,
    "rasterio.DatasetReaderBase": HANDLE,
    "_csv.reader": ITERATOR,
    "soundfile.SoundFile": POSITION,
    "cv2.VideoCapture": POSITION,
    "decord.VideoReader": POSITION,
    "decord.AVReader": POSITION,
    "av.Container": POSITION,
    "torchvision.VideoReader": POSITION,
    "torchcodec.VideoDecoder": POSITION,
    "torchcodec.AudioDecoder": POSITION,
    "imageio.Reader": POSITION,
    "imageio.PluginV3": POSITION,
}
"""Package and name of a class (its module within the package may change), and why."""

NAMELESS = {
    f"builtins.{name}": f"lmdb.{name}"
    for name in ("Environment", "Transaction", "Cursor")
}
"""lmdb's C types do not name their package."""

ITERATORS = frozenset(
    (
        types.GeneratorType,
        *(type(iter(kind())) for kind in (bytes, dict, list, set, str, tuple)),
        *map(type, (iter({}.values()), iter({}.items()), iter(range(0)))),
        *(enumerate, filter, map, reversed, zip),
        *(
            each
            for each in vars(itertools).values()
            if isinstance(each, type) and issubclass(each, Iterator)
        ),
    )
) - {itertools.count, itertools.repeat}  # one step of these is atomic


GLOBAL_STREAMS = (
    getattr(random, "_inst", None),
    getattr(np.random.mtrand, "_rand", None),
    torch.default_generator,
)
"""The global generators of `random`, numpy and torch."""
BETWEEN_PROCESSES = frozenset(("multiprocessing", "_multiprocessing", "socket", "zmq"))
"""Packages whose objects connect to other processes."""
MAX_SUMMARIES = 1000
"""Parts in one snapshot: some ten milliseconds."""
PAGE = 4096
PAGES = 16
"""Pages read of an array that is larger than these, in bytes and number."""
MAX_READ = 2 << 20
"""Bytes read for one snapshot."""
MAX_MEMBERS = 1 << 13
BYTES_A_MEMBER = 256
"""Bytes that can be read while one member of a container is looked at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that threads must not share."""

    path: str
    """`dataset.reader.file`"""
    type_name: str
    """`_io.BufferedReader`"""
    why: str

    def __str__(self) -> str:
        return f"`{self.path}` (a {self.type_name}) {self.why}"


def find_unsafe(thing: Any, name: str) -> Finding | None:
    """Return the object nearest to `thing`, called `name`, that threads must not share.

    None if nothing known is found, which does not prove that it is safe.
    """
    for part in walk(thing, name):
        why = _why(part.thing)
        if why is not None:
            return Finding(part.path, _type_name(part.thing), why)
    return None


def leads_away(things: Iterable[Any]) -> bool:
    """Whether objects share a queue, a counter or the like with other processes."""
    parts = (part.thing for part in walk(tuple(things), ""))
    packages = (str(k.__module__) for part in parts for k in type(part).__mro__)
    return any(each.partition(".")[0] in BETWEEN_PROCESSES for each in packages)


def find_on_device(thing: Any, name: str, kind: str) -> tuple[str, torch.device] | None:
    """Return the path and device of a tensor in `thing` on a device of this kind.

    None if there is none within a few levels.
    """
    for part in walk(thing, name):
        if isinstance(part.thing, torch.Tensor) and part.thing.device.type == kind:
            return part.path, part.thing.device
    return None


def snapshot(things: Iterable[Any]) -> dict[str, Any]:
    """Return a summary of objects by path, which `changed` compares.

    Closures and globals that functions use count as parts of them. Numbers and text are
    recorded by value, containers by length, arrays and tensors by their contents, and
    everything else by identity. Of large arrays, some pages are looked at. An object
    whose class says `PER_PROCESS`, as a source does, is left out.
    """
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    memory = Memory()
    level: list[Named] = [
        (str(at), thing)
        for at, thing in enumerate(things)
        if not getattr(type(thing), "PER_PROCESS", False)
    ]
    for _ in range(DEPTH):
        below: list[Named] = []
        for path, part, cached in _held_by(level):
            if len(found) >= MAX_SUMMARIES:
                return found
            summary = _summary(part, memory)
            found[path] = WorkedOut(summary) if cached else summary
            if type(part) not in PLAIN and id(part) not in seen:
                seen[id(part)] = part  # alive: a new object could reuse its id
                below.append((path, part))
        level = below
    return found


class Memory:
    """Digests of memory, until a snapshot has read enough of it."""

    def __init__(self) -> None:
        self._left = MAX_READ

    def digest(self, start: int, stop: int) -> int:
        """Return a digest of the bytes between addresses, or of some pages of them."""
        nbytes = stop - start
        if self._left <= 0 or not nbytes:
            return 0
        view = memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")
        digest = xxhash.xxh3_64()
        if nbytes <= PAGES * PAGE:
            digest.update(view)
            self._left -= nbytes
        else:
            for at in range(PAGES):
                begin = (nbytes - PAGE) * at // (PAGES - 1)
                digest.update(view[begin : begin + PAGE])
            self._left -= PAGES * PAGE
        return digest.intdigest()

    def members(self, thing: Any) -> int:
        """Return a digest of which objects a container holds, or the first of them."""
        if type(thing) in (tuple, frozenset) or self._left <= 0:
            return 0
        values = dict.values(thing) if type(thing) is dict else thing
        self._left -= min(len(thing), MAX_MEMBERS) * BYTES_A_MEMBER
        with suppress(RuntimeError):  # another thread changed it meanwhile
            return hash(tuple(map(id, islice(values, MAX_MEMBERS))))
        return 0


class WorkedOut(NamedTuple):
    """The summary of a `functools.cached_property`."""

    summary: Any


def _is_cached(thing: Any, step: str) -> bool:
    """Whether an attribute is the value of a `functools.cached_property`."""
    owners = (owner.__dict__.get(step[1:]) for owner in type(thing).__mro__)
    return step[:1] == "." and any(type(each) is cached_property for each in owners)


def memory_of(made: Any, things: Iterable[Any]) -> str | None:
    """Return where in `things` the memory is that an array in `made` lies in, or None.

    If a function keeps the memory of its results, it will overwrite them.
    """
    spans = [span for part in walk(made, "") if (span := _span(part.thing))]
    for part in chain.from_iterable(walk(thing, "") for thing in things):
        start, stop = _span(part.thing) or (0, 0)
        if any(start < end and begin < stop for begin, end in spans):
            return part.path
    return None


def _span(thing: Any) -> tuple[int, int] | None:
    """Return the addresses of an array's memory; None if it has none here."""
    if is_a(thing, torch.Tensor):
        if thing.device.type != "cpu" or thing.layout is not torch.strided:
            return None
        storage = thing.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if not is_a(thing, np.ndarray):
        return None
    while is_a(thing.base, np.ndarray):
        thing = thing.base
    return thing.ctypes.data, thing.ctypes.data + thing.nbytes


def changed(before: dict[str, Any], things: Iterable[Any]) -> str | None:
    """Return the path of something that changed, without the leading number, or None.

    A new value of a `functools.cached_property` is not a change, as any copy of the
    object would compute the same. It is added to `before`, so that a later change of it
    is noticed.
    """
    after = snapshot(things)
    fresh = [
        path
        for path, summary in after.items()
        if type(summary) is WorkedOut and path not in before
    ]
    inside = tuple(path + mark for path in fresh for mark in ".[<")
    before |= {
        path: summary
        for path, summary in after.items()
        if path in fresh or path.startswith(inside)
    }
    differing = [
        path
        for path in dict.fromkeys((*before, *after))
        if path not in before or path not in after or before[path] != after[path]
    ]
    # A container whose members are others comes before them; they say more.
    telling = (p for p in differing if not _same_but_inside(before, after, p))
    path = next(telling, differing[0] if differing else None)
    return None if path is None else path.lstrip("0123456789")


def _same_but_inside(before: dict[str, Any], after: dict[str, Any], path: str) -> bool:
    """Whether an object is the same and as large as before: its contents differ."""
    one, other = before.get(path), after.get(path)
    if type(one) is not tuple or type(other) is not tuple or one[0] != other[0]:
        return False
    contents, others = one[1], other[1]
    return bool(contents and others) and contents[0] == others[0]


def _held_by(level: Iterable[Named]) -> Iterator[tuple[str, Any, bool]]:
    """Yield what objects hold, and what their code uses from around it.

    Each with its path, and whether it is the value of a `functools.cached_property`.
    """
    for path, thing in level:
        if WHOLE.isdisjoint(type(thing).__mro__):
            for step, part in _parts(thing):
                yield path + step, part, _is_cached(thing, step)


def _summary(thing: Any, memory: Memory) -> Any:
    kind = type(thing)
    if kind in VALUES:
        return thing if kind is not float else repr(thing)  # NaN equals itself
    contents: Any = None
    if kind is torch.Tensor:  # torch counts its own writes; numpy's are not among them
        writes = 0 if thing.is_inference() else thing._version  # noqa: SLF001
        contents = writes, memory.digest(*(_span(thing) or (0, 0)))
    elif kind is np.ndarray:
        contents = thing.shape, memory.digest(*_reach(thing))
    elif kind is bytearray:
        contents = len(thing), hash(bytes(thing[:PAGE]))
    elif kind in BARE:
        contents = len(thing), memory.members(thing)
    return id(thing), contents


def _reach(array: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses that an array's elements lie between; none if in a file.

    Its `nbytes` say less: windows that slide over a vector count each element again.
    """
    base: Any = array
    while is_a(base, np.ndarray) and not is_a(base, np.memmap):
        base = base.base
    if is_a(base, (np.memmap, mmap.mmap)) or not array.size:
        return 0, 0
    start, stop = array.ctypes.data, array.ctypes.data + array.itemsize
    for length, stride in zip(array.shape, array.strides, strict=True):
        start += min(0, (length - 1) * stride)
        stop += max(0, (length - 1) * stride)
    return start, stop


def _why(thing: Any) -> str | None:
    kind = type(thing)
    if any(thing is each for each in GLOBAL_STREAMS):
        return None  # seeded, or observed, wherever they are drawn from
    if kind in ITERATORS:
        return ITERATOR
    if kind is types.FunctionType:
        return SEEKS if _seeks(thing) else None
    if issubclass(kind, io.IOBase):
        return POSITION if _is_read(thing) else None
    return next((TYPES[name] for name in _names(kind) if name in TYPES), None)


def _seeks(function: types.FunctionType) -> bool:
    """Whether it calls `os.lseek`, except on a file that it opens and closes itself.

    A bare descriptor is a number like any other, so its use is what shows.
    """
    names = set(_part_names(function.__code__))
    return "lseek" in names and "close" not in names


def _names(kind: type) -> Iterator[str]:
    """Yield `package.Name` of a class and its base classes."""
    for each in kind.__mro__:
        name = f"{str(each.__module__).partition('.')[0]}.{each.__name__}"
        yield NAMELESS.get(name, name)


def _is_read(file: Any) -> bool:
    """Whether a file is open for reading; calls no code of the user's own types.

    A stream that is only written to does not count: a whole process shares stderr.
    """
    kind = type(file)
    with suppress(ValueError):  # closed or detached
        if kind is io.TextIOWrapper:
            return _is_read(file.buffer)
        if kind in (io.BufferedReader, io.BufferedRandom):
            return _is_read(file.raw)
        if kind in (io.FileIO, io.BytesIO, io.StringIO):
            return bool(file.readable())
        return kind not in (io.BufferedWriter, io.BufferedRWPair)
    return False


def _type_name(thing: Any) -> str:
    kind = type(thing)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return NAMELESS.get(name, name).removeprefix("builtins.")


CHANGES = (
    "`{}` changes while samples are made, and each worker would change its own copy;"
    " set the number of workers yourself if that is acceptable"
)
DREW = (
    "it draws from a global random generator, and each worker would draw from its own;"
    " draw from `rng`, or set the number of workers yourself if that is acceptable"
)
MEMBERS = 32
"""Members examined of a container, from its start: the others are probably alike."""
ATTRIBUTES = 256
"""Attributes examined of an instance."""
DEPTH = 10
"""Levels examined: a file in a list of readers, in a dataset in a dataset, is at 5."""
MAX_PARTS = 500
"""Objects examined in one walk: a few milliseconds."""

PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice)
)
VALUES = PLAIN - {bytes, bytearray}
WHOLE: frozenset[type] = PLAIN | {
    type,
    types.ModuleType,
    np.ndarray,
    np.generic,
    np.dtype,
    torch.Tensor,
    torch.dtype,
    threading.local,  # every thread has its own
    logging.Logger,  # leads to the streams of the whole process, each behind a lock
    logging.LoggerAdapter,
    logging.Handler,
    # Values, although they cache results about themselves:
    pathlib.PurePath,
    enum.Enum,
}
ITERABLE = (list, tuple, deque, set, frozenset)
BARE = frozenset((*ITERABLE, dict))
"""Types whose objects have no attributes."""
ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward")
"""Methods through which a worker enters a user's object."""

Named = tuple[str, Any]


class ObjectPart(NamedTuple):
    """An object that a walk reached."""

    path: str
    """`dataset.readers[0].file`"""
    thing: Any


def walk(thing: Any, name: str) -> Iterator[ObjectPart]:
    """Yield `thing`, here called `name`, and everything it consists of, nearest first.

    Every object comes once, so cycles end.
    """
    seen = {id(thing): thing}  # keeps them alive: a new object could reuse an id
    level = [ObjectPart(name, thing)]
    for _ in range(DEPTH):
        yield from level
        level = [
            ObjectPart(part.path + step, inner)
            for part in level
            for step, inner in _unseen(part.thing, seen)
        ]


def _unseen(thing: Any, seen: dict[int, Any]) -> Iterator[Named]:
    """Yield and record the parts that are new, while there is room for more."""
    for step, part in parts_of(thing):
        if len(seen) >= MAX_PARTS:
            return
        if id(part) not in seen:
            seen[id(part)] = part
            yield step, part


def parts_of(thing: Any) -> Iterator[Named]:
    """Yield what `thing` directly holds: `(".transform", ...)`, `("[3]", ...)`.

    What a function uses from around it appears as `.<closure>.x`, `.<globals>.x` and
    `.<defaults>.x`. Numbers and text are left out. Arrays, tensors, classes and modules
    have no parts.
    """
    if WHOLE.isdisjoint(type(thing).__mro__):
        yield from (named for named in _parts(thing) if type(named[1]) not in PLAIN)


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Act like `isinstance`, without reading `__class__`, which may be a property."""
    return issubclass(type(thing), kinds)


def _parts(thing: Any) -> Iterable[Named]:
    if type(thing) in BARE:
        return _members(thing)
    if is_a(thing, types.FunctionType):
        return chain(_around(thing), _attributes(thing))
    if is_a(thing, types.MethodType):
        return (".__self__", thing.__self__), (".__func__", thing.__func__)
    if is_a(thing, (types.BuiltinMethodType, types.MethodWrapperType)):
        return ((".__self__", thing.__self__),)
    return chain(_members(thing), _attributes(thing), _entries(thing))


def _members(thing: Any) -> Iterable[Named]:
    """Return what a container or a partial function holds."""
    if is_a(thing, dict):
        return ((f"[{_key(key)}]", value) for key, value in _items(thing, MEMBERS))
    if is_a(thing, (set, frozenset)):
        return (("<member>", each) for each in _first(thing))
    if is_a(thing, ITERABLE):
        return ((f"[{at}]", each) for at, each in enumerate(_first(thing)))
    if is_a(thing, partial):
        names = "func", "args", "keywords"
        return ((f".{name}", vars(partial)[name].__get__(thing)) for name in names)
    return ()


def _first(thing: Any) -> list[Any]:
    """Return the first members, bypassing any `__iter__` of a subclass."""
    kind = next(each for each in type(thing).__mro__ if each in ITERABLE)
    with suppress(RuntimeError):  # another thread changed it meanwhile
        return list(islice(kind.__iter__(thing), MEMBERS))
    return []


def _items(mapping: dict[Any, Any], most: int) -> list[tuple[Any, Any]]:
    with suppress(RuntimeError):  # another thread changed it meanwhile
        return list(islice(dict.items(mapping), most))
    return []


def _key(key: Any) -> str:
    """Print a key; of the user's types only the name, as `__repr__` is user code."""
    return f"{key!r:.60}" if type(key) in PLAIN else f"<{type(key).__name__}>"


def _attributes(thing: Any) -> Iterator[Named]:
    """Yield what is in `__dict__` and in slots."""
    for name, value in _items(_dict_of(thing), ATTRIBUTES):
        yield f".{name}", value
    for owner in type(thing).__mro__:
        if "__slots__" in owner.__dict__:
            yield from _slots(thing, owner)


def _dict_of(thing: Any) -> dict[Any, Any]:
    """Return its `__dict__`, bypassing a property of that name."""
    for owner in type(thing).__mro__:
        descriptor = owner.__dict__.get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType:
            found: dict[Any, Any] = descriptor.__get__(thing)
            return found
    return {}


def _slots(thing: Any, owner: type) -> Iterator[Named]:
    for name, slot in owner.__dict__.items():
        if type(slot) is types.MemberDescriptorType:
            with suppress(AttributeError):  # not set
                yield f".{name}", slot.__get__(thing)


def _entries(thing: Any) -> Iterator[Named]:
    """Yield the methods that workers call, and the methods that those name in turn.

    All of them may use globals of their module.
    """
    owners = [owner.__dict__ for owner in type(thing).__mro__]
    names = list(ENTRIES)
    for name in names:
        method = next((each[name] for each in owners if name in each), None)
        if type(method) is types.FunctionType:
            yield f".{name}", method
            if not str(method.__module__).startswith("torch."):  # which has many
                further = set(_part_names(method.__code__)).difference(names)
                names += sorted(further)


def _around(function: types.FunctionType) -> Iterator[Named]:
    """Yield what a function's code uses that is neither an argument nor local."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell: not assigned yet
            yield f".<closure>.{name}", cell.cell_contents
    for at, value in enumerate(function.__defaults__ or ()):
        yield f".<defaults>[{at}]", value
    for name, value in _items(function.__kwdefaults__ or {}, MEMBERS):
        yield f".<defaults>.{name}", value
    for name in dict.fromkeys(_part_names(function.__code__)):
        value = function.__globals__.get(name)
        # A function of another module is left out, as that module itself is.
        around = function.__globals__
        if not (type(value) is types.FunctionType and value.__globals__ is not around):
            yield f".<globals>.{name}", value


def _part_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code may look up, including those of inner functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if type(inner) is types.CodeType:
            yield from _part_names(inner)
