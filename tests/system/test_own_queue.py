"""How long work in the calling thread waited for a core, judged by some of it."""

from __future__ import annotations

import pytest

from penstock.system import run_queue
from penstock.system.run_queue import LONG_NS, SOME, OwnQueue, waited_ns


class Counter:
    """A count of the system that a test sets; it counts how often it was read."""

    def __init__(self) -> None:
        self.ns = 0
        self.reads = 0

    def __call__(self, thread: str) -> int:
        assert thread == "/proc/thread-self"
        self.reads += 1
        return self.ns


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(run_queue, "waited_ns", counter)
    return counter


def work(queue: OwnQueue, counter: Counter, run_ns: int, waited_ns: int = 0) -> None:
    queue.begin()
    counter.ns += waited_ns
    queue.end(run_ns)


def test_nothing_has_waited_before_any_work() -> None:
    queue = OwnQueue()
    assert (queue.share, queue.seconds, queue.run_ns) == (0.0, 0.0, 0)


def test_long_work_is_measured_every_time(counter: Counter) -> None:
    queue = OwnQueue()
    work(queue, counter, LONG_NS, LONG_NS // 2)
    assert queue.share == 0.5
    work(queue, counter, LONG_NS)
    assert queue.share == 0.25
    assert queue.run_ns == 2 * LONG_NS
    assert queue.seconds == pytest.approx(LONG_NS / 2 / 1e9)
    assert counter.reads == 4


def test_of_short_work_one_piece_in_some_is_measured_and_stands_for_the_others(
    counter: Counter,
) -> None:
    queue = OwnQueue()
    work(queue, counter, 100)  # nothing is known yet: measured
    for number in range(2, 2 * SOME + 1):
        work(queue, counter, 100, 50 if number % SOME == 0 else 30)
    assert counter.reads == 2 * 3
    assert queue.share == pytest.approx(100 / 300)
    assert queue.run_ns == 2 * SOME * 100
    assert queue.seconds == pytest.approx(queue.run_ns / 3 / 1e9)


def test_a_sudden_long_one_that_was_not_measured_counts_as_just_long(
    counter: Counter,
) -> None:
    queue = OwnQueue()
    work(queue, counter, 100)
    work(queue, counter, 10 * LONG_NS)
    assert queue.run_ns == 100 + LONG_NS
    work(queue, counter, LONG_NS)  # the last was long: measured
    assert counter.reads == 4


def test_a_thread_of_which_nothing_is_known_has_not_waited() -> None:
    assert waited_ns("/proc/nothing") == 0
