"""Ctrl-C may come between any two lines of a start, and leaves nothing behind."""

from __future__ import annotations

import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.far.child import Child
from penstock.engine.far.fork_server import ForkServer
from penstock.engine.far.pools import FarPools
from penstock.engine.feed import EngineHost
from penstock.engine.run import Run

STARTS = (
    Engine.__init__,
    Engine._begin,  # noqa: SLF001
    FarPools.begin,
    FarPools.fork,
    ForkServer.__init__,
    ForkServer._start,  # noqa: SLF001
    Child.fork,
    Child.__init__,
    EngineHost.__init__,
    Run._begin,  # noqa: SLF001
)


class Interrupt:
    """Sends Ctrl-C before the `at`-th line that runs in `STARTS`."""

    def __init__(self, at: int) -> None:
        self.lines_left = at
        self.sent_at = ""
        self._watched: set[CodeType] = {method.__code__ for method in STARTS}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in self._watched:
            return None
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0:
                self.sent_at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted(pipe: ps.Pipeline, at: int) -> str:
    """Begin an epoch, interrupted at the `at`-th line; return where, if anywhere."""
    interrupt, before = Interrupt(at), sys.gettrace()
    try:
        sys.settrace(interrupt)
        next(iter(pipe))
    except KeyboardInterrupt:
        return interrupt.sent_at
    finally:
        sys.settrace(before)
        pipe.close()
    return ""


@pytest.mark.parametrize(
    ("host", "stride"),
    [
        ("process", 3),
        pytest.param("process", 1, marks=pytest.mark.slow),
        pytest.param("trainer", 1, marks=pytest.mark.slow),
    ],
)
def test_a_start_that_is_interrupted_on_any_line_leaves_nothing(
    host: Any, stride: int
) -> None:
    executor: Any = "process" if host == "trainer" else "thread"
    me = psutil.Process()
    before = {child.pid for child in me.children()}, threading.active_count()
    for at in range(1, 1000, stride):
        pipe = ps.Pipeline.from_dataset(
            range(8), executor=executor, num_parallel_workers=1
        )
        where = interrupted(pipe.batch(4).options(host=host), at)
        if not where:
            break
        after = {child.pid for child in me.children()}, threading.active_count()
        assert after == before, where
    assert at > 20
