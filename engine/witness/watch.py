"""Whether the loop changes what samples come from, after work has moved elsewhere.

Workers have copies, or have worked ahead. Torch without workers makes each batch when
it is asked for one, so a change shows in the next batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import is_not
from typing import Any

import torch

from ...system.printing import name_of
from .contents import difference, snapshot
from .reach import View, views_of, walk

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
        self._subjects = tuple(subjects)
        self.renew()

    def renew(self) -> None:
        """Compare with the present from now on."""
        start = time.perf_counter()
        parts = [part.thing for part in walk(self._seen(), "")]
        views = islice(chain.from_iterable(map(views_of, parts)), MAX_VIEWS)
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

    def _seen(self) -> tuple[Any, ...]:
        kinds = ((each, type(each)) for each in self._subjects)
        return tuple(e for e, kind in kinds if not getattr(kind, "PER_PROCESS", False))

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
    members: Iterator[Any] = iter(view())
    try:
        return tuple(islice(members, MAX_MEMBERS))
    except RuntimeError:  # another thread changed it meanwhile
        return ()
