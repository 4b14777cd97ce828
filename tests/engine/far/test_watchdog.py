"""The time limit, checked by hand: which worker exceeds it, and when."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.engine.core.in_flight import Chunk
from penstock.engine.far.child import StatusPage
from penstock.engine.far.far_pool import Errand
from penstock.engine.far.processes import WorkerChild
from penstock.engine.plan import Context


class Clock:
    """The time of the trainer and of the workers, which the test turns."""

    def __init__(self) -> None:
        self.now_s = 100

    def monotonic_ns(self) -> int:
        return self.now_s * 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the status page."""
    clock = Clock()
    module = SimpleNamespace(monotonic_ns=clock.monotonic_ns)
    monkeypatch.setattr("penstock.engine.far.child.time", module)
    return clock


@pytest.fixture
def child(clock: Clock) -> Iterator[WorkerChild]:
    """Return a child with one line, to which task 2 is sent at 100 s."""
    nothing: Any = None
    status_page = StatusPage.make()
    child = WorkerChild(nothing, status_page, 0, 0, nothing)
    child.pid = 1
    child.errands[2] = Errand(nothing, nothing, clock.monotonic_ns())
    yield child
    status_page.close()


def due_in_s(child: WorkerChild, clock: Clock) -> float | None:
    """Return the seconds until the child is checked again, with a limit of a minute."""
    now_ns = clock.monotonic_ns()
    due_ns = child.look(60 * 10**9, now_ns)
    assert not child.asked_ns
    return None if due_ns is None else (due_ns - now_ns) / 1e9


def test_a_task_is_due_one_limit_after_it_began(
    child: WorkerChild, clock: Clock
) -> None:
    clock.now_s = 110
    child.status_page.line(0).begin(2)
    clock.now_s = 115
    assert due_in_s(child, clock) == 55.0


def test_a_task_that_no_thread_takes_up_is_due_too(
    child: WorkerChild, clock: Clock
) -> None:
    clock.now_s = 115
    assert due_in_s(child, clock) == 45.0


def test_a_thread_that_stops_right_after_sending_an_outcome_is_due(
    child: WorkerChild, clock: Clock
) -> None:
    clock.now_s = 110
    child.status_page.line(0).begin(1)  # the trainer has all outcomes of task 1
    clock.now_s = 115
    assert due_in_s(child, clock) == 55.0


def test_a_worker_without_a_task_is_never_due(child: WorkerChild, clock: Clock) -> None:
    child.errands.clear()
    assert due_in_s(child, clock) is None


def test_time_in_which_this_process_was_stopped_does_not_count(
    child: WorkerChild, clock: Clock
) -> None:
    child.status_page.line(0).begin(2)
    clock.now_s = 5000  # Ctrl-Z stopped the worker, too
    assert due_in_s(child, clock) == 60.0
    clock.now_s += 30
    assert due_in_s(child, clock) == 30.0
    child.look(60 * 10**9, 5065 * 10**9)  # late again
    assert child.asked_ns


def test_only_a_child_that_has_begun_is_blamed_on_samples(child: WorkerChild) -> None:
    rows = np.arange(3), np.zeros(3, np.int64)
    chunk = Chunk(0, 0, *rows, Context(0, 0, None))
    child.errands[2] = Errand(child.errands[2].lease, chunk, 0)
    assert child.suspects(2) == range(3)
    child.pid = 0
    assert child.suspects(2) == ()
