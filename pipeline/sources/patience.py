"""What remote reads may cost: retries after errors that may pass, sizes, bandwidth."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
)

from ...errors import BudgetError, check
from ...system.printing import call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of remote reads: retries, time, size and bandwidth.

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
    bandwidth: int | None = None
    """Bytes per second for each event loop; None: no limit."""

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
        content: bytes = await AsyncRetrying(**self._rules())(function, path)
        return content

    def check_size(self, nbytes: int, path: str) -> None:
        """Raise `BudgetError` if a file, or the part received, is too large."""
        if nbytes > self.max_bytes:
            raise BudgetError(
                f"{path} has {nbytes} bytes or more, and a file may have"
                f" {self.max_bytes}; if it is right, say"
                f" from_files(..., max_bytes={nbytes}) or more"
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
JITTER = random.SystemRandom()
"""Draws apart from the generators of the user's program."""
LATER = frozenset((408, 425, 429))
"""Statuses below 500 that ask the client to retry."""
LOGGER = logging.getLogger("penstock")


class ShortBodyError(OSError):
    """A server sent less than the whole file."""


PASSING = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "IncompleteReadError"),
)
"""Exceptions of libraries for a failed connection that are not `OSError`s."""


def may_pass(error: BaseException) -> bool:
    """Whether a remote read that failed with `error` may succeed the next time."""
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in LATER
    lasting = (FileNotFoundError, PermissionError, IsADirectoryError, ValueError)
    # A module that is not loaded cannot have raised its errors.
    known = ((sys.modules.get(module), name) for module, name in PASSING)
    passing = [getattr(module, name) for module, name in known if module is not None]
    return isinstance(error, (OSError, *passing)) and not isinstance(error, lasting)


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
