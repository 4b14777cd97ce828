"""The trainer's end of a pipe to a worker, which may be stopped at any moment.

Nothing here waits: what has no room is sent later, what has come in part is read when
the rest is there. So one selector thread serves all workers, and one that is stuck
holds up nobody but itself.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from .pipe import NOTHING, Pipe, encode, rights

__all__ = ["Mailbox"]

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
