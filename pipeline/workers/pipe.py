"""A two-way pipe between the trainer and one of its own children.

Frames of pickled objects, and the file descriptors that go with them. Only our own
processes hold an end: nothing from a disk or a network comes through here.
"""

from __future__ import annotations

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

__all__ = ["HEADER", "MOST_DESCRIPTORS", "Pipe", "encode", "kept", "pipe", "rights"]

HEADER = struct.Struct("!QI")
"""Bytes of the object that follows, and descriptors that come with it."""
MOST_DESCRIPTORS = 8
_ends: weakref.WeakSet[Pipe] = weakref.WeakSet()
_kept: Pipe | None = None
_making = threading.Lock()
"""Held while ends are made that `_ends` does not know yet, and by whoever forks: a
child would keep the copies that it does not know of, and with them the pipe open."""


def encode(message: object, descriptors: int = 0) -> tuple[bytes, bytes]:
    """Return a frame: its header, and the object."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body), descriptors), body


def rights(descriptors: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Return what sends descriptors along with a frame's first byte."""
    packed = struct.pack(f"{len(descriptors)}i", *descriptors)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else []


class Pipe:
    """One end. Raises `EOFError` once the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.descriptors: deque[int] = deque()
        """Those that came with what was received: the receiver's own to close."""
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
        header, body = encode(message, len(descriptors))
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
        size, descriptors = HEADER.unpack(self._read_header())
        body = self._read(size)
        self._check_descriptors(descriptors)
        return pickle.loads(body)  # noqa: S301 from our own process

    def fileno(self) -> int:
        """Return the descriptor, for a selector or for handing the end on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other sees its end of file."""
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _check_descriptors(self, count: int) -> None:
        if len(self.descriptors) < count:
            text = "a descriptor got lost: raise the limit with `ulimit -n`"
            raise OSError(errno.EMFILE, text)

    def _read_header(self) -> bytes:
        try:
            header, found, _, _ = socket.recv_fds(
                self._socket, HEADER.size, MOST_DESCRIPTORS
            )
        except ConnectionResetError as error:
            raise EOFError from error
        if not header:
            raise EOFError
        for descriptor in found:
            os.set_inheritable(descriptor, False)
        self.descriptors += found
        if len(header) == HEADER.size:
            return header
        return header + self._read(HEADER.size - len(header))

    def _read(self, size: int) -> bytearray:
        frame = bytearray(size)
        view = memoryview(frame)
        while view:
            try:
                got = self._socket.recv_into(view)
            except ConnectionResetError:
                got = 0
            if got == 0:
                raise EOFError
            view = view[got:]
        return frame


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
