"""A process that loads looks like a worker of torch's to multiprocessing and atexit.

We fork without multiprocessing, so it would take that process for the trainer itself.
Then a dataset could start processes there that nobody ends, and a queue that the
trainer has used would believe that its feeder thread runs here, too.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import threading
from collections.abc import Iterator
from typing import Any

# Only private names know of processes that multiprocessing has not started.
# ruff: noqa: SLF001
process: Any = multiprocessing.process
util: Any = multiprocessing.util

LEAVE_S = 5.0
"""How long what the dataset has started may take to end, as with torch's workers. When
a loop ends, the fork server is less patient."""


@contextlib.contextmanager
def daemonic() -> Iterator[None]:
    """Make this process a daemonic child; end what was started inside at the end.

    Such a child may have no children of its own: multiprocessing refuses to start any.
    The exit functions that it inherits are the trainer's to call.
    """
    atexit._clear()
    util._finalizer_registry.clear()
    trainer = process.current_process()
    process._current_process = multiprocessing.Process(daemon=True)
    process._children = set()
    sentinel = os.pidfd_open(os.getppid())
    process._parent_process = process._ParentProcess(
        trainer.name, os.getppid(), sentinel
    )
    util._run_after_forkers()
    try:
        yield
    finally:
        limit = threading.Timer(LEAVE_S, os._exit, (1,))
        limit.daemon = True
        limit.start()
        with contextlib.suppress(Exception):
            util._exit_function()
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # prints errors, and raises none
        limit.cancel()
