"""What the processes of a test do when it hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

__all__ = ["ended_when_stuck"]

WRITTEN_S = 0.5
"""Until a process has written its stacks."""


@contextmanager
def ended_when_stuck(limit_s: float) -> Iterator[Path]:
    """After `limit_s`, write the stacks of all processes and kill the children.

    Whoever waits for a child that is gone goes on, so the test ends, and can show the
    file with the stacks. The file is empty if the block ends in time. The children must
    be forks of this process: one that is not dies of the signal without a stack.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        timer = threading.Timer(limit_s, end, (file, before))
        timer.daemon = True
        timer.start()
        try:
            yield Path(file.name)
        finally:
            timer.cancel()
            timer.join()
            faulthandler.unregister(signal.SIGUSR1)


def end(file: IO[str], before: set[int]) -> None:
    """Write the stacks, then kill the children that were not there before."""
    descendants = psutil.Process().children(recursive=True)
    children = [child for child in descendants if child.pid not in before]
    for pid in (os.getpid(), *(child.pid for child in children)):
        file.write(f"process {pid}\n")
        file.flush()
        os.kill(pid, signal.SIGUSR1)
        time.sleep(WRITTEN_S)
    for child in children:
        child.kill()
