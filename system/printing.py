"""How things print: stages as the code that creates them, objects by their names."""

from __future__ import annotations

import dis
import html
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from itertools import dropwhile, islice
from traceback import walk_stack
from types import FrameType
from typing import Any

from ..errors import is_own

# From here on, three figures would be rounded to tens, or need an exponent.
EXACT = 999.5


class Printed:
    """Shows in a notebook the same text that `print` shows."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def name_of(function: Any) -> str:
    """Return the name that the log uses for a function."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def figures(value: float) -> str:
    """Return a number with three figures, and never with an exponent."""
    return f"{value:,.0f}" if value >= EXACT else f"{value:.3g}"


class Bare(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def call(method: str, made: Any, *args: object, hidden: Collection[str] = ()) -> str:
    """Return the source of the call that created a dataclass.

    Args:
        method: the name of what was called.
        made: the dataclass; fields that differ from their defaults print by name.
        *args: positional arguments, printed first.
        hidden: fields that are not printed by name.
    """
    arguments = [repr(arg) for arg in args]
    for field in fields(made):
        value = getattr(made, field.name)
        if field.default not in (MISSING, value) and field.name not in hidden:
            printable = os.fspath(value) if isinstance(value, os.PathLike) else value
            arguments.append(f"{field.name}={printable!r}")
    return f"{method}({', '.join(arguments)})"


# The values of loader arguments that were left out; they are not printed.
UNSAID: Mapping[str, tuple[object, ...]] = {
    "drop_last": (False,),
    "num_workers": (0,),
    "pin_memory": (False,),
    "timeout": (0,),
    "prefetch_factor": (None, 2),
    "persistent_workers": (False,),
    "in_order": (True,),
    "sample_seeding": (None,),
    "thread_safe": (None,),
    "name": ("",),
}


def loader_call(loader: object) -> str:
    """Return the source of the call that made a loader, without running user code."""
    attributes = vars(loader)
    arguments = [f"<{type(attributes.get('dataset')).__name__}>"]
    batches = attributes.get("batch_sampler")
    if attributes.get("batch_size") is None and batches is not None:
        arguments.append(f"batch_sampler=<{type(batches).__name__}>")
    else:
        arguments.append(f"batch_size={attributes.get('batch_size')}")
    sampler = type(attributes.get("sampler")).__name__
    if sampler == "RandomSampler":
        arguments.append("shuffle=True")
    elif sampler not in ("SequentialSampler", "_InfiniteConstantSampler", "NoneType"):
        arguments.append(f"sampler=<{sampler}>")
    for name, values in UNSAID.items():
        if attributes.get(name, values[0]) not in values:
            arguments.append(f"{name}={attributes[name]!r}")
    return f"{type(loader).__name__}({', '.join(arguments)})"


# The name of a pipeline or loader.

# The number of frames to look at, of functions that return what they made.
MAX_CALLERS = 4
# Instructions allowed between a call and the store of its result, such as `self`.
PASSING = {
    "CACHE",
    "COPY_FREE_VARS",
    "EXTENDED_ARG",
    "LOAD_DEREF",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "NOP",
}
# Suffixes that name the kind of an object rather than the object.
KIND = re.compile(r"_?(data_?loader|loader|dl|pipeline|pipe)$", re.IGNORECASE)


def found_name() -> str:
    """Return the name of the object being made: its variable, or file and line.

        train_loader = DataLoader(...)      # "train"
        self.val = Pipeline...batch(8)      # "val"
        fit(DataLoader(...))                # "train.py:12"

    It is read from the code that makes it: the instruction after the call shows where
    its result goes. If that instruction returns the result, the one after the caller's
    call shows it. penstock reads no variable of the user's.
    """
    stack = (frame for frame, _ in walk_stack(sys._getframe(1)))  # noqa: SLF001 as `inspect` does
    users = list(islice(dropwhile(is_own, stack), MAX_CALLERS))
    if not users:
        return "pipeline"
    name = next((name for name in map(_stored_as, users) if name is not None), "")
    if name.isidentifier():
        return KIND.sub("", name) or name
    return f"{os.path.basename(users[0].f_code.co_filename)}:{users[0].f_lineno}"


def _stored_as(frame: FrameType) -> str | None:
    """Return the name that the result of a frame's current call is stored under.

    None if the result is returned; empty if it goes elsewhere.
    """
    code, argument = frame.f_code, 0
    words = code.co_code[frame.f_lasti + 2 :]
    for number, low in zip(words[::2], words[1::2], strict=True):
        kind, argument = dis.opname[number], argument << 8 | low
        if kind in {"STORE_NAME", "STORE_GLOBAL", "STORE_ATTR"}:
            return str(code.co_names[argument])
        if kind.startswith("STORE_FAST_"):  # and another instruction in one, from 3.13
            kind, argument = "STORE_FAST", argument >> 4
        if kind in {"STORE_FAST", "STORE_DEREF"}:
            return str(code._varname_from_oparg(argument))  # type: ignore[attr-defined]  # noqa: SLF001 as `dis` does
        if kind not in PASSING:
            return None if kind == "RETURN_VALUE" else ""
        if kind != "EXTENDED_ARG":
            argument = 0
    return ""
