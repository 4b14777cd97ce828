"""The time that threads waited for a core, as the system counts it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.system import run_queue
from penstock.system.run_queue import RunQueue, threads_of

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


def waited_s(queue: RunQueue, at_least: float) -> float:
    """Look until threads have waited this long, or much time has passed."""
    end, waited = time.monotonic() + 20.0, 0.0
    while waited < at_least and time.monotonic() < end:
        waited = queue.look()
    return waited


def test_two_threads_that_share_a_core_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_queue, "APART_NS", 0)
    with burning(2) as threads:
        assert waited_s(RunQueue(lambda: threads), 0.2) >= 0.2


def test_the_wait_of_a_thread_that_is_gone_still_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_queue, "APART_NS", 0)
    with burning(2) as threads:
        queue = RunQueue(lambda: threads)
        before = waited_s(queue, 0.1)
    assert queue.look() == queue.look() >= before


def test_one_look_serves_everybody_who_asks_soon_after() -> None:
    with burning(2) as threads:
        queue = RunQueue(lambda: threads)
        assert queue.look() == queue.look() == 0.0


def test_a_process_that_is_gone_has_no_threads() -> None:
    assert threads_of(0) == []
    assert len(threads_of(os.getpid())) >= 1
