"""Programs beside the tests: how many cores they use."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

__all__ = ["CoresOfOthers"]


class CoresOfOthers:
    """The cores that other programs have used since this was made."""

    def __init__(self) -> None:
        self._began_s, self._before_s = time.monotonic(), _cpu_s_of_others()

    def __call__(self) -> float:
        """Return their average number. What this process has left to itself counts."""
        used_s = _cpu_s_of_others() - self._before_s
        return max(0.0, used_s) / max(1e-9, time.monotonic() - self._began_s)


def _cpu_s_of_others() -> float:
    machine, own = psutil.cpu_times(), os.times()
    mine_s = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            used = child.cpu_times()
            mine_s += used.user + used.system
            # The children that a child has waited for.
            mine_s += used.children_user + used.children_system
    return machine.user + machine.nice + machine.system - mine_s
