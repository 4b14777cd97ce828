"""A child process of ours, from fork to end, and the page that outlives it.

Every child has a pipe to its parent, and ends when the pipe is closed. A worker process
also shares a page or two with its parent and the trainer. A worker posts the current
sample of each lane there, the parent posts how the child ended, and faulthandler writes
stacks behind that. So when a worker dies or hangs, the trainer can report where.

    word 0          how it ended: 1 + the status of waitpid, or 0 while unknown
    word 1          until when its lanes rest before their next sample, or 0
    words 8, 9, ..  four per lane: 1 + task or 0, row of the task, since when, 1 if it
                    rests
    then            text
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import psutil

from ...system.forking import flush, fork
from ...system.shared_memory import shared_file
from .pipe import Pipe, kept
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


# What a child is working on


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
