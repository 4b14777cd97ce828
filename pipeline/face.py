"""What `Pipeline` and `DataLoader` share: a name in the log, a run, and reports.

The name is given by the user, or is that of the variable:

    train_loader = DataLoader(...)      # "train"
    self.val = Pipeline...batch(8)      # "val"
    fit(DataLoader(...))                # "train.py:12"

It is read from the code that makes it: the instruction after the call shows where its
result goes. If that instruction returns the result, the one after the caller's call
shows it. penstock reads no variable of the user's.
"""

from __future__ import annotations

import dis
import os
import re
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..system.printing import Printed
from .session import Slot

if TYPE_CHECKING:
    from ..engine.observe.observation import Observation
    from ..engine.plan import BatchPlan
    from ..engine.recipe import Recipe


class Face(Printed):
    """The verbs of every face: each has at most one run, in a slot."""

    _RUNNING: ClassVar[frozenset[str]]
    """The attributes that a copy does not get."""
    _slot: Slot
    _plan: BatchPlan | None
    _recipe: Recipe | None
    """The recipe of the next run; None if it has to be compiled again."""

    def _set_up(self) -> None:
        """Set all attributes that belong to a run to their empty values."""
        raise NotImplementedError

    def _begin_without_run(self, name: str) -> None:
        """Begin without a run; a later one is closed when the face is dropped."""
        self._slot, self._plan, self._recipe = Slot(name), None, None
        weakref.finalize(self, self._slot.finalise)

    def _tunable(self) -> Recipe:
        """Return the recipe that saved settings are for."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy, without any run."""
        return {name: v for name, v in vars(self).items() if name not in self._RUNNING}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._set_up()

    @property
    def plan(self) -> BatchPlan | None:
        """The stamp of the last batch handed over.

        None before the first batch, and where torch's own workers load.
        """
        return self._plan

    def load_autotune(
        self, path: str | os.PathLike[str], name: str | None = None
    ) -> None:
        """Start the next loop with the settings that an earlier tuned run ended with.

        Autotune may be on or off. Settings that the run found for other regimes (batch
        and image sizes of a schedule) take effect when those regimes begin. Settings
        found with another number of usable cores are not used, and the log says so.

        Args:
            path: `<prefix>_<rank>.json`, as written with `set_enable_autotune(True,
                prefix)`. Stages that the file does not know keep their settings.
            name: the name of the pipeline or loader in the file (default: the name of
                this one, or else the only one in the file that shares stages, or the
                kind of dataset, with it).

        Raises:
            SpecError: `path` is not such a file, or knows no stage of this pipeline; or
                torch's own workers load.
        """
        self._slot.load(path, name, self._tunable())

    def stats(self) -> Observation | None:
        """Return all counters since the engine started.

        None before the first loop and after `close`, and where torch's own workers
        load.
        """
        run = self._slot.run
        return None if run is None else run.read().bounded

    def close(self) -> None:
        """Stop penstock's workers and free their memory. It may be iterated again.

        A cache keeps its samples on disk and drops those in RAM.
        """
        self._slot.close()
        if self._recipe is not None:
            for cache in self._recipe.caches:
                cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The name of a face.

MAX_CALLERS = 4
"""The number of frames to look at, of functions that return what they made."""
PACKAGE = __name__.partition(".pipeline.")[0] + "."
STORES_LOCAL = {"STORE_FAST", "STORE_DEREF"}
STORES_NAMED = {"STORE_NAME", "STORE_GLOBAL", "STORE_ATTR"}
PASSING = {
    "CACHE",
    "COPY_FREE_VARS",
    "EXTENDED_ARG",
    "LOAD_DEREF",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "NOP",
}
"""Instructions allowed between a call and the store of its result, such as `self`."""
KIND = re.compile(r"_?(data_?loader|loader|dl|pipeline|pipe)$", re.IGNORECASE)
"""Suffixes that name the kind of an object rather than the object."""


def found_name() -> str:
    """Return the name of the object being made: a variable, or file and line."""
    frame = _users(sys._getframe(1))  # noqa: SLF001 as `inspect` does
    if frame is None:
        return "pipeline"
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    for _ in range(MAX_CALLERS):
        if frame is None:
            break
        name = _stored_as(frame)
        if name is None:
            frame = frame.f_back
        elif name.isidentifier():
            return KIND.sub("", name) or name
        else:
            break
    return place


def _users(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not of this package."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(PACKAGE):
            return frame
        frame = frame.f_back
    return None


def _stored_as(frame: FrameType) -> str | None:
    """Return the name that the result of a frame's current call is stored under.

    None if the result is returned; empty if it goes elsewhere.
    """
    code, argument = frame.f_code, 0
    words = code.co_code[frame.f_lasti + 2 :]
    for number, low in zip(words[::2], words[1::2], strict=True):
        kind, argument = dis.opname[number], argument << 8 | low
        if kind in STORES_NAMED:
            return str(code.co_names[argument])
        if kind.startswith("STORE_FAST_"):  # and another instruction in one, from 3.13
            kind, argument = "STORE_FAST", argument >> 4
        if kind in STORES_LOCAL:
            return str(code._varname_from_oparg(argument))  # type: ignore[attr-defined]  # noqa: SLF001 as `dis` does
        if kind not in PASSING:
            return None if kind == "RETURN_VALUE" else ""
        if kind != "EXTENDED_ARG":
            argument = 0
    return ""
