"""How a child process ended, in words, and which samples may have caused it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import psutil

from ..core.chunk import Chunk

__all__ = [
    "LIMIT",
    "Blame",
    "cause_of",
    "is_stopped",
]


def cause_of(status: int | None, kills_before: int, kills_now: int) -> str:
    """Return how a child ended: its signal, and who may have sent it.

    Args:
        status: what waitpid reported; None if the fork server had ended, too.
        kills_before: `oom_kills()` when the child started.
        kills_now: the same after it ended.
    """
    if status is None:
        return "its exit status is unknown, because the fork server ended, too"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    text = f"killed by signal {-code} ({NAMES.get(-code, 'real-time')})"
    if -code != signal.SIGKILL:
        return text
    if kills_now > kills_before:
        return (
            f"{text} by the system's out-of-memory killer, because this control group"
            " reached its memory limit"
        )
    return f"{text}; not by a memory limit of this control group"


NAMES = {int(number): number.name for number in signal.Signals}


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


LIMIT = 5
"""Workers that a sample may kill before it is given up."""


class Blame:
    """Samples being processed when a worker died, by address: `(step, row)`.

    A suspect runs again, alone in its process. A further death then counts against it,
    and not against samples that only happened to be beside it. A suspect that succeeds
    is acquitted.
    """

    def __init__(self) -> None:
        self._deaths: dict[tuple[int, int], list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def add(self, chunk: Chunk, offsets: Iterable[int], death: str) -> None:
        """Blame these rows of a chunk for a death, described in words."""
        for offset in offsets:
            at = chunk.step, chunk.first_row + offset
            self._deaths.setdefault(at, []).append(death)

    def acquit(self, chunk: Chunk) -> None:
        """Clear these rows: they are done."""
        if self._deaths:
            first, step = chunk.first_row, chunk.step
            for row in range(first, first + len(chunk)):
                self._deaths.pop((step, row), None)

    def first(self, chunk: Chunk) -> int | None:
        """Return the offset of the first suspect in a chunk, or None."""
        if not self._deaths:
            return None
        step, first = chunk.step, chunk.first_row
        rows = range(len(chunk))
        return next((at for at in rows if (step, first + at) in self._deaths), None)

    def verdict(self, chunk: Chunk) -> str | None:
        """Return the last death of a chunk's first row, if that must be given up."""
        deaths = self._deaths.get((chunk.step, chunk.first_row), [])
        return deaths[-1] if len(deaths) >= LIMIT else None
