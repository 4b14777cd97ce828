"""The leak guard finds every kind of leak."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from support.leaks import Footprint, leaks_since


def a_thread(stack: ExitStack) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)


def a_child(stack: ExitStack) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(child.communicate)


def a_file(stack: ExitStack) -> None:
    stack.callback(os.close, os.open(__file__, os.O_RDONLY))


def a_segment(stack: ExitStack) -> None:
    segment = SharedMemory(create=True, size=4096)
    stack.callback(segment.unlink)
    stack.callback(segment.close)


def a_mapped_memfd(stack: ExitStack) -> None:
    descriptor = os.memfd_create("left-over-slab")
    os.truncate(descriptor, 1 << 16)
    block = mmap.mmap(descriptor, 1 << 16)
    os.close(descriptor)
    block.write(b"1" * (1 << 16))
    stack.callback(block.close)


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (a_thread, "thread 'left-over'"),
        (a_child, "child process"),
        (a_file, Path(__file__).name),
        (a_segment, "shared memory /dev/shm/psm_"),
        (a_mapped_memfd, "/memfd:left-over-slab"),
    ],
)
def test_a_leak_is_named_until_it_ends(
    leak: Callable[[ExitStack], None], named: str
) -> None:
    before = Footprint.now()
    with ExitStack() as stack:
        leak(stack)
        assert named in "\n".join(leaks_since(before, grace_s=0))
    assert leaks_since(before) == []


def test_the_guard_waits_for_threads_that_are_about_to_end() -> None:
    before = Footprint.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    threading.Timer(0.05, stop.set).start()
    assert leaks_since(before) == []


def test_a_cycle_that_holds_a_file_is_collected_first() -> None:
    before = Footprint.now()
    cycle: list[object] = [Path(__file__).open("rb")]  # noqa: SIM115
    cycle.append(cycle)
    del cycle
    with pytest.warns(ResourceWarning):
        assert leaks_since(before) == []
