"""A process that can start no more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_more_threads"]


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let the system refuse new threads: none has room for such a stack."""
    before = threading.stack_size(1 << 50)
    try:
        yield
    finally:
        threading.stack_size(before)
