"""A child process of ours, from fork to end, and worker processes in particular.

Every child has a pipe to its parent, and ends when the pipe is closed; its status page
records how it ended. A worker process also has tasks, and a watchdog if samples have a
time limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
import psutil

from ...system.forking import flush, fork
from ...system.resources import oom_kills
from ..core.metrics import WorkerMeter
from .assigned_engine import Assignment, Share
from .far_pool import FarChild
from .handover import Unpacker, dumps, plain_dumps
from .pipe import Pipe, kept
from .status_page import ALL_ROWS, STACK_SIGNAL, Held, StatusPage

MAX_LINES = 40
"""Lines of a stack that are shown."""


def fork_child(body: Callable[[], None], *ends: Pipe) -> int:
    """Fork a process that runs `body` and keeps these pipe ends; return its pid.

    Raises:
        OSError: the process limit is reached, or memory is short.
    """
    with kept(*ends):
        pid = fork()
    if pid == 0:
        run_child(body)
    return pid


def run_child(body: Callable[[], None]) -> NoReturn:
    """Run a child process; never return into the code it was forked from."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.disable()  # its stacks go to its page, if it has one
        gc.freeze()  # this process must not collect or finalise inherited objects
        body()
        status = 0
    except EOFError:
        status = 0
    except BaseException:  # noqa: BLE001 nobody above could report it
        traceback.print_exc()
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """End this process at once, without finalising anything it inherited."""
    flush()
    os._exit(status)


class Child:
    """A child process, seen from its parent.

    Args:
        pipe: the parent's end.
        pid: 0 until it is known.
    """

    def __init__(self, pipe: Pipe, pid: int = 0) -> None:
        self.pipe = pipe
        self.pid = 0
        self._process = -1
        if pid:
            self.hello(pid)

    @staticmethod
    def fork(body: Callable[[Pipe], None]) -> Child:
        """Fork a child that runs `body` with its end of the pipe.

        Raises:
            OSError: a limit of processes or descriptors is reached, or memory is short.
        """
        ours, theirs = Pipe.pair()
        pid = fork_child(partial(body, theirs), theirs)
        theirs.close()
        return Child(ours, pid)

    def hello(self, pid: int) -> None:
        """Note that it is at work, and its pid."""
        self.pid = pid
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            self._process = os.pidfd_open(pid)

    def ends_within(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for it to end; return whether it has."""
        if self._process < 0:
            return False
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        return bool(ended.poll(1000 * max(0.0, wait_s)))

    def kill(self) -> None:
        """Kill it at once, whatever it is doing."""
        self._signal(signal.SIGKILL)

    def end(self, wait_s: float) -> None:
        """End a child of this very process; wait until it is gone. Idempotent.

        Args:
            wait_s: how long it may take to end by itself once its pipe is closed, in
                seconds.
        """
        self.pipe.close()
        if self._process >= 0:
            if not self.ends_within(wait_s):
                self.kill()
            # Somebody who waits for any child may have been faster.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        """Close the pipe, which ends the child. Idempotent."""
        self.pipe.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _signal(self, number: int) -> None:
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)


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


class WorkerChild(Child, FarChild):
    """A worker process."""

    def __init__(
        self,
        pipe: Pipe,
        status_page: StatusPage,
        generation: int,
        number: int,
        meter: WorkerMeter,
    ) -> None:
        Child.__init__(self, pipe)
        FarChild.__init__(self, number, generation, meter)
        self.status_page = status_page
        self.share = Share(0, 0)
        """Its part of all workers, as sent to it."""
        self.unpacker = Unpacker()
        """Unpacks what it makes."""
        self.stuck: tuple[int, int] | None = None
        """Task and row that took too long."""
        self.asked_ns = self.killed_ns = 0
        """When it was asked for its stacks, and when it was killed for being stuck."""
        self.writing = False
        """Whether the selector watches its pipe for room."""
        self._was_stopped = False
        self._kills = oom_kills()

    @property
    def failed(self) -> bool:
        """Whether it exited by itself before it was at work."""
        status = self.status_page.status
        return not self.pid and status is not None and os.WIFEXITED(status)

    @property
    def begins(self) -> bool:
        """Whether it is starting, or working on its first leases."""
        return not self.pid or bool(self.errands and not self.settled)

    @property
    def ready(self) -> bool:
        """Whether it is not about to be killed."""
        return not self.asked_ns

    def packed(self, assignment: Assignment) -> bytes:
        """Return an assignment as it is sent, with the slabs that were returned."""
        plain = assignment.planned.rows.indices.dtype == np.int64
        packed = (plain_dumps if plain else dumps)(assignment)
        returned = self.unpacker.returned()
        return plain_dumps((returned if any(returned) else None, packed))

    def held(self, number: int) -> list[Held]:
        """Return the samples of a task that it is working on."""
        return [held for held in self.status_page.held() if held.task == number]

    def ask_for_stacks(self) -> None:
        """Make it write its stacks to its page. A stopped process does not."""
        self._was_stopped = is_stopped(self.pid)
        self._signal(STACK_SIGNAL)

    def suspects(self, number: int) -> Sequence[int]:
        """Return the rows of an errand that may have caused its end."""
        if not self.pid:  # it has not said yet that it is there, so it began none
            return ()
        rows = range(len(self.errands[number].chunk))
        if self.stuck is not None:
            task, row = self.stuck
            if task != number:
                return ()
            return rows if row == ALL_ROWS else (row,)
        held = [each.row for each in self.held(number)]
        if not held:  # it was packing the oldest, or coroutines work there
            return super().suspects(number)
        return tuple(held) if all(row in rows for row in held) else rows

    def how_it_ended(self) -> str:
        """Return why it ended, and what it wrote before that."""
        if self.stuck is None:
            cause = cause_of(self.status_page.status, self._kills, oom_kills())
        else:
            stopped = ", stopped by a signal (SIGSTOP, or a debugger)"
            cause = "replaced as it was stuck" + stopped * self._was_stopped
        lines = self.status_page.text().strip().splitlines()[:MAX_LINES]
        return "\n".join([f"{cause}; it wrote:", *lines]) if lines else cause

    def close(self) -> None:
        """Close the pipe, which ends the child, and release its page. Idempotent."""
        super().close()
        self.status_page.close()


STACKS_NS = 300_000_000
"""How long a stuck worker may take to write its stacks."""
GONE_NS = 2_000_000_000
"""How long a killed worker may take to end before it no longer counts."""


class Watchdog:
    """Enforces the time limit of samples in the worker processes of one segment.

    A process that exceeds it writes its stacks and is replaced.

    Args:
        timeout_s: limit for a sample in seconds; None means no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._limit_ns = None if timeout_s is None else int(timeout_s * 1e9)

    def look(
        self, children: Collection[WorkerChild]
    ) -> tuple[float | None, list[WorkerChild]]:
        """Do whatever is due now.

        Returns:
            Seconds until the next call, None if there is nothing to wait for; and the
            children that were killed but have not ended in time.
        """
        if self._limit_ns is None:
            return None, []
        now_ns = time.monotonic_ns()
        due = [self._look_at(child, now_ns) for child in children]
        times = [at_ns for at_ns in due if at_ns is not None]
        wait_s = max(0.0, (min(times) - now_ns) / 1e9) if times else None
        killed = (child for child in children if child.killed_ns)
        return wait_s, [c for c in killed if now_ns >= c.killed_ns + GONE_NS]

    def _look_at(self, child: WorkerChild, now_ns: int) -> int | None:
        """Return when to check a child again."""
        if child.killed_ns:
            return child.killed_ns + GONE_NS
        if child.asked_ns:
            if now_ns < child.asked_ns + STACKS_NS:
                return child.asked_ns + STACKS_NS
            child.killed_ns = now_ns
            child.kill()
            return now_ns + GONE_NS
        first = self._first_due(child)
        if first is None or now_ns < first[0]:
            return None if first is None else first[0]
        child.stuck, child.asked_ns = first[1:], now_ns
        child.ask_for_stacks()
        return now_ns + STACKS_NS

    def _first_due(self, child: WorkerChild) -> tuple[int, int, int] | None:
        """Return the earliest deadline: when, and of which task and row."""
        assert self._limit_ns is not None
        if not child.errands or not child.pid:  # it is starting
            return None
        limit_ns = self._limit_ns
        held = [at for number in child.errands for at in child.held(number)]
        due = [(at.since_ns + limit_ns, at.task, at.row) for at in held]
        if not due:  # nobody works there, yet tasks are waiting
            moved_ns = child.status_page.moved_ns()
            due = [
                (max(errand.sent_ns, moved_ns) + limit_ns, number, ALL_ROWS)
                for number, errand in child.errands.items()
            ]
        return min(due, default=None)
