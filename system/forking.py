"""Forking beside threads, when none of them is in the middle of an import."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator

FORKS = hasattr(os, "fork") and hasattr(os, "memfd_create")
"""Whether this system can have worker processes of ours; macOS and Windows cannot."""
MAX_LOOKS = 100
"""Threads that import one module after the other shall not keep it from forking."""


def fork() -> int:
    """Fork, as `os.fork`, once no other thread is in the middle of an import.

    A child inherits the locks of modules being imported, but not the threads that would
    release them: the first import there of such a module, as numpy's of `random` when
    it is first asked for, would wait forever.
    """
    for _ in range(MAX_LOOKS):
        names = list(_imported_elsewhere())
        if not names:
            break
        for name in names:
            # Takes the module's lock and lets go of it, as an import of it would.
            sys.modules["_frozen_importlib"]._lock_unlock_module(name)  # noqa: SLF001
    with warnings.catch_warnings():
        # Python 3.12 warns of forking beside threads. The child takes no other lock
        # that one of them may hold: it reads its pipe.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _imported_elsewhere() -> Iterator[str]:
    """Modules that another thread imports now."""
    # Not those that a thread of the parent took, which this child does not have.
    others = sys._current_frames().keys() - {threading.get_ident()}  # noqa: SLF001
    locks = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    for name, reference in list(locks.items()):
        owner = getattr(reference(), "owner", None)
        if owner in others:
            yield name
