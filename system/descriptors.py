"""How many file descriptors this process may still open."""

from __future__ import annotations

import os
import resource
import sys

OPEN = "/proc/self/fd"


def most_descriptors() -> int:
    """Return how many may be open at once: `ulimit -n`."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def descriptors_left() -> int:
    """Return how many more may be opened now."""
    used = len(os.listdir(OPEN)) if os.path.isdir(OPEN) else 0
    return most_descriptors() - used
