"""What several threads must not share, looked for in a dataset or a function.

Types are known by name, so no library is loaded to look for its objects.
"""

from __future__ import annotations

import io
import itertools
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .anatomy import walk

__all__ = ["Finding", "find_unsafe"]

POSITION = "has one position, which every read moves"
HANDLE = "may be used by one thread at a time"
ITERATOR = "hands out what it holds once, in order"

TYPES: Mapping[str, str] = {
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
    # Threads may share an environment if each begins transactions of its own, which
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
"""The package and the name of a class (where in the package changes), and why."""

NAMELESS = {
    f"builtins.{name}": f"lmdb.{name}"
    for name in ("Environment", "Transaction", "Cursor")
}
"""lmdb's types in C do not say whose they are."""

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
) - {itertools.count, itertools.repeat}  # a step of these is one, whoever takes it


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
    """Return what is nearest to `thing`, called `name`, of what threads must not share.

    None if nothing known is found; that it is safe is not proved by that.
    """
    for part in walk(thing, name):
        why = _why(part.thing)
        if why is not None:
            return Finding(part.path, _type_name(part.thing), why)
    return None


def _why(thing: Any) -> str | None:
    kind = type(thing)
    if kind in ITERATORS:
        return ITERATOR
    if issubclass(kind, io.IOBase):
        return POSITION if _is_read(thing) else None
    return next((TYPES[name] for name in _names(kind) if name in TYPES), None)


def _names(kind: type) -> Iterator[str]:
    """Yield `package.Name` of a class and of those it is derived from."""
    for each in kind.__mro__:
        name = f"{str(each.__module__).partition('.')[0]}.{each.__name__}"
        yield NAMELESS.get(name, name)


def _is_read(file: Any) -> bool:
    """Whether an open file is one to read from; asks nothing of the user's own types.

    A stream that is only written to is left out: all of a process share stderr.
    """
    kind = type(file)
    with suppress(ValueError):  # closed, or taken apart
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
