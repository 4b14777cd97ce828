"""The time that threads waited for a core, as the system counts it."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from penstock.system import run_queue
from penstock.system.run_queue import RunQueue, Times, in_line, threads_of, waited_ns

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not count it"
)
DATA = bytes(1 << 20)


@contextmanager
def burning(count: int) -> Iterator[list[str]]:
    """Run threads that compute without the GIL, all on one core."""
    core = min(os.sched_getaffinity(0))
    over = threading.Event()

    def burn() -> None:
        os.sched_setaffinity(0, {core})
        while not over.is_set():
            hashlib.sha256(DATA)

    threads = [threading.Thread(target=burn) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield [f"/proc/self/task/{thread.native_id}" for thread in threads]
    finally:
        over.set()
        for thread in threads:
            thread.join()


def look_until_they_wait(queue: RunQueue) -> int:
    """Return how many nanoseconds threads have waited, once they have at all."""
    end = time.monotonic() + 60.0
    while not (waited := queue.look().waited_ns):
        assert time.monotonic() < end
    return waited


def test_two_threads_that_share_a_core_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_queue, "APART_NS", 0)
    with burning(2) as threads:
        assert look_until_they_wait(RunQueue(lambda: threads)) > 0


def test_the_wait_of_a_thread_that_is_gone_still_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_queue, "APART_NS", 0)
    with burning(2) as threads:
        queue = RunQueue(lambda: threads)
        before = look_until_they_wait(queue)
    last = queue.look()
    waits = [before, last.waited_ns]
    assert waits == sorted(waits)
    assert queue.look()[:2] == last[:2]


def test_one_look_serves_everybody_who_asks_soon_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic_ns=lambda: 0)
    times = iter((Times(5, 10), Times(6, 30), Times(9, 70)))
    monkeypatch.setattr(run_queue, "time", clock)
    monkeypatch.setattr(run_queue, "times_of", lambda thread: next(times))
    queue = RunQueue(lambda: ["a thread"])
    assert queue.look() == queue.look() == Times(0, 0)
    clock.monotonic_ns = lambda: run_queue.APART_NS - 1
    assert queue.look() == Times(0, 0)
    clock.monotonic_ns = lambda: run_queue.APART_NS
    assert queue.look() == queue.look() == Times(1, 20)
    clock.monotonic_ns = lambda: 2 * run_queue.APART_NS
    assert queue.look() == Times(4, 60)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64")
    or not os.path.exists("/proc/self/syscall")
    or sys.version_info >= (3, 13),  # there, each thread waits at its own address
    reason="the system or this Python does not show it",
)
def test_threads_that_wait_for_one_lock_are_in_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_queue, "APART_NS", 0)
    one, theirs = threading.Lock(), [threading.Lock() for _ in range(3)]

    def take(lock: threading.Lock) -> None:
        with lock:
            pass

    waiting = [threading.Thread(target=take, args=(one,)) for _ in range(3)]
    apart = [threading.Thread(target=take, args=(lock,)) for lock in theirs]
    with ExitStack() as stack:
        for lock in (one, *theirs):
            stack.enter_context(lock)
        for thread in (*waiting, *apart):
            thread.start()
        waiting_paths, others = (
            [f"/proc/self/task/{thread.native_id}" for thread in threads]
            for threads in (waiting, apart)
        )
        end = time.monotonic() + 60.0
        while in_line(waiting_paths) < len(waiting_paths):
            assert time.monotonic() < end
        assert in_line([*waiting_paths, *others]) == len(waiting_paths)
        assert in_line(others) == in_line(waiting_paths[:1]) == 0
        queue = RunQueue(lambda: waiting_paths)
        assert queue.look()[2:] == (3, 3)
        assert queue.look()[2:] == (6, 6)
    for thread in (*waiting, *apart):
        thread.join()


def test_a_process_that_is_gone_has_no_threads() -> None:
    assert threads_of(0) == []
    assert len(threads_of(os.getpid())) >= 1


def test_a_thread_of_which_nothing_is_known_has_not_waited() -> None:
    assert waited_ns("/proc/nothing") == 0
