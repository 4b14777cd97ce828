"""A two-way pipe between the trainer and one of its own children.

Frames of pickled objects, and the file descriptors that go with them. Only our own
processes hold an end: nothing from a disk or a network comes through here.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import pickle
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

__all__ = [
    "MAX_DESCRIPTORS",
    "NOTHING",
    "READ_BYTES",
    "ROOM",
    "Mailbox",
    "Pipe",
    "WorkPipe",
    "encode",
    "kept",
    "pipe",
    "rights",
]

HEADER = struct.Struct("!Q")
"""Bytes of the object that follows."""
MAX_DESCRIPTORS = 8
READ_BYTES = 1 << 16
ROOM = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
NOTHING = object()
"""In the place of an object that has not come whole."""
_ends: weakref.WeakSet[Pipe] = weakref.WeakSet()
_kept: Pipe | None = None
_making = threading.Lock()
"""Held while ends are made that `_ends` does not know yet, and by whoever forks: a
child would keep the copies that it does not know of, and with them the pipe open."""


def encode(message: object) -> tuple[bytes, bytes]:
    """Return a frame: its header, and the object."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)), body


def rights(descriptors: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Return what sends descriptors along with a frame's first byte."""
    packed = struct.pack(f"{len(descriptors)}i", *descriptors)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else []


class Pipe:
    """One end. Raises `EOFError` once the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._coming = bytearray()
        self.descriptors: deque[int] = deque()
        """Those that came with what was received, or that comes next, in the order they
        were sent: the receiver's own to close."""
        _ends.add(self)

    @classmethod
    def pair(cls) -> tuple[Self, Pipe]:
        """Return two connected ends, the first of this kind."""
        with _making:
            ours, theirs = socket.socketpair()
            return cls(ours), Pipe(theirs)

    @classmethod
    def adopt(cls, descriptor: int) -> Self:
        """Return the end that a descriptor is; it is closed with it."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one object; waits while the other end has no room."""
        header, body = encode(message)
        try:
            sent = self._socket.sendmsg([header, body], rights(descriptors))
            if sent < len(header) + len(body):
                self._socket.sendall((header + body)[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def receive(self) -> Any:
        """Return the next object; waits for it.

        Raises:
            OSError: its descriptors got lost, as this process has too many.
        """
        while (message := self._next()) is NOTHING:
            self._read_on()
        return message

    def receive_all(self) -> list[Any]:
        """Return all objects that have come; waits for one. Errors as of `receive`."""
        messages = [self.receive()]
        while (message := self._next()) is not NOTHING:
            messages.append(message)
        return messages

    def fileno(self) -> int:
        """Return the descriptor, for a selector or for handing the end on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other sees its end of file."""
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _next(self) -> Any:
        """Return the next object if it has come whole, NOTHING otherwise."""
        coming = self._coming
        if len(coming) < HEADER.size:
            return NOTHING
        (size,) = HEADER.unpack_from(coming)
        stop = HEADER.size + size
        if len(coming) < stop:
            return NOTHING
        body = coming[HEADER.size : stop]
        del coming[:stop]
        return pickle.loads(body)  # noqa: S301 from our own process

    def _read_on(self) -> None:
        """Read what has come; waits for something."""
        try:
            read, found, flags, _ = self._socket.recvmsg(
                READ_BYTES, ROOM, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:
            raise EOFError from error
        if not read:
            raise EOFError
        for level, kind, data in found:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._take_descriptors(data)
        self._coming += read
        self._check(flags)

    def _check(self, flags: int) -> None:
        """Raise if not all descriptors have come, of those that were sent."""
        if flags & socket.MSG_CTRUNC:
            text = "a descriptor got lost: raise the limit with `ulimit -n`"
            raise OSError(errno.EMFILE, text)

    def _take_descriptors(self, data: bytes) -> None:
        found = array.array("i")
        found.frombytes(data[: len(data) - len(data) % found.itemsize])
        self.descriptors += found


def pipe() -> tuple[Pipe, Pipe]:
    """Return two connected ends."""
    return Pipe.pair()


@contextmanager
def kept(end: Pipe) -> Iterator[None]:
    """Fork within: the child keeps this one end, and no other."""
    global _kept  # noqa: PLW0603 read by the hook, in the child
    _kept = end
    try:
        yield
    finally:
        _kept = None


def _close_inherited() -> None:
    """In any forked child: close the ends that are the trainer's.

    A child that held a copy would keep those at the other ends from ever seeing that
    the trainer has closed its own, or is gone.
    """
    _making.release()
    for end in list(_ends):
        if end is not _kept:
            end.close()


os.register_at_fork(
    before=_making.acquire,
    after_in_parent=_making.release,
    after_in_child=_close_inherited,
)


# The trainer's end of a pipe to a worker, which may be stopped at any moment.
#
# Nothing here waits: what has no room is sent later, what has come in part is read when
# the rest is there. So one selector thread serves all workers, and one that is stuck
# holds up nobody but itself.

DRAINED_BYTES = 1 << 18


class Mailbox(Pipe):
    """One end that never waits. Raises `EOFError` once the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._leaving: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        """Frames not sent yet, with descriptors of our own until they are."""
        self._ended = False

    @property
    def waiting(self) -> bool:
        """Whether something has yet to be sent."""
        return bool(self._leaving)

    def post(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one object, now or by a later `flush`, after those posted before it."""
        header, body = encode(message)
        sent = 0
        if not self._leaving:
            sent = self._send([header, body], descriptors)
        if sent < len(header) + len(body):
            # They may be closed, and their numbers used again, before they are sent.
            own = () if sent else tuple(map(os.dup, descriptors))
            self._leaving.append((memoryview(header + body)[sent:], own))

    def flush(self) -> None:
        """Send what there is room for now."""
        while self._leaving:
            frame, descriptors = self._leaving[0]
            sent = self._send([frame], descriptors)
            if sent:
                self._forget(descriptors)
                self._leaving[0] = frame[sent:], ()
            if sent < len(frame):
                return
            self._leaving.popleft()

    def collect(self) -> list[Any]:
        """Return the objects that have come whole."""
        self._drain()
        messages = []
        while (message := self._next()) is not NOTHING:
            messages.append(message)
        if self._ended and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        super().close()
        for _, descriptors in self._leaving:
            self._forget(descriptors)
        self._leaving.clear()

    def _drain(self) -> None:
        got = DRAINED_BYTES
        while got == DRAINED_BYTES and not self._ended:
            try:
                read = self._socket.recv(DRAINED_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                read = b""
            got = len(read)
            self._coming += read
            self._ended = not read

    def _send(
        self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int]
    ) -> int:
        try:
            return self._socket.sendmsg(
                parts, rights(descriptors), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def _forget(self, descriptors: tuple[int, ...]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)


# A worker's end of its pipe: it keeps the GIL where nothing is to be waited for.
#
# CPython lets go of the GIL around every socket call. Where other lanes of the worker
# compute, it is some milliseconds until a lane has it back, twice a task; with many lanes
# all of them soon wait for it. So a task that is here already is taken, and an outcome
# for which there is room is sent, by calls that keep it: `ctypes.PyDLL` makes such. One
# read takes all tasks that have come.

AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL | socket.MSG_CMSG_CLOEXEC
WOULD_WAIT = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)

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


class ControlHeader(ctypes.Structure):
    """C's `struct cmsghdr`: what precedes descriptors."""

    _fields_ = (
        ("length", ctypes.c_size_t),
        ("level", ctypes.c_int),
        ("type", ctypes.c_int),
    )


class WorkPipe(Pipe):
    """One end. Only one thread at a time may receive, and only one may send."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._bytes = ctypes.create_string_buffer(READ_BYTES)
        self._control = ctypes.create_string_buffer(ROOM)
        self._vector = IoVector(ctypes.addressof(self._bytes), READ_BYTES)
        self._header = MessageHeader(
            vector=ctypes.pointer(self._vector),
            vectors=1,
            control=ctypes.addressof(self._control),
        )

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one object; waits while the other end has no room."""
        if descriptors:
            super().send(message, descriptors)
            return
        frame = b"".join(encode(message))
        sent = self._checked(_libc.send(self.fileno(), frame, len(frame), AT_ONCE))
        if sent < len(frame):
            try:
                self._socket.sendall(frame[max(sent, 0) :])
            except (BrokenPipeError, ConnectionResetError) as error:
                raise EOFError from error

    def _read_on(self) -> None:
        if not self._read_now():
            super()._read_on()

    def _read_now(self) -> bool:
        """Read what has come, without a pause; tell whether that is something."""
        header = self._header
        header.control_length = len(self._control)
        got = _libc.recvmsg(self.fileno(), ctypes.byref(header), AT_ONCE)
        if self._checked(got) == 0:
            raise EOFError
        if got < 0:
            return False
        self._coming += self._bytes.raw[:got]
        if header.control_length:
            self._take_control(header.control_length)
        self._check(header.flags)
        return True

    def _take_control(self, nbytes: int) -> None:
        control = ControlHeader.from_buffer(self._control)
        if (control.level, control.type) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            start, stop = ctypes.sizeof(ControlHeader), min(nbytes, control.length)
            self._take_descriptors(self._control.raw[start:stop])

    def _checked(self, result: int) -> int:
        """Return the result of a call, -1 where it would have waited."""
        if result >= 0 or (number := ctypes.get_errno()) in WOULD_WAIT:
            return result
        if number in (errno.EPIPE, errno.ECONNRESET):
            raise EOFError
        raise OSError(number, os.strerror(number))
