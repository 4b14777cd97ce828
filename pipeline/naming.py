"""What a pipeline or loader is called in the log: as the user says, or stores it.

train_loader = DataLoader(...)      # "train"
self.val = Pipeline...batch(8)      # "val"
fit(DataLoader(...))                # "train.py:12"

The name is read from the code that makes it: the instruction behind the call says where
its result goes, and where that returns it, the one behind the caller's call does. No
variable of the user's is looked at.
"""

from __future__ import annotations

import dis
import os
import re
import sys
from types import FrameType
from typing import NamedTuple

__all__ = ["found_name"]

MAX_CALLERS = 4
"""That are looked at, of functions that return what they made."""
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
"""What may stand between a call and where its result goes: `self`, to be stored in."""
KIND = re.compile(r"_?(data_?loader|loader|dl|pipeline|pipe)$", re.IGNORECASE)
"""Says what it is, not which."""


class Goes(NamedTuple):
    """Where the result of a call goes."""

    name: str = ""
    """It is stored under."""
    returned: bool = False


def found_name() -> str:
    """Return what the user calls what is made now: a variable, or file and line."""
    frame = _users(sys._getframe(1))  # noqa: SLF001 as `inspect` does
    if frame is None:
        return "pipeline"
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    for _ in range(MAX_CALLERS):
        if frame is None:
            break
        goes = _goes(frame)
        if goes.name.isidentifier():
            return KIND.sub("", goes.name) or goes.name
        if not goes.returned:
            break
        frame = frame.f_back
    return place


def _users(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not of this package."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(PACKAGE):
            return frame
        frame = frame.f_back
    return None


def _goes(frame: FrameType) -> Goes:
    """Return where the result goes of the call that a frame is in."""
    code, argument = frame.f_code, 0
    words = code.co_code[frame.f_lasti + 2 :]
    for number, low in zip(words[::2], words[1::2], strict=True):
        kind, argument = dis.opname[number], argument << 8 | low
        if kind in STORES_NAMED:
            return Goes(code.co_names[argument])
        if kind.startswith("STORE_FAST_"):  # and another instruction in one, from 3.13
            kind, argument = "STORE_FAST", argument >> 4
        if kind in STORES_LOCAL:
            return Goes(code._varname_from_oparg(argument))  # type: ignore[attr-defined]  # noqa: SLF001 as `dis` does
        if kind not in PASSING:
            return Goes(returned=kind == "RETURN_VALUE")
        if kind != "EXTENDED_ARG":
            argument = 0
    return Goes()
