"""Collections of garbage that come later, and what finalisers close."""

import _thread
import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator

# Those that will enable collections again: as many as begin loops at this moment.
_debtors: list[object] = []


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Postpone collections while modules are imported.

    torch's import leaves some 100,000 objects and a full collection of them nearly due,
    which takes 0.1 s. Our imports would bring it about before a program's first batch.
    """
    enabled, debtor = gc.isenabled(), object()
    try:  # an interrupt may come between any two steps
        if enabled:
            _debtors.append(debtor)
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
            with contextlib.suppress(ValueError):
                _debtors.remove(debtor)


def _after_fork() -> None:
    """Enable collections in a child: nobody else would, who left them off in us."""
    if _debtors:
        _debtors.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def close_elsewhere(close: Callable[[], object], wait_s: float) -> None:
    """Have another thread close what a finaliser ends.

    Finalisers run wherever the last reference is dropped, and in the collector, which
    may have interrupted this very thread while it holds a lock that closing needs: one
    of ours, or one of Python's own, as of logging or of its list of threads. Or closing
    waits for the end of this thread. So this one waits for a limited time.

    Args:
        close: closes it.
        wait_s: how long to wait until it is closed, in seconds.
    """
    closed_event = threading.Event()

    def work() -> None:
        try:
            close()
        finally:
            closed_event.set()  # before the thread itself has ended

    try:
        threading.Thread(target=work, name="penstock closing").start()
    except RuntimeError:  # the program is ending, or has too many threads
        work()
    try:
        closed_event.wait(wait_s)
    except KeyboardInterrupt:  # would be lost here
        closed_event.wait(wait_s)
        _thread.interrupt_main()
