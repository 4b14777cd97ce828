"""Calls of LMDB: what they raise, and how many are going on when this process forks.

py-lmdb's `Environment.close` waits until no thread is in a call of it. In a forked
child those threads are not there, so it would wait for ever; and it must be closed
there before it can be opened anew.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["DiskError", "failing", "was_quiet"]

PATIENCE_S = 5.0
"""Before a fork; a sync to a slow disk may take longer."""

_lock = threading.Lock()
_changed = threading.Condition(_lock)
_calls = 0
_forking = 0
"""Threads that are about to."""
_quiet = True
"""Whether this process was forked while none was in flight."""
_mine = threading.local()


class DiskError(Exception):
    """The tier cannot be used, or not any more; the text says why."""


class failing:  # noqa: N801 to be read in a `with`
    """Turns whatever the system or LMDB raises within into `DiskError`.

    It waits for a fork that is due, unless it stands within another.
    """

    __slots__ = ("_folder", "_what")

    def __init__(self, what: str, folder: Path) -> None:
        self._what = what
        self._folder = folder

    def __enter__(self) -> None:
        global _calls  # noqa: PLW0603 one a process
        depth = getattr(_mine, "depth", 0)
        with _lock:
            while _forking and not depth:
                _changed.wait()
            _calls += 1
        _mine.depth = depth + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _calls  # noqa: PLW0603 one a process
        _mine.depth -= 1
        with _lock:
            _calls -= 1
            if _forking and not _calls:
                _changed.notify_all()
        if error is not None:
            self._translate(error)

    def _translate(self, error: BaseException) -> None:
        import lmdb

        if isinstance(error, OSError | lmdb.Error):
            raise DiskError(
                f"the cache in {self._folder} cannot be {self._what}"
                f" ({type(error).__name__}: {error})"
            ) from error


def was_quiet() -> bool:
    """Whether a forked child may close what it inherited."""
    return _quiet


def _before() -> None:
    global _forking  # noqa: PLW0603 one a process
    _changed.acquire()  # until it has forked
    _forking += 1
    _changed.wait_for(lambda: not _calls, PATIENCE_S)


def _in_parent() -> None:
    global _forking  # noqa: PLW0603 one a process
    _forking -= 1
    _changed.notify_all()
    _changed.release()


def _in_child() -> None:
    global _calls, _changed, _forking, _lock, _quiet  # noqa: PLW0603 one a process
    _quiet = not _calls
    _calls = _forking = 0
    _lock = threading.Lock()
    _changed = threading.Condition(_lock)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_in_parent, after_in_child=_in_child
    )
