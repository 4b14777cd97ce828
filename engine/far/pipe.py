"""A two-way pipe between two of our own processes: frames of pickled objects.

File descriptors travel along. Only our own processes hold an end: nothing from a disk
or a network comes through here.

CPython releases the GIL around every socket call. While other threads compute, getting
it back takes some milliseconds, and with many threads all of them soon wait for it. So
data that has arrived is read, and data that there is room for is sent, by calls that
keep the GIL: `ctypes.PyDLL` provides them.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Self

from ...system.wakeup import NOTICE_S
from .handover import dumps, loads

HEADER = struct.Struct("!Q")
"""Size in bytes of the object that follows."""
CONTROL = struct.Struct("@Nii")
"""C's `struct cmsghdr`, which precedes descriptors (nothing else comes with a frame):
its length, level and type."""
MAX_DESCRIPTORS = 8
READ_BYTES = 1 << 18
LARGE_BYTES = 1 << 16
"""Larger frames are sent without the GIL: copying them takes a while."""
ROOM = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL | socket.MSG_CMSG_CLOEXEC
_ends: weakref.WeakSet[Pipe] = weakref.WeakSet()
_kept: tuple[Pipe, ...] = ()
_changing = threading.RLock()
"""Held during a fork, and while an end is open that is not in `_ends`: one being made,
copied or closed. Otherwise a child would keep a copy of it, and with it the pipe open.
(A socket that is being closed forgets its descriptor before the system closes that.)"""
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
        self._coming = bytearray()
        self._leaving: deque[tuple[memoryview, Sequence[int]]] = deque()
        """Data not sent yet, with the descriptors that go with it."""
        self.descriptors: deque[int] = deque()
        """Descriptors that have arrived, in the order in which they were sent. They may
        be here before the object that they belong to. The receiver must close them."""
        self._read = memoryview(bytearray(READ_BYTES))
        self._control = bytearray(ROOM)
        self._vector = IoVector(address_of(self._read), READ_BYTES)
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

    @classmethod
    def adopt(cls, descriptor: int) -> Self:
        """Return the end for a descriptor; closing the end closes the descriptor."""
        return cls(socket.socket(fileno=descriptor))

    @property
    def waiting(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._leaving)

    def post(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send an object that `dumps` has packed, now or by a later `flush`.

        It follows those posted before it. No user code runs. The descriptors must stay
        open until it is sent.
        """
        header = HEADER.pack(len(body))
        sent = 0 if self._leaving else self._send_now([header, body], descriptors)
        if sent < len(header) + len(body):
            rest = memoryview(header + body)[sent:]
            self._leaving.append((rest, () if sent else descriptors))

    def flush(self) -> None:
        """Send as much as there is room for now."""
        while self._leaving:
            frame, descriptors = self._leaving[0]
            sent = self._send_now([frame], descriptors)
            if sent < len(frame):
                self._leaving[0] = frame[sent:], () if sent else descriptors
                return
            self._leaving.popleft()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one object; wait while the other end has no room."""
        self.send_packed(dumps(message), descriptors)

    def send_packed(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send the result of `dumps` like `send`: no user code runs."""
        self.post(body, descriptors)
        while self._leaving:
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
            self._leaving.clear()
            while self.descriptors:
                os.close(self.descriptors.popleft())

    def _whole(self) -> Iterator[Any]:
        """Yield the objects that have arrived completely."""
        coming = self._coming
        while len(coming) >= HEADER.size:
            stop = HEADER.size + HEADER.unpack_from(coming)[0]
            if len(coming) < stop:
                return
            body = coming[HEADER.size : stop]
            del coming[:stop]
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
        got = self._checked(_libc.recvmsg(self.fileno(), ctypes.byref(header), AT_ONCE))
        if got == 0:
            raise EOFError
        if got < 0:
            return 0
        self._coming += self._read[:got]
        if header.control_length:
            length, _, _ = CONTROL.unpack_from(self._control)
            found = self._control[CONTROL.size : min(header.control_length, length)]
            self.descriptors += memoryview(found).cast("i")
        if header.flags & socket.MSG_CTRUNC:
            text = (
                "this process has too many open files to receive another, which workers"
                " need; raise the limit with `ulimit -n`"
            )
            raise OSError(errno.EMFILE, text)
        return got

    def _send_now(
        self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int]
    ) -> int:
        """Send as much as there is room for; return the number of bytes."""
        if not descriptors and sum(map(len, parts)) <= LARGE_BYTES:
            frame = b"".join(parts)
            sent = _libc.send(self.fileno(), frame, len(frame), AT_ONCE)
            return max(0, self._checked(sent))
        packed = struct.pack(f"{len(descriptors)}i", *descriptors)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if packed else []
        try:
            return self._socket.sendmsg(parts, rights, AT_ONCE)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno in GONE:
                raise EOFError from error
            raise

    def _checked(self, result: int) -> int:
        """Return the result of a call; -1 if it would have waited."""
        if result >= 0 or (number := ctypes.get_errno()) in WOULD_WAIT:
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


@contextlib.contextmanager
def kept(*ends: Pipe) -> Iterator[None]:
    """Fork within this `with`: the child keeps these ends, and no others."""
    global _kept  # noqa: PLW0603 read by the hook, in the child
    _kept = ends
    try:
        yield
    finally:
        _kept = ()


def _close_inherited() -> None:
    """In any forked child: close the ends that belong to the trainer.

    If a child held a copy, the processes at the other ends would not notice that the
    trainer has closed its own, or is gone.
    """
    _changing.release()
    for end in list(_ends):
        if end not in _kept:
            end.close()


os.register_at_fork(
    before=_changing.acquire,
    after_in_parent=_changing.release,
    after_in_child=_close_inherited,
)
