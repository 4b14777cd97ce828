"""The name of a pipeline or loader in the log: given by the user, or its variable.

    train_loader = DataLoader(...)      # "train"
    self.val = Pipeline...batch(8)      # "val"
    fit(DataLoader(...))                # "train.py:12"

The name is read from the code that makes it: the instruction after the call shows where
its result goes. If that instruction returns the result, the one after the caller's call
shows it. penstock reads no variable of the user's.
"""

from __future__ import annotations

import dis
import os
import re
import sys
from types import FrameType

__all__ = ["found_name"]

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
