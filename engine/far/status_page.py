"""What a child process is working on, in memory that outlives it.

A child, its parent and the trainer share a page or two. A worker posts the
current sample of each lane, the parent posts how the child ended, and faulthandler
writes stacks behind that. So when a worker dies or hangs, the trainer can report where.

    word 0          how it ended: 1 + the status of waitpid, or 0 while unknown
    word 1          until when its lanes rest before their next sample, or 0
    words 8, 9, ..  four per lane: 1 + task or 0, row of the task, since when, 1 if it
                    rests
    then            text
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...system.shared_memory import shared_file
from .slabs import map_shared

WORDS = 2048
TEXT_AT = 8 * WORDS
REST = 1
FIRST, EACH = 8, 4
MAX_LANES = (WORDS - FIRST) // EACH
ALL_ROWS = -1
"""Stands for all rows of a task, when they are read at once."""
REST_LOOK_S = 0.0005
"""How often a lane that rests looks whether it may go on."""
STACK_SIGNAL = signal.SIGRTMAX - 2
"""Asks a worker for its stacks. No library is known to use this signal."""


@dataclass(frozen=True, slots=True)
class Held:
    """A sample that a worker is working on."""

    task: int
    row: int
    """Its row within the task, or `ALL_ROWS`."""
    since_ns: int
    """By the monotonic clock, which all processes share."""


class LaneStatus:
    """One lane's words: posts which sample it is working on."""

    def __init__(
        self,
        words: memoryview[int],
        lane: int,
        ended: Callable[[], object] | None = None,
    ) -> None:
        self._words, self._ended = words, ended
        self._at = FIRST + EACH * lane
        self._first = 0

    def begin(self, task: int, first: int = 0) -> None:
        """Note the task that the lane starts, without a particular row yet.

        Args:
            task: its number.
            first: the row of the task that row 0 is in calls of `each`.
        """
        words, at, self._first = self._words, self._at, first
        if words[REST]:
            self._rest()
        words[at + 1] = ALL_ROWS
        words[at + 2] = time.monotonic_ns()
        words[at] = task + 1

    def end(self) -> None:
        """Note that the lane is idle, and since when."""
        self._words[self._at + 2] = time.monotonic_ns()
        self._words[self._at] = 0
        if self._ended is not None:
            self._ended()

    def all(self) -> None:
        """Note that several rows of the task are worked on at once, from now on."""
        self._words[self._at + 2] = time.monotonic_ns()
        self._words[self._at + 1] = ALL_ROWS

    def each(self, items: Iterable[Any], rows: Sequence[int]) -> Iterator[Any]:
        """Yield `items`, posting the row of each as it is taken."""
        words, at, clock = self._words, self._at, time.monotonic_ns
        first = self._first
        for row, item in zip(rows, items, strict=False):
            if words[REST]:
                self._rest()
            words[at + 2] = clock()
            words[at + 1] = first + row
            yield item
        words[at + 1] = ALL_ROWS

    def _rest(self) -> None:
        """Rest for as long as the trainer wants: it measures itself alone.

        The end is a moment, not a message, so nobody rests on if the trainer dies.
        """
        words, at, clock = self._words, self._at, time.monotonic_ns
        words[at + 1] = ALL_ROWS  # the last one is over
        words[at + 3] = 1
        while words[REST] > clock():
            words[at + 2] = clock()  # a rest does not count as time at a sample
            time.sleep(REST_LOOK_S)
        words[at + 3] = 0


class StatusPage:
    """One child's page. A worker opens the trainer's by its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._words = memoryview(map_shared(descriptor, TEXT_AT)).cast("B").cast("q")

    @classmethod
    def make(cls) -> StatusPage:
        """Create an empty page.

        Raises:
            OSError: there is no memory for it, or no file descriptor.
        """
        descriptor = shared_file("penstock status", TEXT_AT)
        try:
            os.lseek(descriptor, TEXT_AT, os.SEEK_SET)  # stacks are written from here
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def lane(
        self, number: int, ended: Callable[[], object] | None = None
    ) -> LaneStatus:
        """Return the part of one lane; `ended` is called at the end of each task."""
        return LaneStatus(self._words, number, ended)

    def held(self) -> list[Held]:
        """Return the samples being worked on, or those at the worker's death."""
        words = self._words
        places = range(FIRST, FIRST + EACH * MAX_LANES, EACH)
        return [
            Held(words[at] - 1, words[at + 1], words[at + 2])
            for at in places
            if words[at]
        ]

    def rest(self, until_ns: int) -> None:
        """Let the lanes rest before their next sample until this moment; 0: no more."""
        self._words[REST] = until_ns

    @property
    def at_work(self) -> bool:
        """Whether a lane is at a sample."""
        tasks, rests = (self._words[at::EACH].tolist() for at in (FIRST, FIRST + 3))
        return any(t and not r for t, r in zip(tasks, rests, strict=True))

    def moved_ns(self) -> int:
        """Return when a lane last started or ended something; 0 if none has."""
        return max(self._words[FIRST + 2 : FIRST + EACH * MAX_LANES : EACH])

    @property
    def status(self) -> int | None:
        """How the worker ended, as reported by waitpid; None while unknown."""
        return self._words[0] - 1 if self._words[0] else None

    def text(self) -> str:
        """Return what faulthandler wrote: stacks, at a crash or on request."""
        size = os.fstat(self.descriptor).st_size - TEXT_AT
        return os.pread(self.descriptor, max(size, 0), TEXT_AT).decode(errors="replace")

    def close(self) -> None:
        """Release the page. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._words.release()


def post_status(descriptor: int, status: int) -> None:
    """In the parent: record on a child's page how it ended."""
    os.pwrite(descriptor, struct.pack("q", status + 1), 0)
