"""A two-way pipe between the trainer and one of its own children.

Frames of pickled objects, and file descriptors between them. Only our own processes,
forked from the trainer, hold an end: nothing from a disk or a network comes through
here.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["Pipe", "kept", "pipe"]

HEADER = struct.Struct("!Q")
_ends: weakref.WeakSet[Pipe] = weakref.WeakSet()
_kept: Pipe | None = None


class Pipe:
    """One end. Raises `EOFError` once the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        _ends.add(self)

    def send(self, message: object) -> None:
        """Send one object; waits while the other end has no room."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.sendall(HEADER.pack(len(body)) + body)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def receive(self) -> Any:
        """Return the next object; waits for it."""
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return pickle.loads(self._read(size))  # noqa: S301 from our own child

    def drain(self) -> None:
        """Read and forget everything until the other end is gone."""
        with suppress(EOFError):
            while True:
                self.receive()

    def send_descriptor(self, descriptor: int, tag: int = 0) -> None:
        """Send a file descriptor, with a number from 0 to 255."""
        try:
            socket.send_fds(self._socket, [bytes([tag])], [descriptor])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def receive_descriptor(self) -> tuple[int, int]:
        """Return a descriptor, now this process's own to close, and its number."""
        tag, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not tag:
            raise EOFError
        os.set_inheritable(descriptors[0], False)
        return descriptors[0], tag[0]

    def fileno(self) -> int:
        """Return the descriptor, for a selector or for handing the end on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other sees its end of file."""
        self._socket.close()

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
    ours, theirs = socket.socketpair()
    return Pipe(ours), Pipe(theirs)


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
    for end in list(_ends):
        if end is not _kept:
            end.close()


os.register_at_fork(after_in_child=_close_inherited)
