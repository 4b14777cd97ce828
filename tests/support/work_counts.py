"""How much work a call does in its own thread, whatever else the machine does."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def bytecodes(call: Callable[[], object]) -> int:
    """Return how many bytecode instructions the call executes.

    Native code counts as the one instruction that calls it: look at `peak_bytes`, too,
    where numpy might do much at once.
    """
    count = 0

    def step(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return step

    def enter(frame: FrameType, _event: str, _argument: object) -> Any:
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # noqa: SLF001 in 3.12, before any is traced
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def peak_bytes(call: Callable[[], object]) -> int:
    """Return how much more memory Python and numpy hold at the call's peak."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
