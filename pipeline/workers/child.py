"""One worker process, as the trainer knows it: its pipe, its tasks, how it fares."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass

from ..chunk import Chunk, Lease
from ..layout import Layout
from ..metrics import WorkerMeter
from .death import cause_of, is_stopped, oom_kills
from .hands import ALL_ROWS, STACK_SIGNAL, Hands, Held
from .mailbox import Mailbox

__all__ = ["Child", "Errand"]

MOST_LINES = 40
"""Of a stack that are told."""


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """A lease that a child works on, or the first rows of one."""

    lease: Lease
    chunk: Chunk
    """The rows sent."""
    meter: WorkerMeter
    """The worker's: a child has as many as it has errands."""
    sent_ns: int


class Child:
    """One worker process. It belongs to the selector thread."""

    def __init__(
        self, mailbox: Mailbox, hands: Hands, generation: int, number: int
    ) -> None:
        self.mailbox = mailbox
        self.hands = hands
        self.generation = generation
        self.number = number
        self.pid = 0
        """0 until it has said so, which is the first that it does."""
        self.layout: Layout | None = None
        """How the rows of its last task with a place for them lie."""
        self.lanes = 1
        """Threads it was told to have."""
        self.errands: dict[int, Errand] = {}
        self.slabs: set[int] = set()
        """Keys of the slabs it has mapped."""
        self.stuck: tuple[int, int] | None = None
        """Task and row that took too long."""
        self.asked_ns = self.killed_ns = 0
        """When it was asked for its stacks, and when it was killed for being stuck."""
        self.writing = False
        """Whether the selector looks for room in its pipe."""
        self._process = -1
        self._tasks = 0
        self._kills = oom_kills()
        self._was_stopped = False

    def hello(self, pid: int) -> None:
        """It is at work."""
        self.pid = pid
        with contextlib.suppress(ProcessLookupError):  # it was, until just now
            self._process = os.pidfd_open(pid)

    @property
    def failed(self) -> bool:
        """Whether it ended by itself before it was at work."""
        status = self.hands.status
        return not self.pid and status is not None and os.WIFEXITED(status)

    def next_task(self) -> int:
        """Return a number for a task, not used before."""
        self._tasks += 1
        return self._tasks

    def held(self) -> dict[int, Held]:
        """Return what it has in hand, by task."""
        return {held.task: held for held in self.hands.held()}

    def ask_for_stacks(self) -> None:
        """Have its stacks written to its page: none come from one that is stopped."""
        self._was_stopped = is_stopped(self.pid)
        self._signal(STACK_SIGNAL)

    def hang_up(self) -> None:
        """Close the pipe to it: it ends, once it has put away what it holds."""
        self.mailbox.close()

    def ends_within(self, wait_s: float) -> bool:
        """Wait until it has ended, so long at most; whether it has."""
        if self._process < 0:
            return False
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        return bool(ended.poll(1000 * max(0.0, wait_s)))

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._signal(signal.SIGKILL)

    def suspects(self, number: int) -> range | tuple[int, ...]:
        """Return which rows of a task may be to blame for its end."""
        rows = range(len(self.errands[number].chunk))
        if self.stuck is not None:
            task, row = self.stuck
            if task != number:
                return ()
            return rows if row == ALL_ROWS else (row,)
        held = self.held().get(number)
        if held is None:
            return ()
        return rows if held.row not in rows else (held.row,)

    def obituary(self) -> str:
        """Say how it ended."""
        if self.stuck is not None:
            how = "replaced as it was stuck"
            if self._was_stopped:
                how += ", stopped by a signal (SIGSTOP, or a debugger)"
        else:
            how = cause_of(self.hands.status, self._kills, oom_kills())
        lines = self.hands.text().strip().splitlines()[:MOST_LINES]
        text = f"worker process {self.pid or '(starting)'} {how}"
        return "\n".join([f"{text}; it wrote:", *lines]) if lines else text

    def close(self) -> None:
        """Close the pipe to it, which ends it, and let go of its page."""
        self.mailbox.close()
        self.hands.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _signal(self, number: int) -> None:
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def __repr__(self) -> str:
        return f"<Child {self.pid or 'starting'}: {len(self.errands)} tasks>"
