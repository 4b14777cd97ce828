"""A worker's status page shows what it worked on and how it ended, even after death."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock.engine.far.status_page import (
    ALL_ROWS,
    StatusPage,
    post_status,
)


@pytest.fixture
def status_page() -> Iterator[StatusPage]:
    """An empty page."""
    page = StatusPage.make()
    yield page
    page.close()


def rows(status_page: StatusPage) -> dict[int, int]:
    return {held.task: held.row for held in status_page.held()}


def test_no_sample_is_shown_before_and_after_a_task(status_page: StatusPage) -> None:
    lane = status_page.lane(0)
    assert status_page.held() == []
    lane.begin(7)
    assert rows(status_page) == {7: ALL_ROWS}
    lane.end()
    assert status_page.held() == []


def test_the_sample_being_worked_on_is_shown(status_page: StatusPage) -> None:
    lane = status_page.lane(0)
    lane.begin(1)
    seen = [(item, rows(status_page)[1]) for item in lane.each("abc", [0, 4, 5])]
    assert seen == [("a", 0), ("b", 4), ("c", 5)]
    assert rows(status_page) == {1: ALL_ROWS}


def test_lanes_do_not_interfere(status_page: StatusPage) -> None:
    for lane in (0, 1, 499):
        status_page.lane(lane).begin(100 + lane)
    status_page.lane(1).end()
    assert rows(status_page) == {100: ALL_ROWS, 599: ALL_ROWS}


def test_a_killed_process_leaves_its_sample_its_status_and_its_stacks(
    status_page: StatusPage,
) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.enable(status_page.descriptor)
        lane = status_page.lane(3)
        lane.begin(12)
        for _ in lane.each(range(10), range(10)):
            if rows(status_page)[12] == 6:
                os.abort()
    _, status = os.waitpid(pid, 0)
    assert status_page.status is None
    post_status(status_page.descriptor, status)
    assert os.WTERMSIG(status_page.status or 0) == 6
    assert rows(status_page) == {12: 6}
    assert "Fatal Python error: Aborted" in status_page.text()
    assert __file__ in status_page.text()


def test_a_page_says_nothing_until_something_is_written(
    status_page: StatusPage,
) -> None:
    assert status_page.text() == ""
    assert status_page.status is None


def test_the_page_says_when_a_lane_last_moved(
    status_page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic_ns=iter(range(5, 15, 2)).__next__)
    monkeypatch.setattr("penstock.engine.far.status_page.time", clock)
    assert status_page.moved_ns() == 0
    status_page.lane(0).begin(1)
    status_page.lane(3).begin(2)
    assert status_page.moved_ns() == 7
    status_page.lane(0).end()
    assert status_page.moved_ns() == 9
    each = status_page.lane(3).each("ab", [0, 1])
    assert [status_page.moved_ns() for _ in each] == [11, 13]
