"""How things print: stages as the code that creates them, figures as tables."""

from __future__ import annotations

import html
import os
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

EXACT = 999.5
"""From here on, three figures would be rounded to tens, or need an exponent."""


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
    given = [repr(arg) for arg in args]
    for field in fields(made):
        value = getattr(made, field.name)
        if field.default not in (MISSING, value) and field.name not in hidden:
            shown = os.fspath(value) if isinstance(value, os.PathLike) else value
            given.append(f"{field.name}={shown!r}")
    return f"{method}({', '.join(given)})"


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
"""The values of loader arguments that were left out; they are not printed."""


def loader_call(loader: object) -> str:
    """Return the source of the call that made a loader, without running user code."""
    held = vars(loader)
    given = [f"<{type(held.get('dataset')).__name__}>"]
    batches = held.get("batch_sampler")
    if held.get("batch_size") is None and batches is not None:
        given.append(f"batch_sampler=<{type(batches).__name__}>")
    else:
        given.append(f"batch_size={held.get('batch_size')}")
    sampler = type(held.get("sampler")).__name__
    if sampler == "RandomSampler":
        given.append("shuffle=True")
    elif sampler not in ("SequentialSampler", "_InfiniteConstantSampler", "NoneType"):
        given.append(f"sampler=<{sampler}>")
    for name, unsaid in UNSAID.items():
        if held.get(name, unsaid[0]) not in unsaid:
            given.append(f"{name}={held[name]!r}")
    return f"{type(loader).__name__}({', '.join(given)})"
