"""Callbacks that do not keep their object alive.

A part that calls back the whole it belongs to makes a circle of them. Then the memory
of a dataset that the whole refers to waits for the garbage collector.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=Callable[..., Any])


def weakly(method: C) -> C:
    """Return a function that calls a bound method; None once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return cast("C", call)
