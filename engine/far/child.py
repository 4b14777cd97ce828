"""A child process of ours: the pipe to it, and the page that outlives it.

Every child has a pipe to the trainer, and ends when the pipe is closed. A pipe carries
frames of pickled objects, both ways, and file descriptors along with them. Only our own
processes hold an end: nothing from a disk or a network comes through here.

A worker process also shares its status page with the trainer, and with its parent, the
fork server. A worker posts the current sample of each thread there, the parent posts
how the worker ended, and faulthandler writes stacks behind that. So when a worker dies
or hangs, the trainer can report where.

    word 0          how it ended: 1 + the status of waitpid, or 0 while unknown
    word 1          until when its threads rest before their next sample, or 0
    words 8, 9, ..  four per thread: 1 + task or 0, row of the task, since when, 1 if it
                    rests
    then            text
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import faulthandler
import gc
import os
import select
import signal
import socket
import struct
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self

import psutil

from ...system.forking import flush, fork
from ...system.shared_memory import shared_file
from ...system.wakeup import NOTICE_S
from .handover import dumps, loads
from .slabs import map_shared

# The pipe

# Size in bytes of the object that follows.
HEADER = struct.Struct("!Q")
# C's `struct cmsghdr`, which precedes descriptors (nothing else comes with a frame):
# its length, level and type.
CONTROL = struct.Struct("@Nii")
# More than waits in a socket by default (212,992 bytes): one read takes all of it.
READ_BYTES = 1 << 18
# Larger frames are sent without the GIL: copying them takes a while.
LARGE_BYTES = 1 << 16
# Enough for 8 descriptors: a frame comes with two at most (a pipe and a page), and the
# system does not join those of several frames in one read.
ROOM = socket.CMSG_SPACE(8 * array.array("i").itemsize)
AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL | socket.MSG_CMSG_CLOEXEC
_ends: weakref.WeakSet[Pipe] = weakref.WeakSet()
# Those that a child keeps which this thread is forking; other threads fork others.
_kept = threading.local()
# Held during a fork, and while an end is open that is not in `_ends`: one being made,
# copied or closed. Otherwise a child would keep a copy of it, and with it the pipe
# open. (A socket that is being closed forgets its descriptor before the system closes
# that.)
_changing = threading.RLock()
# CPython releases the GIL around every socket call. While other threads compute,
# getting it back takes some milliseconds, and with many threads all of them soon wait
# for it. So data that has arrived is read, and data that there is room for is sent, by
# calls that keep the GIL.
_libc = ctypes.PyDLL(None, use_errno=True)


class IoVector(ctypes.Structure):
    """C's `struct iovec`: a piece of memory."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class MessageHeader(ctypes.Structure):
    """C's `struct msghdr`: where recvmsg(2) puts what it receives."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_size_t),
        ("vector", ctypes.POINTER(IoVector)),
        ("vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class Pipe:
    """One end. Raises `EOFError` once the other end is gone, or this one is closed.

    Only one thread at a time may receive, and only one may send. `post`, `flush` and
    `collect` never wait, so one selector thread can serve many pipes, and a stuck
    process delays nobody else.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._arrived_bytes = bytearray()
        # Data not sent yet, with the descriptors that go with it.
        self.unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        # Descriptors that have arrived, in the order in which they were sent. They may
        # be here before the object that they belong to. The receiver must close them.
        self.descriptors: deque[int] = deque()
        self._read_buffer = memoryview(bytearray(READ_BYTES))
        self._control = bytearray(ROOM)
        self._vector = IoVector(address_of(self._read_buffer), READ_BYTES)
        self._header = MessageHeader(
            vector=ctypes.pointer(self._vector),
            vectors=1,
            control=address_of(self._control),
        )
        _ends.add(self)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return two connected ends."""
        with _changing:
            ours, theirs = socket.socketpair()
            return cls(ours), cls(theirs)

    def post(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send an object that `dumps` has packed, now or by a later `flush`.

        It follows those posted before it. No user code runs. The descriptors must stay
        open until it is sent.
        """
        header = HEADER.pack(len(body))
        sent_bytes = 0 if self.unsent else self._send_now([header, body], descriptors)
        if sent_bytes < len(header) + len(body):
            rest = memoryview(header + body)[sent_bytes:]
            self.unsent.append((rest, () if sent_bytes else descriptors))

    def flush(self) -> None:
        """Send as much as there is room for now."""
        while self.unsent:
            frame, descriptors = self.unsent[0]
            sent_bytes = self._send_now([frame], descriptors)
            if sent_bytes < len(frame):
                self.unsent[0] = frame[sent_bytes:], () if sent_bytes else descriptors
                return
            self.unsent.popleft()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one object; wait while the other end has no room."""
        self.send_packed(dumps(message), descriptors)

    def send_packed(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send the result of `dumps` like `send`: no user code runs."""
        self.post(body, descriptors)
        while self.unsent:
            self._wait(select.POLLOUT)
            self.flush()

    def collect(self) -> list[Any]:
        """Return the objects that have arrived completely.

        Raises:
            EOFError: the other end is gone, or this one is closed.
            OSError: a descriptor was lost, as this process has too many open.
        """
        try:
            while self._read_now() == READ_BYTES:
                pass
        except EOFError:
            if messages := list(self._whole()):
                return messages
            raise
        return list(self._whole())

    def receive_all(self, timeout_s: float | None = None) -> list[Any]:
        """Return all objects that have arrived, waiting for at least one.

        Args:
            timeout_s: how long to wait for more data, in seconds; None means no limit.
                When it runs out, the list is empty.

        Raises:
            EOFError: the other end is gone, or this one is closed.
            OSError: a descriptor was lost, as this process has too many open.
        """
        messages = list(self._whole())
        while not messages and self._wait(select.POLLIN, timeout_s):
            messages = self.collect()
        return messages

    def fileno(self) -> int:
        """Return the descriptor, for a selector or for passing the end on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other one sees the end of file. Idempotent."""
        with _changing:
            self._socket.close()
            self.unsent.clear()
            while self.descriptors:
                os.close(self.descriptors.popleft())

    def _whole(self) -> Iterator[Any]:
        """Yield the objects that have arrived completely."""
        data = self._arrived_bytes
        while len(data) >= HEADER.size:
            stop = HEADER.size + HEADER.unpack_from(data)[0]
            if len(data) < stop:
                return
            body = data[HEADER.size : stop]
            del data[:stop]
            yield loads(body)

    def _wait(self, events: int, timeout_s: float | None = None) -> bool:
        """Wait for one of these events; return whether it came in time."""
        if self.fileno() < 0:
            raise EOFError
        poll = select.poll()
        poll.register(self, events)
        if timeout_s is not None:
            return bool(poll.poll(timeout_s * 1000))
        while not poll.poll(NOTICE_S * 1000):
            pass  # lets Python handle signals that came meanwhile
        return True

    def _read_now(self) -> int:
        """Read what has arrived; return the number of bytes."""
        header = self._header
        header.control_length = ROOM
        nbytes = self._checked(
            _libc.recvmsg(self.fileno(), ctypes.byref(header), AT_ONCE)
        )
        if nbytes == 0:
            raise EOFError
        if nbytes < 0:
            return 0
        self._arrived_bytes += self._read_buffer[:nbytes]
        if header.control_length:
            length, _, _ = CONTROL.unpack_from(self._control)
            rights = self._control[CONTROL.size : min(header.control_length, length)]
            self.descriptors += memoryview(rights).cast("i")
        if header.flags & socket.MSG_CTRUNC:
            raise OSError(
                errno.EMFILE,
                "this process has too many open files to receive another, which workers"
                " need; raise the limit with `ulimit -n`",
            )
        return nbytes

    def _send_now(
        self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int]
    ) -> int:
        """Send as much as there is room for; return the number of bytes."""
        if not descriptors and sum(map(len, parts)) <= LARGE_BYTES:
            frame = b"".join(parts)
            nbytes = _libc.send(self.fileno(), frame, len(frame), AT_ONCE)
            return max(0, self._checked(nbytes))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        try:
            return self._socket.sendmsg(parts, [rights] if descriptors else [], AT_ONCE)
        except OSError as error:
            return max(0, self._checked(-1, error.errno or 0))

    def _checked(self, result: int, number: int = 0) -> int:
        """Return the result of a call; -1 if it would have waited.

        Args:
            result: what the call returned.
            number: its error; 0: it is in `errno`.
        """
        if result >= 0 or (number := number or ctypes.get_errno()) in WOULD_WAIT:
            return result
        if number in GONE:
            raise EOFError
        raise OSError(number, os.strerror(number))


WOULD_WAIT = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)
GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)


def address_of(buffer: bytearray | memoryview) -> int:
    """Return the address of a buffer, which must outlive its use."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def shut_down(end: Pipe) -> None:
    """Make both ends of a pipe, and all copies of them, see the end of file."""
    with contextlib.suppress(OSError):  # the other end is gone
        end._socket.shutdown(socket.SHUT_RDWR)  # noqa: SLF001 of this very module


def _close_inherited() -> None:
    """In any forked child: close the ends that belong to the trainer.

    If a child held a copy, the processes at the other ends would not notice that the
    trainer has closed its own, or is gone.
    """
    _changing.release()
    for end in _ends.difference(getattr(_kept, "ends", ())):
        end.close()


os.register_at_fork(
    before=_changing.acquire,
    after_in_parent=_changing.release,
    after_in_child=_close_inherited,
)


# The process


def fork_child(body: Callable[[], None], *ends: Pipe) -> int:
    """Fork a process that runs `body` and keeps these pipe ends; return its pid.

    Raises:
        OSError: the process limit is reached, or memory is short.
    """
    _kept.ends = ends
    try:
        pid = fork()
    finally:
        _kept.ends = ()
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
        pid: 0 until it is known; that of a child of this very process otherwise.

    Raises:
        OSError: a limit of descriptors is reached. The child is ended.
    """

    def __init__(self, pipe: Pipe, pid: int = 0) -> None:
        self.pipe, self.pid = pipe, 0
        self._process = -1
        try:
            if pid:
                self.hello(pid)
        except OSError:
            pipe.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

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
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, wait_s)))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill it at once, whatever it is doing, or send it another signal."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

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


def cause_of(status: int | None, *, for_memory: bool) -> str:
    """Return how a child ended: its signal, and who may have sent it.

    Args:
        status: what waitpid reported; None if the fork server had ended, too.
        for_memory: whether `oom_kills()` counts a kill that may be this one.
    """
    if status is None:
        return "its exit status is unknown, because the fork server ended, too"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    text = f"killed by signal {-code} ({NAMES.get(-code, 'real-time')})"
    if -code != signal.SIGKILL:
        return text
    if for_memory:
        return (
            f"{text} by the system's out-of-memory killer: this control group, or the"
            " machine, ran out of memory"
        )
    return f"{text}; not by a memory limit of this control group"


NAMES = {int(number): number.name for number in signal.Signals}


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    with contextlib.suppress(psutil.Error):  # it has ended
        return psutil.Process(pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    return False


# The page: what a child is working on

WORDS = 2048
TEXT_AT = 8 * WORDS
REST = 1
FIRST, EACH = 8, 4
MAX_LINES = (WORDS - FIRST) // EACH
# Stands for all rows of a task, when they are read at once.
ALL_ROWS = -1
# How often a thread that rests looks whether it may go on.
REST_LOOK_S = 0.0005
# Asks a worker for its stacks. No library is known to use this signal.
STACK_SIGNAL = signal.SIGRTMAX - 2


@dataclass(frozen=True, slots=True)
class Held:
    """A sample that a worker is working on."""

    task: int
    row: int
    """Its row within the task, or `ALL_ROWS`."""
    since_ns: int
    """By the monotonic clock, which all processes share."""


class StatusLine:
    """A line of the page: posts which sample one thread is working on."""

    def __init__(
        self,
        words: memoryview[int],
        line: int,
        ended: Callable[[], object] | None = None,
    ) -> None:
        self._words, self._ended = words, ended
        self._at = FIRST + EACH * line
        self._first = 0

    def begin(self, task: int, first: int = 0) -> None:
        """Note the task that the thread starts, without a particular row yet.

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
        """Note that the thread is idle, and since when."""
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

    def line(
        self, number: int, ended: Callable[[], object] | None = None
    ) -> StatusLine:
        """Return the line of one thread; `ended` is called at the end of each task."""
        return StatusLine(self._words, number, ended)

    def held(self) -> list[Held]:
        """Return the samples being worked on, or those at the worker's death."""
        words = self._words
        return [
            Held(words[at] - 1, words[at + 1], words[at + 2])
            for at in range(FIRST, FIRST + EACH * MAX_LINES, EACH)
            if words[at]
        ]

    def rest(self, until_ns: int) -> None:
        """Let the threads rest before a sample until this moment; 0: no more."""
        self._words[REST] = until_ns

    @property
    def at_work(self) -> bool:
        """Whether a thread is at a sample."""
        tasks, rests = (self._words[at::EACH].tolist() for at in (FIRST, FIRST + 3))
        return any(t and not r for t, r in zip(tasks, rests, strict=True))

    def moved_ns(self) -> int:
        """Return when a thread last started or ended something; 0 if none has."""
        return max(self._words[FIRST + 2 : FIRST + EACH * MAX_LINES : EACH])

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
