"""A worker's end of its pipe: it keeps the GIL where nothing is to be waited for.

CPython lets go of the GIL around every socket call. Where other lanes of the worker
compute, it is some milliseconds until a lane has it back, twice a task; with many lanes
all of them soon wait for it. So a task that is here already is taken, and an outcome
for which there is room is sent, by calls that keep it: `ctypes.PyDLL` makes such. One
read takes all tasks that have come.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Sequence

from .pipe import READ_BYTES, ROOM, Pipe, encode

__all__ = ["WorkPipe"]

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
