"""How a worker process ended, in words: its signal, and who may have sent it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...core.chunk import Chunk

__all__ = [
    "LIMIT",
    "Blame",
    "cause_of",
    "is_stopped",
    "oom_kills",
]

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def cause_of(status: int | None, kills_before: int, kills_now: int) -> str:
    """Say how a worker ended.

    Args:
        status: as waitpid has it; None where the template was gone, too.
        kills_before: `oom_kills()` when the worker began.
        kills_now: and after it ended.
    """
    if status is None:
        return "its exit status is not known, as the template ended, too"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    text = f"killed by signal {-code} ({NAMES.get(-code, 'real-time')})"
    if -code != signal.SIGKILL:
        return text
    if kills_now > kills_before:
        return (
            f"{text} by the system's out-of-memory killer, as the memory limit of this "
            "control group was reached"
        )
    return f"{text}; not by a memory limit of this control group"


NAMES = {int(number): number.name for number in signal.Signals}


def oom_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return how many processes of this control group the kernel ended for memory.

    Both versions of control groups count them: `memory.events` in version 2,
    `memory.oom_control` in version 1.

    Args:
        proc: where the process file system is mounted.
        cgroup: where control groups are mounted.
    """
    return max(_counts(proc, cgroup), default=0)


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is stopped, as by SIGSTOP or a debugger."""
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"


def _counts(proc: Path, cgroup: Path) -> Iterator[int]:
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        inside = path.strip("/")
        if not controllers:
            yield from _count(cgroup / inside / "memory.events")
            yield from _count(cgroup / "unified" / inside / "memory.events")
        elif "memory" in controllers.split(","):
            yield from _count(cgroup / "memory" / inside / "memory.oom_control")


def _count(path: Path) -> Iterator[int]:
    for line in _lines(path):
        name, _, number = line.partition(" ")
        if name == "oom_kill":
            yield int(number)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# Which samples were in hand when a worker died, and how often. Pure.
#
# A suspect is run again alone, so a second death tells it from those that only happened
# to be in the same process. One that gets through is acquitted.

LIMIT = 5
"""How many workers a sample may take with it before it is given up."""


class Blame:
    """Suspects by address, `(step, row)`."""

    def __init__(self) -> None:
        self._deaths: dict[tuple[int, int], list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def add(self, chunk: Chunk, offsets: Iterable[int], death: str) -> None:
        """Blame these rows of a chunk for a death, told in words."""
        for offset in offsets:
            at = chunk.step, chunk.first_row + offset
            self._deaths.setdefault(at, []).append(death)

    def acquit(self, chunk: Chunk) -> None:
        """These rows are done."""
        if self._deaths:
            first, step = chunk.first_row, chunk.step
            for row in range(first, first + len(chunk)):
                self._deaths.pop((step, row), None)

    def first(self, chunk: Chunk) -> int | None:
        """Return the offset of the first suspect in a chunk."""
        if not self._deaths:
            return None
        step, first = chunk.step, chunk.first_row
        rows = range(len(chunk))
        return next((at for at in rows if (step, first + at) in self._deaths), None)

    def verdict(self, chunk: Chunk) -> str | None:
        """Return the last death of a chunk's first row, if that is to be given up."""
        deaths = self._deaths.get((chunk.step, chunk.first_row), [])
        return deaths[-1] if len(deaths) >= LIMIT else None
