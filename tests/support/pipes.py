"""Receiving from a pipe, one object after another."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from penstock.engine.far.child import Pipe

__all__ = ["receive"]

_arrived: WeakKeyDictionary[Pipe, list[Any]] = WeakKeyDictionary()


def receive(end: Pipe) -> Any:
    """Return the next object that arrives, waiting for it."""
    arrived = _arrived.setdefault(end, [])
    if not arrived:
        arrived += end.receive_all()
    return arrived.pop(0)
