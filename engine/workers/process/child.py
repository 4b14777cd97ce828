"""One worker process, as the trainer knows it: its pipe, its tasks, how it fares."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ...batch.layout import Layout
from ...core.chunk import Chunk, Lease
from ...core.metrics import WorkerMeter
from .deaths import cause_of, is_stopped, oom_kills
from .pipe import Mailbox
from .status_page import ALL_ROWS, STACK_SIGNAL, Held, StatusPage

__all__ = [
    "Child",
    "Errand",
    "Watchdog",
]

MAX_LINES = 40
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
        self, mailbox: Mailbox, status_page: StatusPage, generation: int, number: int
    ) -> None:
        self.mailbox = mailbox
        self.status_page = status_page
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
        status = self.status_page.status
        return not self.pid and status is not None and os.WIFEXITED(status)

    def next_task(self) -> int:
        """Return a number for a task, not used before."""
        self._tasks += 1
        return self._tasks

    def held(self) -> dict[int, Held]:
        """Return what it has in hand, by task."""
        return {held.task: held for held in self.status_page.held()}

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

    def how_it_ended(self) -> str:
        """Say how it ended."""
        if self.stuck is not None:
            how = "replaced as it was stuck"
            if self._was_stopped:
                how += ", stopped by a signal (SIGSTOP, or a debugger)"
        else:
            how = cause_of(self.status_page.status, self._kills, oom_kills())
        lines = self.status_page.text().strip().splitlines()[:MAX_LINES]
        text = f"worker process {self.pid or '(starting)'} {how}"
        return "\n".join([f"{text}; it wrote:", *lines]) if lines else text

    def close(self) -> None:
        """Close the pipe to it, which ends it, and let go of its page."""
        self.mailbox.close()
        self.status_page.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _signal(self, number: int) -> None:
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def __repr__(self) -> str:
        return f"<Child {self.pid or 'starting'}: {len(self.errands)} tasks>"


# The time limit of a sample: who takes longer shows its stacks and is replaced.

STACKS_NS = 300_000_000
"""How long a stuck worker is given to show its stacks."""
GONE_NS = 2_000_000_000
"""How long a killed one may take to be gone, before it is counted as such."""


class Watchdog:
    """Watches the children of one segment.

    Args:
        timeout_s: how long a sample may take; None: for ever.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._limit_ns = None if timeout_s is None else int(timeout_s * 1e9)
        self.timeout_s = timeout_s

    def look(self, children: Iterable[Child]) -> tuple[float | None, list[Child]]:
        """Do what is due now.

        Returns:
            Seconds until the next look, None if there is nothing to wait for; and the
            children that were killed and do not end as they should.
        """
        if self._limit_ns is None:
            return None, []
        now_ns = time.monotonic_ns()
        due = [(self._look_at(child, now_ns), child) for child in children]
        times = [at_ns for at_ns, _ in due if at_ns is not None]
        lost = [child for _, child in due if gone(child, now_ns)]
        if not times:
            return None, lost
        return max(0.0, (min(times) - now_ns) / 1e9), lost

    def _look_at(self, child: Child, now_ns: int) -> int | None:
        """Return when to look at a child again."""
        if child.killed_ns:
            return child.killed_ns + GONE_NS
        if child.asked_ns:
            return self._after_asking(child, now_ns)
        first = self._first_due(child)
        if first is None:
            return None
        due_ns, number, row = first
        if now_ns < due_ns:
            return due_ns
        child.stuck, child.asked_ns = (number, row), now_ns
        child.ask_for_stacks()
        return now_ns + STACKS_NS

    def _after_asking(self, child: Child, now_ns: int) -> int:
        if now_ns < child.asked_ns + STACKS_NS:
            return child.asked_ns + STACKS_NS
        child.killed_ns = now_ns
        child.kill()
        return now_ns + GONE_NS

    def _first_due(self, child: Child) -> tuple[int, int, int] | None:
        """Return the deadline that comes first: when, and of which task and row."""
        assert self._limit_ns is not None
        if not child.errands or not child.pid:  # it is starting
            return None
        limit_ns = self._limit_ns
        # A lane may stop with a task in hand that it has told the outcome of.
        held = {
            number: at for number, at in child.held().items() if number in child.errands
        }
        due = [(at.since_ns + limit_ns, number, at.row) for number, at in held.items()]
        if len(held) < child.lanes:  # one is free for those that wait, yet they do
            moved_ns = child.status_page.moved_ns()
            due += [
                (max(errand.sent_ns, moved_ns) + limit_ns, number, ALL_ROWS)
                for number, errand in child.errands.items()
                if number not in held
            ]
        return min(due, default=None)


def gone(child: Child, now_ns: int) -> bool:
    """Whether a child was killed so long ago that it is not waited for any more."""
    return bool(child.killed_ns) and now_ns >= child.killed_ns + GONE_NS
