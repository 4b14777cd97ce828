"""Whether samples may be made elsewhere: by copies of the objects that make them here.

Threads share the user's objects, and processes have copies of them. Neither may change
a sample. So a witness records what the objects consist of before the first sample,
learns what was seen while samples were made, and is asked by whoever chooses a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...system.descriptors import Place, ReadFile, read_places, read_since
from ...system.printing import name_of
from .contents import difference, memory_of, snapshot
from .hazards import BOUND, POSITION, STATE, UNSHARED, Finding, find_bound, find_unsafe
from .reach import is_a, walk

CHANGES = (
    "`{}` changes while samples are made, and each worker would change its own copy;"
    " set the number of workers yourself if that is acceptable"
)
BELONGS = (
    "{} does not work in workers that share it, or have copies; create it on first use,"
    " so that each worker has its own, and set the number of workers yourself"
)
DREW = (
    "it draws from a global random generator, and each worker would draw from its own;"
    " draw from `rng`, or set the number of workers yourself if that is acceptable"
)
GRADIENTS = (
    "its samples carry gradients, which would end in the workers; set the number of"
    " workers yourself if that is acceptable"
)
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
            return DREW
        path = self.changed() or self._open_file or self._reused
        if path is not None:
            return CHANGES.format(path)
        if self._grows and kind != "thread":
            return GRADIENTS
        found = self._bound(UNSHARED if kind == "thread" else BOUND)
        return "" if found is None else BELONGS.format(found)

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
