"""A two-way pipe between the trainer and one of its own children.

Frames of pickled objects, and the file descriptors that go with them. Only our own
processes hold an end: nothing from a disk or a network comes through here.
"""

from __future__ import annotations

import array
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
    "MOST_DESCRIPTORS",
    "NOTHING",
    "READ_BYTES",
    "ROOM",
    "Pipe",
    "encode",
    "kept",
    "pipe",
    "rights",
]

HEADER = struct.Struct("!Q")
"""Bytes of the object that follows."""
MOST_DESCRIPTORS = 8
READ_BYTES = 1 << 16
ROOM = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
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
