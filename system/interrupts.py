"""Ctrl-C that comes at a bad moment: it is handled a moment later."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Put off a Ctrl-C that comes within this `with` until the block ends.

    Python raises KeyboardInterrupt between any two steps of the main thread, even
    between a fork and the assignment that records the child. Use it for steps that take
    a second at most. Several Ctrl-C count as one.

    Raises:
        KeyboardInterrupt: one came, and the program's handler raises this, as Python's
            own does.
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
