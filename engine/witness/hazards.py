"""What several threads must not share, searched for in a dataset or a function.

Types are recognised by name, so no library is loaded to look for its objects. Samplers
are judged likewise: whether they may see what the training loop does meanwhile.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler

from .reach import (
    LRU_CACHE,
    WHOLE,
    direct_parts,
    is_a,
    is_of_library,
    names_in,
    rebinds,
    walk,
)

POSITION = "has one position, which every read moves"
HANDLE = "may be used by one thread at a time"
ITERATOR = "hands out what it holds once, in order"
STREAM = "draws from one stream, in order"
SEEKS = "moves the position of a descriptor, of which there is one"
STATE = "changes while samples are made"

# Package and name of a class (its module within the package may change), and why.
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

# lmdb's C types do not name their package.
NAMELESS = {
    f"builtins.{name}": f"lmdb.{name}"
    for name in ("Environment", "Transaction", "Cursor")
}

ITERATORS = frozenset(
    (
        types.GeneratorType,
        *(type(iter(kind())) for kind in (bytes, dict, list, set, str, tuple)),
        *map(type, (iter({}.values()), iter({}.items()), iter(range(0)))),
        *(enumerate, filter, map, reversed, zip),
        *(
            kind
            for kind in vars(itertools).values()
            if isinstance(kind, type) and issubclass(kind, Iterator)
        ),
    )
) - {itertools.count, itertools.repeat}  # one step of these is atomic


# The global generators of `random`, numpy and torch.
GLOBAL_STREAMS = (
    getattr(random, "_inst", None),
    getattr(np.random.mtrand, "_rand", None),
    torch.default_generator,
)
# Classes that threads must not share, either: answers come in the order of questions,
# whoever has asked.
UNSHARED = frozenset(
    (
        "socket.socket",
        "multiprocessing._ConnectionBase",
        "subprocess.Popen",
        "zmq.Socket",
    )
)
# Classes whose objects work in the process that made them: a forked copy lacks their
# threads, or shares their connections.
BOUND = UNSHARED | {
    "asyncio.AbstractEventLoop",
    "concurrent.Executor",
    "grpc.Channel",
    "multiprocessing.BaseManager",
    "multiprocessing.BaseProcess",
    "multiprocessing.Pool",
    "pymongo.MongoClient",
    "psycopg2.connection",
    "threading.Thread",
    "zmq.Context",
}
# Packages whose objects connect to other processes.
BETWEEN_PROCESSES = frozenset(("multiprocessing", "_multiprocessing", "socket", "zmq"))


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
        if (why := _why(part.thing)) is not None:
            return Finding(part.path, _type_name(part.thing), why)
    return None


def find_bound(thing: Any, name: str, classes: frozenset[str]) -> str | None:
    """Describe what belongs to this process or thread in `thing`, called `name`.

    That is an object of one of these classes, or one that has noted this process's id,
    as clients do that refuse to work in another. None if there is none.
    """
    for part in walk(thing, name):
        if not classes.isdisjoint(_names(type(part.thing))):
            return f"`{part.path}` (a {_type_name(part.thing)})"
        if classes is BOUND and _is_written(part.thing):
            return f"`{part.path}` (a {_type_name(part.thing)}, which is written to)"
        if classes is BOUND and _notes_pid(part.thing):
            return (
                f"`{part.path}` (a {_type_name(part.thing)}, which notes its process)"
            )
    return None


def _is_written(thing: Any) -> bool:
    """Whether it is a file open for writing, other than the process's own streams.

    A copy would keep what it has not written yet. Asking for the position might write
    it, and in a forked child a second time.
    """
    if type(thing) not in WRITERS:
        return False
    with suppress(OSError, ValueError):  # closed
        return bool(thing.writable()) and thing.fileno() > STDERR
    return False


WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)
# Descriptors up to this one belong to the whole process.
STDERR = 2


def _notes_pid(thing: Any) -> bool:
    pid = os.getpid()
    return any(
        type(value) is int and value == pid and "pid" in step.lower()
        for step, value in direct_parts(thing)
    )


# Names by which code makes a generator of its own.
SEEDERS = frozenset(("Generator", "Random", "RandomState", "default_rng"))


def keeps_stream(data: Any, prepare: Any) -> bool:
    """Whether data draws from a generator of its own, whose state each worker has.

    Args:
        data: the dataset.
        prepare: what is called in each worker first; it may give the data a generator.
    """
    code = getattr(prepare, "__code__", None)
    if code is not None and not SEEDERS.isdisjoint(names_in(code)):
        return True
    return any(_why(part.thing) is STREAM for part in walk(data, ""))


# Types whose objects keep nothing between two calls, unless others do for them.
STATELESS = WHOLE - {np.ndarray, torch.Tensor} | {
    types.FunctionType,
    types.BuiltinFunctionType,
    partial,
    tuple,
    frozenset,
    LRU_CACHE,  # what it keeps, any copy would compute as well
}


def is_stateless(thing: Any) -> bool:
    """Whether a function reaches only functions, values and libraries.

    It keeps no state then. False does not prove that it does.
    """
    return not any(_may_keep(part.thing) for part in walk(thing, ""))


def _may_keep(thing: Any) -> bool:
    if type(thing) is types.FunctionType:
        return bool(thing.__dict__) or rebinds(thing.__code__)
    if is_a(thing, (type, types.ModuleType)):
        module = thing.__module__ if is_a(thing, type) else thing.__name__
        return not is_of_library(str(module))
    return STATELESS.isdisjoint(type(thing).__mro__)


def leads_away(things: Iterable[Any]) -> bool:
    """Whether a copy in another process would share a queue, say, or not work."""
    if find_bound(tuple(things), "", BOUND):
        return True
    return any(
        str(kind.__module__).partition(".")[0] in BETWEEN_PROCESSES
        for part in walk(tuple(things), "")
        for kind in type(part.thing).__mro__
    )


def find_on_device(thing: Any, name: str, kind: str) -> tuple[str, torch.device] | None:
    """Return the path and device of a tensor in `thing` on a device of this kind.

    None if there is none within a few levels.
    """
    for part in walk(thing, name):
        if isinstance(part.thing, torch.Tensor) and part.thing.device.type == kind:
            return part.path, part.thing.device
    return None


def _why(thing: Any) -> str | None:
    kind = type(thing)
    if any(thing is stream for stream in GLOBAL_STREAMS):
        return None  # seeded, or observed, wherever they are drawn from
    if kind in ITERATORS:
        return ITERATOR
    if kind is types.FunctionType:
        # `os.lseek` moves the position, unless it opens and closes the file itself. A
        # bare descriptor is a number like any other, so its use is what shows.
        names = set(names_in(thing.__code__))
        return SEEKS if "lseek" in names and "close" not in names else None
    if issubclass(kind, io.IOBase):
        return POSITION if _is_read(thing) else None
    return next((TYPES[name] for name in _names(kind) if name in TYPES), None)


def _names(kind: type) -> Iterator[str]:
    """Yield `package.Name` of a class and its base classes."""
    for owner in kind.__mro__:
        name = f"{str(owner.__module__).partition('.')[0]}.{owner.__name__}"
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


# Packages whose samplers do not see what the training loop does.
STEADY = frozenset(
    (
        "penstock",
        "torch",
        "torchdata",
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "transformers",
    )
)


def may_watch(sampler: Any) -> bool:
    """Whether what a sampler yields may depend on what the loop does meanwhile."""
    kind = type(sampler)
    if kind in (range, tuple):
        return False
    if str(kind.__module__).partition(".")[0] not in STEADY:
        return True
    if kind is RandomSampler and sampler.generator is not None:
        # It draws more of these as it goes.
        again = sampler.num_samples > len(sampler.data_source)
        return bool(sampler.replacement or again)
    inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
    return any(may_watch(part) for part in inner if part is not None)
