"""A forked child that works, reports line by line, and may be killed."""

from __future__ import annotations

import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["End", "Forked", "forked"]


class End:
    """One end of the line between parent and child."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw", encoding="utf-8", newline="\n")

    def tell(self, text: str) -> None:
        """Send one line."""
        self._file.write(text + "\n")
        self._file.flush()

    def hear(self) -> str:
        """Wait for the next line; return "" if the other end is closed."""
        return self._file.readline().removesuffix("\n")

    def close(self) -> None:
        """Close this end."""
        self._file.close()
        self._connection.close()


class Forked(End):
    """The child, as its parent sees it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        super().__init__(connection)
        self.pid = pid
        self._status: int | None = None

    def signal(self, number: int) -> None:
        """Send a signal, unless the child is known to have ended."""
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the child, as a power cut would, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.ended()

    def ended(self) -> int:
        """Wait for its end; return its exit code, negative: the signal's number."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


@contextmanager
def forked(work: Callable[[End], None]) -> Iterator[Forked]:
    """Run `work` in a child, and kill it at the end if it still runs."""
    ours, theirs = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        pid = os.fork()
    if pid == 0:
        ours.close()
        run(work, End(theirs))
    theirs.close()
    child = Forked(ours, pid)
    try:
        yield child
    finally:
        child.kill()
        child.close()


def run(work: Callable[[End], None], end: End) -> None:
    """Do the work in the child, which then ends without a trace of pytest."""
    code = 1
    try:
        work(end)
        code = 0
    except BaseException:  # noqa: BLE001 told to the parent
        end.tell(traceback.format_exc().replace("\n", " | "))
    finally:
        os._exit(code)
