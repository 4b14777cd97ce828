"""Forking while other threads run: none of them imports, or forks as well.

A Ctrl-C that comes between a fork and what must follow it is handled a moment later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

# Whether this system supports our worker processes; macOS and Windows do not. Shared
# memory may be a file.
FORKS = all(
    hasattr(module, name)
    for module, name in (
        (os, "fork"),
        (os, "pidfd_open"),
        (signal, "pidfd_send_signal"),
    )
)
# How often to wait for imports to end. Threads that import one module after another
# must not prevent a fork.
MAX_LOOKS = 100
# Held while forking: libraries (filelock) forbid it while another thread forks. A
# finaliser or signal handler that forks in the midst of it must not wait for itself.
_forking = threading.RLock()


def _renew() -> None:
    global _forking  # noqa: PLW0603 a child inherits the lock, and not who would release it
    _forking = threading.RLock()


if FORKS:
    os.register_at_fork(after_in_child=_renew)


def fork() -> int:
    """Fork like `os.fork`, once no other thread forks or is in the middle of an import.

    A child inherits the locks of modules being imported, but not the threads that would
    release them. Its first import of such a module (numpy's `random`, say, which is
    imported on first use) would wait forever.

    Raises:
        OSError: the process limit is reached, or memory is short.
    """
    for _ in range(MAX_LOOKS):
        names = list(_imported_elsewhere())
        if not names:
            break
        for name in names:
            # Acquires the module's lock and releases it, as an import of it would.
            sys.modules["_frozen_importlib"]._lock_unlock_module(name)  # noqa: SLF001
    flush()
    with _forking, warnings.catch_warnings():
        # Python 3.12 warns about forking beside threads. The child takes no other lock
        # that a thread may hold: it only reads its pipe.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def flush() -> None:
    """Write what was printed: a child would have a copy, and write it, too."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or any object at all
            stream.flush()


def _imported_elsewhere() -> Iterator[str]:
    """Yield the modules that other threads are importing now.

    Not by `sys._current_frames`, which may never return in Python 3.11: it makes frames
    under a lock of the interpreter. If that starts a garbage collection, and this finds
    a `threading.local`, the lock is taken again (CPython issue 106883).
    """
    # A lock held by a thread of our parent does not count: this child lacks the thread.
    others = {other.ident for other in threading.enumerate()} - {threading.get_ident()}
    locks = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    for name, reference in list(locks.items()):
        if getattr(reference(), "owner", None) in others:
            yield name


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Put off a Ctrl-C that comes within this `with` until the block ends.

    Python raises KeyboardInterrupt between any two steps of the main thread, even
    between a fork and the assignment that records the child. Use it for steps that take
    a second at most. Several Ctrl-C count as one.

    Raises:
        KeyboardInterrupt: one came, and the program's handler raises this, as Python's
            own does.
    """
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler):  # nothing is raised here
        yield
        return
    calls: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if calls:
            handler(*calls[-1])
