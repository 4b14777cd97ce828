"""Ctrl-C that comes at a bad moment: it is handled a moment later."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Handle a Ctrl-C that comes within this `with` at its end.

    Python raises KeyboardInterrupt between any two steps of the main thread, also
    between a fork and the assignment that says to whom the child belongs. For steps
    that take a second at most.
    """
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler):  # nothing is raised here
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
