"""The time limit, checked by hand: which worker exceeds it, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from penstock.engine.workers.process.child import Errand, Watchdog, WorkerChild
from penstock.engine.workers.process.status_page import StatusPage


@pytest.fixture
def child() -> Iterator[WorkerChild]:
    """Return a child whose one lane is at work while task 2 is on its way to it."""
    nothing: Any = None
    status_page = StatusPage.make()
    made = WorkerChild(nothing, status_page, 0, 0)
    made.pid = 1
    made.errands[2] = Errand(nothing, nothing, nothing, time.monotonic_ns())
    yield made
    status_page.close()


def due_s(child: WorkerChild) -> float:
    """Return the seconds until the child is checked again, with a limit of a minute."""
    wait_s, lost = Watchdog(60.0).look([child])
    assert lost == []
    return cast("float", wait_s)


def test_a_task_is_due_one_limit_after_it_began(child: WorkerChild) -> None:
    child.status_page.lane(0).begin(2)
    assert due_s(child) == pytest.approx(60.0, abs=1.0)


def test_a_task_that_no_lane_takes_up_is_due_too(child: WorkerChild) -> None:
    assert due_s(child) == pytest.approx(60.0, abs=1.0)


def test_a_lane_that_stops_right_after_sending_an_outcome_is_due(
    child: WorkerChild,
) -> None:
    child.status_page.lane(0).begin(1)  # the trainer has all outcomes of task 1
    assert due_s(child) == pytest.approx(60.0, abs=1.0)


def test_a_worker_without_a_task_is_never_due(child: WorkerChild) -> None:
    child.errands.clear()
    assert Watchdog(60.0).look([child]) == (None, [])
