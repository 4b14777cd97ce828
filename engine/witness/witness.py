"""Whether samples may be made elsewhere: by copies of the objects that make them here.

Threads share the user's objects, and processes have copies of them. Neither may change
a sample. So a witness records what the objects consist of before the first sample,
learns what was seen while samples were made, and is asked by whoever chooses a place.

After work has moved elsewhere, workers have copies, or have worked ahead. Torch without
workers makes each batch when it is asked for one, so a change by the loop shows in the
next batch. So a watch compares the objects with what they were then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import is_not
from typing import Any

import torch

from ...system.descriptors import Place, ReadFile, read_places, read_since
from ...system.printing import name_of
from ..observe.observation import Restriction
from .contents import difference, is_per_process, memory_of, snapshot
from .hazards import BOUND, POSITION, STATE, UNSHARED, Finding, find_bound, find_unsafe
from .reach import View, is_a, views_of, walk

SURE_LOOKS = 3
"""Looks without a change before others may join the only worker."""


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
        self._read: tuple[ReadFile, ...] = ()
        self._reused: str | None = None
        self._grows = False
        self.drew = False
        """Whether samples were seen to draw from a global generator."""

    def __enter__(self) -> None:
        self._files = read_places()

    def __exit__(self, *_: object) -> None:
        self._read = read_since(self._files)

    def note_made(self, made: Any, makers: Iterable[Any]) -> None:
        """Notice what a batch says of the `makers`.

        Its memory may be theirs, which they will reuse, and it may carry gradients.
        """
        self._reused = memory_of(made, makers)
        self._grows = any(
            is_a(part.thing, torch.Tensor) and part.thing.requires_grad
            for part in walk(made, "")
        )

    def changed(self) -> str | None:
        """Return the path of something that has changed, or None."""
        found = difference(self._before, self.subjects)
        return None if found is None else found[1]

    def verdict(self, kind: str) -> str:
        """Return why workers of a kind would make other samples; empty if unknown.

        Args:
            kind: `thread` if they share the subjects, otherwise they have copies.
        """
        if self.drew:
            return Restriction.DREW
        path = self.changed() or self._open_file or self._reused
        if path is not None:
            return Restriction.CHANGES.format(path)
        if self._grows and kind != "thread":
            return Restriction.GRADIENTS
        found = self._bound(UNSHARED if kind == "thread" else BOUND)
        return "" if found is None else Restriction.BELONGS.format(found)

    @property
    def _open_file(self) -> str | None:
        return next((file.path for file in self._read if file.is_open), None)

    def repeats(self) -> bool:
        """Whether a call of the subjects does the same again, and anywhere."""
        unsafe = (find_unsafe(each, "it") for each in self.subjects)
        return not any(unsafe) and self.changed() is None and not self._bound(BOUND)

    def _bound(self, classes: frozenset[str]) -> str | None:
        found = (find_bound(each, name_of(each), classes) for each in self.subjects)
        return next(filter(None, found), None)

    def finding(self) -> Finding | None:
        """Return the nearest thing that threads must not share, or None."""
        for each in self.subjects:
            if (unsafe := find_unsafe(each, name_of(each))) is not None:
                return unsafe
        if (path := self._open_file) is not None:
            return Finding(path, "file", POSITION)
        if (found := difference(self._before, self.subjects)) is None:
            return None
        return Finding(name_of(self.subjects[found[0]]) + found[1], "value", STATE)

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
MAX_MEMBERS = 256
"""Members of one container that a look compares."""
MAX_ALL = 1 << 12
"""Members of all containers that a look compares, the nearest ones first."""
NEAR = 32
"""Containers that each look compares, however soon it comes after the last one."""
LOOKING = 5e-3
"""The share of the trainer's time for looking at the others, too."""
SHARE = 1e-3
"""The share of the trainer's time for comparing everything, arrays included."""
MIN_PAUSE_S = 1.0


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
        parts = [part.thing for part in walk(self._subjects, "")]
        mutable = (each for each in parts if type(each) not in (tuple, frozenset))
        views = islice(chain.from_iterable(map(views_of, mutable)), MAX_VIEWS)
        self._views = list(_within(views))
        self._tensors = [
            (part, part._version)  # noqa: SLF001
            for part in parts
            if isinstance(part, torch.Tensor) and not part.is_inference()
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
        if (said := surroundings()) != self._surroundings:
            return next(name for name in said if said[name] != self._surroundings[name])
        if not touched and start < self._due_s:
            return None
        if (found := difference(self._before, self._subjects)) is not None:
            return name_of(self._subjects[found[0]]) + found[1]
        if touched:  # by something equal
            self.renew()
        else:
            self._rest(start)
        return None

    def _touched(self, views: Iterable[tuple[View, tuple[Any, ...]]]) -> bool:
        for view, before in views:
            now = _held(view)
            if len(now) != len(before) or any(map(is_not, now, before)):
                return True
        return any(each._version != was for each, was in self._tensors)  # noqa: SLF001

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


def _within(views: Iterable[View]) -> Iterator[tuple[View, tuple[Any, ...]]]:
    """Yield views with what they show now, as long as a look can compare that."""
    left = MAX_ALL
    for view in views:
        held = _held(view)
        left -= len(held)
        if left < 0:
            return
        yield view, held


def _held(view: View) -> tuple[Any, ...]:
    members: Iterator[Any] = iter(view.read())
    try:
        return tuple(islice(members, MAX_MEMBERS))
    except RuntimeError:  # another thread changed it meanwhile
        return ()
