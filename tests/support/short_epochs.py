"""Epochs of a few slow samples, read as plain numbers."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["LENGTH", "samples", "work"]

LENGTH = 160


def work() -> None:
    """Hold the GIL long enough for a loader to want workers."""
    end_s = time.perf_counter() + 0.0005
    while time.perf_counter() < end_s:
        pass


def samples(loader: Any) -> list[Any]:
    """Two epochs, as plain numbers."""
    rows = []
    for _ in range(2):
        for batch in loader:
            columns = batch if isinstance(batch, (list, tuple)) else [batch]
            rows += list(zip(*(column.tolist() for column in columns), strict=True))
    return rows
