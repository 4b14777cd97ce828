"""Waiting for what will come true soon, on a busy machine later."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

__all__ = ["until", "until_collected"]

LIMIT_S = 60.0
POLL_S = 0.001


def until(true: Callable[[], bool]) -> bool:
    """Wait until something is true, and return whether it is at the end of a minute."""
    end_s = time.monotonic() + LIMIT_S
    while not true() and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return true()


def until_collected(true: Callable[[], bool]) -> bool:
    """Collect until something is true.

    Once may be too few: `gc.collect` does nothing while another thread collects.
    """

    def collects() -> bool:
        gc.collect()
        return true()

    return until(collects)
