"""What remote reads may cost: retries, second requests, sizes.

A read that fails for a reason that may pass is repeated. One that is late gets a second
request, and the first answer counts: in a store of many machines a few reads take far
longer than the others, whichever files they read. A second request, sent after the time
that nearly all reads take, costs a few per cent more requests and removes most of the
tail (Dean and Barroso, "The Tail at Scale", Communications of the ACM 56 (2), 2013).
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
)

from ...errors import LOGGER, BudgetError, check
from ...system.printing import call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of remote reads: retries, time and size.

    Raises:
        SpecError: a number is out of range.
    """

    retries: int = 4
    backoff: float = 0.5
    """The longest wait before the first retry, in seconds; it doubles with each further
    retry, up to `MAX_WAIT_S`. The actual wait is drawn at random, so that readers
    spread out.
    """
    max_bytes: int = 1 << 30
    hedge: bool = True
    """Whether an event loop repeats late requests: see `HedgedReads`."""

    def __post_init__(self) -> None:
        check(
            type(self.retries) is int and self.retries >= 0,
            f"`retries` must be an int >= 0, got {self.retries!r}; 0 tries once",
        )
        check(
            type(self.backoff) in (int, float) and self.backoff >= 0,
            f"`backoff` must be seconds >= 0, got {self.backoff!r}; 0.5 is usual",
        )

    def read(self, function: Callable[[str], T], path: str) -> T:
        """Return the result of `function(path)`, retrying if needed."""
        return Retrying(**self._rules())(function, path)

    async def await_read(
        self, function: Callable[[str], Awaitable[bytes]], path: str
    ) -> bytes:
        """Return the result of `await function(path)`, retrying if needed."""
        return bytes(await AsyncRetrying(**self._rules())(function, path))

    def check_size(self, nbytes: int, path: str) -> None:
        """Raise `BudgetError` if a file, or the part received, is too large."""
        if nbytes > self.max_bytes:
            raise BudgetError(
                f"{path} has {nbytes} bytes or more, and a read from a store or server"
                f" may bring {self.max_bytes}; if it is right, copy it to a disk of"
                f" this machine, or say from_files(..., max_bytes={nbytes}) or more"
            )

    def _rules(self) -> dict[str, Any]:
        return {
            "stop": stop_after_attempt(1 + self.retries),
            "wait": self._wait_s,
            "retry": retry_if_exception(may_pass),
            "before_sleep": tell_of_retry,
            "reraise": True,
        }

    def _wait_s(self, state: RetryCallState) -> float:
        """Return the seconds before the next try (tenacity draws from `random`)."""
        longest_s = self.backoff * 2 ** (state.attempt_number - 1)
        return JITTER.uniform(0.0, min(longest_s, MAX_WAIT_S))

    def __str__(self) -> str:
        """Return the values other than defaults, as arguments of `from_files`."""
        return call("", self)[1:-1]


PATIENCE = Patience()
MAX_WAIT_S = 20.0
# Draws apart from the generators of the user's program.
JITTER = random.SystemRandom()


class ShortBodyError(OSError):
    """A server sent less than the whole file."""


# Exceptions of libraries for a failed connection that are not `OSError`s.
PASSING = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "IncompleteReadError"),
)


def may_pass(error: BaseException) -> bool:
    """Whether a remote read that failed with `error` may succeed the next time."""
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in (408, 425, 429)  # these ask for a retry
    final_errors = (FileNotFoundError, PermissionError, IsADirectoryError, ValueError)
    # A module that is not loaded cannot have raised its errors.
    pairs = ((sys.modules.get(module), name) for module, name in PASSING)
    errors = [getattr(module, name) for module, name in pairs if module is not None]
    return isinstance(error, (OSError, *errors)) and not isinstance(error, final_errors)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or of the error that s3fs made it from."""
    status = getattr(error, "status", None)
    answer = getattr(error.__cause__, "response", None)  # of botocore's ClientError
    if isinstance(answer, Mapping):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def tell_of_retry(state: RetryCallState) -> None:
    """Log that a read is retried."""
    error = None if state.outcome is None else state.outcome.exception()
    LOGGER.info("reading %s: %r; trying again", state.args[0], error)


# Second requests for late reads.

# The number of finished reads needed to estimate how long a read takes.
KNOWN = 20
# Seconds after which a read is late until there is an estimate.
UNKNOWN_LATE_S = 1.0
# The number of latest reads in the estimate.
REMEMBERED = 1000
# The largest share of requests that repeat another, apart from one in `REST_S`: when
# all reads are late the store is slow, and when all stall nothing else gets them going.
MAX_SHARE = 0.05
REST_S = 1.0
# Requests that may be repeated besides: a share of the first few reads is none.
FIRST_FEW = 10
# Seconds, at least, between two looks at whether a read may be repeated.
LOOK_S = 0.05


class HedgedReads:
    """Reads files in one event loop and requests late ones again."""

    def __init__(self) -> None:
        # Seconds that reads took, in the order in which they finished.
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        # The time from which a request may be repeated whatever its share.
        self._rested_s = 0.0
        # Number of files requested, and of further requests for them.
        self.asked = self.hedged = 0

    async def read(
        self, function: Callable[[str], Awaitable[bytes]], path: str
    ) -> bytes:
        """Return the result of the first call of `function(path)` that succeeds.

        It is called again if the result is late. An error in one call is raised only if
        the others fail, too.
        """
        self.asked += 1
        begun_s = asked_s = time.monotonic()
        tasks = [asyncio.ensure_future(function(path))]
        try:
            while True:
                done, _ = await asyncio.wait(
                    tasks,
                    timeout=self._look_in_s(asked_s),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                late = time.monotonic() >= asked_s + self.late_s()
                if not done and late and self.may_hedge():
                    self.hedged += 1
                    asked_s = time.monotonic()
                    self._rested_s = asked_s + REST_S
                    tasks.append(asyncio.ensure_future(function(path)))
                if done or len(tasks) == 3:  # the second one may stall as well
                    content = await first_good(tasks)
                    self._note(time.monotonic() - begun_s)
                    return content
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def late_s(self) -> float:
        """Return the seconds after which a read is late."""
        count = len(self._sorted)
        if count < KNOWN:
            return UNKNOWN_LATE_S
        # Twice the time that 90 % take, so few are late that will end soon. It is not
        # the 95 % of the paper, because the first reads, which open connections, may be
        # the other 5 %.
        return 2.0 * self._sorted[int(0.9 * (count - 1))]

    def may_hedge(self) -> bool:
        """Whether a request may be repeated now."""
        within = self.hedged < FIRST_FEW + MAX_SHARE * self.asked
        return within or time.monotonic() >= self._rested_s

    def _look_in_s(self, asked_s: float) -> float:
        """Return the seconds until a request of that time may be late.

        While there is no estimate, reads that finish meanwhile may make one.
        """
        left_s = asked_s + self.late_s() - time.monotonic()
        if len(self._sorted) < KNOWN:
            left_s = min(left_s, LOOK_S)
        return max(left_s, 0.0 if self.may_hedge() else LOOK_S)

    def _note(self, seconds: float) -> None:
        self._latest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._latest) > REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]


async def first_good(tasks: Sequence[asyncio.Future[bytes]]) -> bytes:
    """Return the first result; raise the last error if there is none."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        good = next((task for task in done if task.exception() is None), None)
        if good is not None or not pending:
            return (good or done.pop()).result()
