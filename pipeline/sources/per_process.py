"""Values that each process makes for itself, once, for all its threads."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Makes values by key, each once per process, and keeps the last used ones.

    Any number of threads may ask at once; a thread waits for a value that another is
    making. A child process starts without values, and so does an unpickled copy.

    Args:
        make: returns the value of a key.
        kept: number of values to keep.
        weigh: bytes of a value; None: they do not count.
        limit: returns the bytes that values may take together. The newest one is kept
            even if it takes more.
    """

    def __init__(
        self,
        make: Callable[[Any], T],
        kept: int,
        weigh: Callable[[T], int] | None = None,
        limit: Callable[[], int] | None = None,
    ) -> None:
        self._make, self._kept = make, kept
        self._weigh, self._limit = weigh, limit
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Future[T]] = OrderedDict()
        self._nbytes: dict[Hashable, int] = {}
        self._process = os.getpid()  # last: a thread that sees it finds a free lock

    def __call__(self, key: Hashable) -> T:
        """Return the value of a key."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            found = self._values.get(key)
            mine = found is None
            if found is None:
                found = self._values[key] = Future()
                if len(self._values) > self._kept:
                    self._drop(next(iter(self._values)))
            self._values.move_to_end(key)
        if mine:
            self._fill(key, found)
        return found.result()

    def _fill(self, key: Hashable, value: Future[T]) -> None:
        try:
            value.set_result(self._make(key))
        except BaseException as error:
            value.set_exception(error)
            with self._lock:  # the next to ask tries again
                self._values.pop(key, None)
            raise
        if self._weigh is not None and self._limit is not None:
            nbytes, limit = self._weigh(value.result()), self._limit()
            with self._lock:
                self._make_room(key, nbytes, limit)

    def _make_room(self, key: Hashable, nbytes: int, limit: int) -> None:
        """Drop the values used longest ago until there is room for one just made."""
        if key in self._values:
            self._nbytes[key] = nbytes
        for old in [each for each in self._values if each != key]:
            if sum(self._nbytes.values()) <= limit:
                break
            if old in self._nbytes:
                self._drop(old)

    def _drop(self, key: Hashable) -> None:
        del self._values[key]
        self._nbytes.pop(key, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make, self._kept, self._weigh, self._limit)
