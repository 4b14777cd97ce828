"""Whether samples may be made elsewhere: by copies of the objects that make them here.

Threads share the user's objects, and processes have copies of them. Neither may change
a sample. So a witness records what the objects consist of before the first sample,
learns what was seen while samples were made, and is asked by whoever chooses a place.

After work has moved elsewhere, workers have copies, or have worked ahead. Torch without
workers makes each batch when it is asked for one, so a change by the loop shows in the
next batch. So a watch compares the objects with what they were then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain, count, islice
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ...system.descriptors import Place, ReadFile, read_places, read_since
from ...system.printing import name_of
from ..observe.observation import Restriction
from .hazards import BOUND, POSITION, STATE, UNSHARED, Finding, find_bound, find_unsafe
from .reach import (
    LRU_CACHE,
    VALUES,
    ObjectPart,
    View,
    container_of,
    edges,
    is_a,
    views_of,
    walk,
)

# Looks without a change before others may join the only worker.
SURE_LOOKS = 3


class Witness:
    """What is known of objects that samples come from.

    As a context manager, it notices a file that is read within, and still open when
    somebody asks: other threads may be reading files of their own meanwhile.

    Args:
        subjects: the objects, about to be used for the first time here.
    """

    def __init__(self, subjects: Iterable[Any]) -> None:
        self.subjects = tuple(subjects)
        self._before = snapshot(self.subjects)
        self._calls = 0
        # Looks at a copy in a worker without a change; -1: it changes there.
        self._elsewhere = 0
        self._files: Mapping[int, Place] = {}
        self._read_files: tuple[ReadFile, ...] = ()
        self._reused_path: str | None = None
        self._grows = False
        # Whether samples were seen to draw from a global generator.
        self.drew = False

    def __enter__(self) -> None:
        self._files = read_places()

    def __exit__(self, *_: object) -> None:
        self._read_files = read_since(self._files)

    def note_made(self, made: Any, makers: Iterable[Any]) -> None:
        """Notice what a batch says of the `makers`.

        Its memory may be theirs, which they will reuse, and it may carry gradients.
        """
        self._reused_path = memory_of(made, makers)
        self._grows = any(
            is_a(part.thing, torch.Tensor) and part.thing.requires_grad
            for part in walk(made, "")
        )

    def changed(self) -> str | None:
        """Return the path of something that has changed, or None."""
        change = difference(self._before, self.subjects)
        return None if change is None else change[1]

    def verdict(self, kind: str) -> str:
        """Return why workers of a kind would make other samples; empty if unknown.

        Args:
            kind: `thread` if they share the subjects, otherwise they have copies.
        """
        if self.drew:
            return Restriction.DREW
        path = self.changed() or self._open_file or self._reused_path
        if path is not None:
            return Restriction.CHANGES.format(path)
        if self._grows and kind != "thread":
            return Restriction.GRADIENTS
        thing = self._bound(UNSHARED if kind == "thread" else BOUND)
        return "" if thing is None else Restriction.BELONGS.format(thing)

    @property
    def _open_file(self) -> str | None:
        return next((file.path for file in self._read_files if file.is_open), None)

    def repeats(self) -> bool:
        """Whether a call of the subjects does the same again, and anywhere."""
        unsafe = (find_unsafe(subject, "it") for subject in self.subjects)
        return not any(unsafe) and self.changed() is None and not self._bound(BOUND)

    def _bound(self, classes: frozenset[str]) -> str | None:
        return next(
            filter(None, (find_bound(s, name_of(s), classes) for s in self.subjects)),
            None,
        )

    def finding(self) -> Finding | None:
        """Return the nearest thing that threads must not share, or None."""
        for subject in self.subjects:
            if (unsafe := find_unsafe(subject, name_of(subject))) is not None:
                return unsafe
        if (path := self._open_file) is not None:
            return Finding(path, "file", POSITION)
        if (change := difference(self._before, self.subjects)) is None:
            return None
        return Finding(name_of(self.subjects[change[0]]) + change[1], "value", STATE)

    # The only worker of a stage, which has a copy

    def look(self) -> str | None:
        """Return what has changed or ""; None but after 1, 2, 4, 8, ... calls."""
        self._calls += 1
        return None if self._calls & (self._calls - 1) else self.changed() or ""

    def hear(self, path: str) -> bool:
        """Take what a look at a copy found; return whether it is the first change."""
        if self._elsewhere < 0:
            return False
        self._elsewhere = -1 if path else self._elsewhere + 1
        return bool(path)

    @property
    def sure_elsewhere(self) -> bool:
        """Whether a copy was looked at often enough, and did not change."""
        return self._elsewhere >= SURE_LOOKS


MAX_VIEWS = 256
# Members of one container that a look compares.
MAX_MEMBERS = 256
# Members of all containers that a look compares, the nearest ones first.
MAX_ALL = 1 << 12
# Containers that each look compares, however soon it comes after the last one.
NEAR = 32
# The share of the trainer's time for looking at the others, too.
LOOKING = 5e-3
# The share of the trainer's time for comparing everything, arrays included.
SHARE = 1e-3
MIN_PAUSE_S = 1.0
# A view of an object, and what it showed.
Shown = tuple[ObjectPart, View, tuple[Any, ...]]


class ChangeWatch:
    """Compares objects with what they were, at every batch and at next to no cost.

    Each look compares which objects the containers hold, the nearest ones at least, and
    how often tensors were written to. If something differs, and from time to time,
    everything is compared.

    Args:
        subjects: the objects, as the workers have them.
    """

    def __init__(self, subjects: Iterable[Any]) -> None:
        self._subjects = tuple(s for s in subjects if not is_per_process(s))
        self.renew()

    def renew(self) -> None:
        """Compare with the present from now on."""
        start = time.perf_counter()
        parts = list(walk(self._subjects, ""))
        views = (
            (part, view)
            for part in parts
            if type(part.thing) not in (tuple, frozenset)
            for view in views_of(part.thing)
        )
        self._views: list[Shown] = []
        members_left = MAX_ALL
        for part, view in islice(views, MAX_VIEWS):
            members = _held(view)
            members_left -= len(members)
            if members_left < 0:
                break
            self._views.append((part, view, members))
        self._tensors = [
            (path, thing, thing._version)  # noqa: SLF001
            for path, thing in parts
            if isinstance(thing, torch.Tensor) and not thing.is_inference()
        ]
        self._before = snapshot(self._subjects)
        self._surroundings = surroundings()
        self._looked_s = time.perf_counter()
        self._touched(self._views)
        self._look_s = time.perf_counter() - self._looked_s
        self._rest(start)

    def changed(self) -> str | None:
        """Return the path of something that has changed, or None."""
        start = time.perf_counter()
        due = start - self._looked_s > self._look_s / LOOKING
        touched = self._touched(self._views if due else self._views[:NEAR])
        self._looked_s = start if due else self._looked_s
        if (now := surroundings()) != self._surroundings:
            return next(name for name in now if now[name] != self._surroundings[name])
        if not touched and start < self._due_s:
            return None
        if (change := difference(self._before, self._subjects)) is not None:
            return name_of(self._subjects[change[0]]) + change[1]
        if touched:
            # A snapshot ends somewhere; what it leaves out may have changed.
            if path := self._touched(self._views, by_value=True):
                number, _, inner = path[1:].partition("]")
                return name_of(self._subjects[int(number)]) + inner
            self.renew()
        else:
            self._rest(start)
        return None

    def _touched(self, views: Iterable[Shown], *, by_value: bool = False) -> str | None:
        """Return the path of something that shows other parts, or was written to."""
        for (path, thing), view, before in views:
            now = _held(view)
            differs = len(now) != len(before) or any(map(is_not, now, before))
            if differs and not (by_value and _equal(thing, view, before, now)):
                return path
        written = (path for path, tensor, at in self._tensors if tensor._version != at)  # noqa: SLF001
        return next(written, None)

    def _rest(self, start: float) -> None:
        """Set when all is compared next: after a multiple of what this has taken."""
        now = time.perf_counter()
        self._due_s = now + max(MIN_PAUSE_S, (now - start) / SHARE)


def surroundings() -> dict[str, Any]:
    """Return, by name, what of this process samples often depend on."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = ""
    return {
        "the working directory": folder,
        "torch's default type": torch.get_default_dtype(),
    }


def _held(view: View) -> tuple[Any, ...]:
    try:
        return tuple(islice(view.read(), MAX_MEMBERS))
    except RuntimeError:  # another thread changed it meanwhile
        return ()


def _equal(
    thing: Any, view: View, before: tuple[Any, ...], now: tuple[Any, ...]
) -> bool:
    """Whether a view shows equal values now, or cached properties that are new."""
    first, memory = len(before), Memory(0)
    names = list(zip(view.names(), now, strict=False))[first:]  # at once, as above
    return (
        [_summary(value, memory) for value in before]
        == [_summary(value, memory) for value in now[:first]]
    ) and all(_is_cached(thing, view.step(name)) for name, _ in names)


# What objects hold at a moment, to be compared later

# Parts in one snapshot: some ten milliseconds.
MAX_SUMMARIES = 1000
PAGE = 4096
# Pages read of an array that is larger than these, in bytes and number.
PAGES = 16
# Results in an `lru_cache` from which it counts: helpers keep a few, which any copy
# would compute as well.
MIN_CACHED = 4
# Bytes read for one snapshot.
MAX_READ = 2 << 20
MAX_DIGESTED = 1 << 13
# Bytes that can be read while one member of a container is looked at.
BYTES_A_MEMBER = 256


def snapshot(things: Iterable[Any]) -> dict[str, Any]:
    """Return a summary of objects by path, which `changed` compares.

    Closures and globals that functions use count as parts of them. Numbers and text are
    recorded by value, containers by length, arrays and tensors by their contents, and
    everything else by identity. Of large arrays, some pages are looked at. An object
    whose class says `PER_PROCESS`, as a source does, is left out.
    """
    summaries: dict[str, Any] = {}
    memory = Memory()
    level = [
        ObjectPart(str(at), thing)
        for at, thing in enumerate(things)
        if not is_per_process(thing)
    ]
    for holder, step, (path, part), _ in islice(edges(level), MAX_SUMMARIES):
        summary = _summary(part, memory)
        summaries[path] = WorkedOut(summary) if _is_cached(holder, step) else summary
    return summaries


def is_per_process(thing: Any) -> bool:
    """Whether each process has its own, as of a source: changes do not count."""
    return bool(getattr(type(thing), "PER_PROCESS", False))


class Memory:
    """Digests of memory, until a snapshot has read enough of it."""

    def __init__(self, nbytes: int = MAX_READ) -> None:
        self._bytes_left = nbytes

    def digest(self, start: int, stop: int) -> int:
        """Return a digest of the bytes between addresses, or of some pages of them."""
        nbytes = stop - start
        if self._bytes_left <= 0 or not nbytes or not start:  # a fake tensor's is 0
            return 0
        pieces = [memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")]
        if nbytes > PAGES * PAGE:
            begins = [(nbytes - PAGE) * at // (PAGES - 1) for at in range(PAGES)]
            pieces = [pieces[0][begin : begin + PAGE] for begin in begins]
        self._bytes_left -= sum(map(len, pieces))
        return xxhash.xxh3_64_intdigest(b"".join(pieces))

    def members(self, thing: Any, kind: Any) -> int:
        """Return a digest of which objects a container holds, or the first of them.

        Args:
            thing: the container.
            kind: the built-in class, so that no code of a subclass is called.
        """
        if kind in (tuple, frozenset) or self._bytes_left <= 0:
            return 0
        values = dict.values(thing) if kind is dict else kind.__iter__(thing)
        self._bytes_left -= min(kind.__len__(thing), MAX_DIGESTED) * BYTES_A_MEMBER
        with suppress(RuntimeError):  # another thread changed it meanwhile
            return hash(tuple(map(id, islice(values, MAX_DIGESTED))))
        return 0


class WorkedOut(NamedTuple):
    """The summary of a `functools.cached_property`."""

    summary: Any


def _is_cached(thing: Any, step: str) -> bool:
    """Whether an attribute is the value of a `functools.cached_property`."""
    return step[:1] == "." and any(
        type(owner.__dict__.get(step[1:])) is cached_property
        for owner in type(thing).__mro__
    )


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
    paths = [
        path
        for path in dict.fromkeys((*before, *after))
        if path not in before or path not in after or before[path] != after[path]
    ]
    if not paths:
        return None
    # A container whose members are others comes before them; they say more.
    path = next((p for p in paths if not _same_but_inside(before, after, p)), paths[0])
    inner = path.lstrip("0123456789")
    return int(path.removesuffix(inner)), inner


def _same_but_inside(before: dict[str, Any], after: dict[str, Any], path: str) -> bool:
    """Whether an object is the same and as large as before: its contents differ."""
    one, other = before.get(path), after.get(path)
    if type(one) is not tuple or type(other) is not tuple or one[0] != other[0]:
        return False
    return bool(one[1] and other[1]) and one[1][0] == other[1][0]


def _summary(thing: Any, memory: Memory) -> Any:
    kind = type(thing)
    if kind in VALUES:
        # NaN equals itself.
        return repr(thing) if kind in (float, complex) else thing
    contents: Any = None
    if is_a(thing, torch.Tensor):
        contents = _of_tensor(thing, memory)
    elif is_a(thing, np.ndarray):
        contents = thing.shape, memory.digest(*_reach(thing))
    elif kind is bytearray:
        contents = len(thing), hash(bytes(thing[:PAGE]))
    elif kind is count:
        contents = repr(thing)  # where it is
    elif kind is LRU_CACHE:
        size = thing.cache_info().currsize
        contents = size if size >= MIN_CACHED else 0
    elif base := container_of(kind):
        contents = base.__len__(thing), memory.members(thing, base)
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
