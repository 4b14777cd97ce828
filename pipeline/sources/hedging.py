"""Reads of a store that are late are asked for once more; the first answer counts.

In a store of many machines a few reads take far longer than the others, whatever is
read. Asking again after what nearly all reads take costs a few per cent more requests,
and most of the tail is gone (Dean and Barroso, "The Tail at Scale",
Communications of the ACM 56 (2), 2013).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

Read = Callable[[str], Awaitable[bytes]]

KNOWN = 20
"""Reads that must be known to say how long one takes."""
UNKNOWN_LATE_S = 1.0
"""Until then a read is late after so long."""
REMEMBERED = 1000
"""The latest, that say how long a read takes."""
LATE = 0.9
"""Share of reads, of which the slowest says how long one takes: not the 95 % of the
paper, as the first reads, which open connections, may be as many as the other 5 %."""
LEEWAY = 1.5
"""Times that is late: where all take as long, none is."""
MAX_SHARE = 0.05
"""Of all reads, that may be asked for once more."""


class HedgedReads:
    """Reads files in one event loop, and late ones twice."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        """Seconds that reads took, in the order in which they came."""
        self._sorted: list[float] = []
        self.asked = 0
        """Files."""
        self.hedged = 0
        """Of these, that were asked for twice."""

    async def read(self, function: Read, path: str) -> bytes:
        """Return what `function(path)` returns, or a second call of it, if sooner.

        What the first to end raises is raised once the other has failed, too.
        """
        self.asked += 1
        begun_s = time.monotonic()
        late_s = self.late_s()
        if late_s is None:
            content = await function(path)
        else:
            content = await self._hedged(function, path, late_s)
        self._note(time.monotonic() - begun_s)
        return content

    def late_s(self) -> float | None:
        """Return the seconds after which a read is late; None: none is asked again."""
        if self.hedged > MAX_SHARE * self.asked:
            return None
        known = len(self._sorted)
        if known < KNOWN:
            return UNKNOWN_LATE_S
        return LEEWAY * self._sorted[int(LATE * (known - 1))]

    async def _hedged(self, function: Read, path: str, late_s: float) -> bytes:
        first = asyncio.ensure_future(function(path))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=late_s)
            if not first.done():
                self.hedged += 1
                tasks.append(asyncio.ensure_future(function(path)))
            return await first_good(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, seconds: float) -> None:
        self._latest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._latest) > REMEMBERED:
            oldest = self._latest.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]


async def first_good(tasks: Sequence[asyncio.Future[bytes]]) -> bytes:
    """Return the first result; raise the last error where there is none."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        good = next((task for task in done if task.exception() is None), None)
        if good is not None or not pending:
            return (good or done.pop()).result()


class Bandwidth:
    """Spreads reads so that no more bytes come in a second than may.

    Args:
        limit: bytes a second, > 0.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._free_s = 0.0
        """When all that has come would have come at the limit."""

    async def take(self, nbytes: int) -> None:
        """Note what has come; wait until more may, at most a second's worth ahead."""
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s - 1.0) + nbytes / self._limit
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)
