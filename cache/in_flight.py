"""How many calls of LMDB this process is in, so that it forks between them.

py-lmdb's `Environment.close` waits until no thread is in a call of it. In a forked
child those threads are not there, so it would wait for ever; and it must be closed
there before it can be opened anew.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["in_flight", "was_quiet"]

PATIENCE_S = 5.0
"""Before a fork; a sync to a slow disk may take longer."""

_changed = threading.Condition(threading.Lock())
_calls = 0
_forking = False
_quiet = True
"""Whether this process was forked while none was in flight."""
_mine = threading.local()


@contextmanager
def in_flight() -> Iterator[None]:
    """Count what is done within; wait for a fork that is due, unless nested."""
    depth = getattr(_mine, "depth", 0)
    _add(1, may_wait=not depth)
    _mine.depth = depth + 1
    try:
        yield
    finally:
        _mine.depth = depth
        _add(-1, may_wait=False)


def was_quiet() -> bool:
    """Whether a forked child may close what it inherited."""
    return _quiet


def _add(calls: int, *, may_wait: bool) -> None:
    global _calls  # noqa: PLW0603 one a process
    with _changed:
        if may_wait:
            _changed.wait_for(lambda: not _forking)
        _calls += calls
        if not _calls:
            _changed.notify_all()


def _before() -> None:
    global _forking  # noqa: PLW0603 one a process
    _changed.acquire()  # until it has forked
    _forking = True
    _changed.wait_for(lambda: not _calls, PATIENCE_S)


def _in_parent() -> None:
    global _forking  # noqa: PLW0603 one a process
    _forking = False
    _changed.notify_all()
    _changed.release()


def _in_child() -> None:
    global _calls, _changed, _forking, _quiet  # noqa: PLW0603 one a process
    _quiet = not _calls
    _calls, _forking = 0, False
    _changed = threading.Condition(threading.Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_in_parent, after_in_child=_in_child
    )
