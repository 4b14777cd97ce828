"""What objects hold at a moment, to be compared later."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from .reach import (
    BARE,
    LRU_CACHE,
    VALUES,
    ObjectPart,
    edges,
    is_a,
    walk,
)

MAX_SUMMARIES = 1000
"""Parts in one snapshot: some ten milliseconds."""
PAGE = 4096
PAGES = 16
"""Pages read of an array that is larger than these, in bytes and number."""
MIN_CACHED = 4
"""Results in an `lru_cache` from which it counts: helpers keep a few, which any copy
would compute as well."""
MAX_READ = 2 << 20
"""Bytes read for one snapshot."""
MAX_MEMBERS = 1 << 13
BYTES_A_MEMBER = 256
"""Bytes that can be read while one member of a container is looked at."""


def snapshot(things: Iterable[Any]) -> dict[str, Any]:
    """Return a summary of objects by path, which `changed` compares.

    Closures and globals that functions use count as parts of them. Numbers and text are
    recorded by value, containers by length, arrays and tensors by their contents, and
    everything else by identity. Of large arrays, some pages are looked at. An object
    whose class says `PER_PROCESS`, as a source does, is left out.
    """
    found: dict[str, Any] = {}
    memory = Memory()
    level = [
        ObjectPart(str(at), thing)
        for at, thing in enumerate(things)
        if not is_per_process(thing)
    ]
    for holder, step, (path, part), _ in islice(edges(level), MAX_SUMMARIES):
        summary = _summary(part, memory)
        found[path] = WorkedOut(summary) if _is_cached(holder, step) else summary
    return found


def is_per_process(thing: Any) -> bool:
    """Whether each process has its own, as of a source: changes do not count."""
    return bool(getattr(type(thing), "PER_PROCESS", False))


class Memory:
    """Digests of memory, until a snapshot has read enough of it."""

    def __init__(self) -> None:
        self._left = MAX_READ

    def digest(self, start: int, stop: int) -> int:
        """Return a digest of the bytes between addresses, or of some pages of them."""
        nbytes = stop - start
        if self._left <= 0 or not nbytes:
            return 0
        pieces = [memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")]
        if nbytes > PAGES * PAGE:
            begins = [(nbytes - PAGE) * at // (PAGES - 1) for at in range(PAGES)]
            pieces = [pieces[0][begin : begin + PAGE] for begin in begins]
        self._left -= sum(map(len, pieces))
        return xxhash.xxh3_64_intdigest(b"".join(pieces))

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


def difference(before: dict[str, Any], things: Iterable[Any]) -> tuple[int, str] | None:
    """Return what changed: the number of a thing and the path from there, or None.

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
    if not differing:
        return None
    # A container whose members are others comes before them; they say more.
    telling = (p for p in differing if not _same_but_inside(before, after, p))
    path = next(telling, differing[0])
    inner = path.lstrip("0123456789")
    return int(path.removesuffix(inner)), inner


def _same_but_inside(before: dict[str, Any], after: dict[str, Any], path: str) -> bool:
    """Whether an object is the same and as large as before: its contents differ."""
    one, other = before.get(path), after.get(path)
    if type(one) is not tuple or type(other) is not tuple or one[0] != other[0]:
        return False
    contents, others = one[1], other[1]
    return bool(contents and others) and contents[0] == others[0]


def _summary(thing: Any, memory: Memory) -> Any:
    kind = type(thing)
    if kind in VALUES:
        return thing if kind is not float else repr(thing)  # NaN equals itself
    contents: Any = None
    if is_a(thing, torch.Tensor):
        contents = _of_tensor(thing, memory)
    elif is_a(thing, np.ndarray):
        contents = thing.shape, memory.digest(*_reach(thing))
    elif kind is bytearray:
        contents = len(thing), hash(bytes(thing[:PAGE]))
    elif kind is itertools.count:
        contents = repr(thing)  # where it is
    elif kind is LRU_CACHE:
        held = thing.cache_info().currsize
        contents = held if held >= MIN_CACHED else 0
    elif kind in BARE:
        contents = len(thing), memory.members(thing)
    return id(thing), contents


def _of_tensor(tensor: torch.Tensor, memory: Memory) -> tuple[int, int]:
    """Return how often torch has written, and a digest, as numpy may have written, too.

    Code of the user's subclasses is not called.
    """
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 as torch does itself
        writes = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
        with suppress(RuntimeError):  # a wrapper has no memory of its own
            return writes, memory.digest(*(_span(tensor) or (0, 0)))
        return writes, 0


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
