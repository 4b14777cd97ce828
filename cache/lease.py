"""Who may write to a database: one process of the host at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["leased"]

PATIENCE_S = 30.0
PAUSE_S = 0.002
"""Between two looks at a lock: none of another process' can be waited for so long and
no longer."""


@contextmanager
def leased(folder: Path) -> Iterator[None]:
    """Be the one that writes; it ends with the process that has it, however that ends.

    Raises:
        TimeoutError: another has it, and was stopped in the middle.
    """
    lease = os.open(folder / "writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for(lease)
        yield
    finally:
        fcntl.flock(lease, fcntl.LOCK_UN)  # a child forked meanwhile has it open
        os.close(lease)


def wait_for(lease: int) -> None:
    """Lock it; not for ever."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                text = (
                    f"another process has been writing for {PATIENCE_S:g} s: stopped?"
                )
                raise TimeoutError(text) from None
        time.sleep(PAUSE_S)
