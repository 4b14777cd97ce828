"""Who fetches a sample: one thread of one process of the host, all others wait.

A claim is a locked byte of a file that all processes share, so it ends with the process
that holds it. Nobody who waits for one holds another that he has yet to work for, so
there is no circle; and who has waited for `PATIENCE_S` does the work himself: a process
that was stopped in the middle delays others, and holds up none.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from .locks import release, try_lock

__all__ = ["Claim", "Claims"]

PATIENCE_S = 30.0
FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.01
"""A lock of another process cannot be waited for with a time limit, so it is looked at
again and again: at first soon, then every hundredth of a second."""
FIRST_BYTE = 1 << 60
"""Locked bytes lie behind all content."""

Wait = Future[None] | float | None
"""What to wait for: the one of this process who is at it, or so many seconds."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What came of asking for a key."""

    ours: bool
    """Whether it is to be freed."""
    waited: bool
    """Whether others were at it meanwhile."""


class Claims:
    """The keys that this process is about to store.

    Args:
        descriptor: of the file that all processes share, opened by this one.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._mine: dict[bytes, Future[None] | None] = {}
        """What the others of this process wait for, where one does."""

    def claim(self, key: bytes) -> Claim:
        """Claim a key; wait while others have it, or until patience ends.

        Returns:
            whether it is ours now, and whether others had it before: then what they
            made of it is to be looked for.
        """
        if self._try(key) is None:
            return AT_ONCE
        waited = False
        for wait in self._waits(key):
            if wait is None:
                return Claim(ours=True, waited=waited)
            waited = True
            if isinstance(wait, float):
                time.sleep(wait)
            else:
                with contextlib.suppress(TimeoutError):
                    wait.result(PATIENCE_S)
        return Claim(ours=False, waited=waited)

    async def claim_in_loop(self, key: bytes) -> Claim:
        """Do the same while other coroutines go on."""
        if self._try(key) is None:
            return AT_ONCE
        waited = False
        for wait in self._waits(key):
            if wait is None:
                return Claim(ours=True, waited=waited)
            waited = True
            if isinstance(wait, float):
                await asyncio.sleep(wait)
            else:
                await asyncio.wait([asyncio.wrap_future(wait)], timeout=PATIENCE_S)
        return Claim(ours=False, waited=waited)

    def free(self, key: bytes) -> None:
        """Let others have what was claimed, and is ours."""
        with self._lock:
            waited_for = self._mine.pop(key)
            release(self._descriptor, place(key))
        if waited_for is not None:
            waited_for.set_result(None)

    def _waits(self, key: bytes) -> Iterator[Wait]:
        """Yield what to wait for until patience ends; None once the key is ours."""
        end_s = time.monotonic() + PATIENCE_S
        pause_s = FIRST_PAUSE_S
        while time.monotonic() <= end_s:
            other = self._try(key)
            if other is NOBODY:
                yield pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                yield other

    def _try(self, key: bytes) -> Future[None] | None:
        """Claim it and return None, or who of this process has it, or `NOBODY`."""
        with self._lock:
            if key in self._mine:
                other = self._mine[key]
                if other is None:
                    other = self._mine[key] = Future()
                return other
            if not try_lock(self._descriptor, place(key)):
                return NOBODY
            self._mine[key] = None
            return None


AT_ONCE = Claim(ours=True, waited=False)
NOBODY: Future[None] = Future()
"""Of this process: it is another that has the key."""


def place(key: bytes) -> int:
    """Return the byte that stands for a key."""
    return FIRST_BYTE | int.from_bytes(key[8:16], "little") >> 4
