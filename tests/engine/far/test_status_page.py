"""A worker's status page shows what it worked on and how it ended, even after death."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock.engine.far.child import (
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
    return {sample.task: sample.row for sample in status_page.held()}


def test_no_sample_is_shown_before_and_after_a_task(status_page: StatusPage) -> None:
    line = status_page.line(0)
    assert status_page.held() == []
    line.begin(7)
    assert rows(status_page) == {7: ALL_ROWS}
    line.end()
    assert status_page.held() == []


def test_the_sample_being_worked_on_is_shown(status_page: StatusPage) -> None:
    line = status_page.line(0)
    line.begin(1)
    pairs = [(item, rows(status_page)[1]) for item in line.each("abc", [0, 4, 5])]
    assert pairs == [("a", 0), ("b", 4), ("c", 5)]
    assert rows(status_page) == {1: ALL_ROWS}


def test_threads_do_not_interfere(status_page: StatusPage) -> None:
    for line in (0, 1, 499):
        status_page.line(line).begin(100 + line)
    status_page.line(1).end()
    assert rows(status_page) == {100: ALL_ROWS, 599: ALL_ROWS}


def test_a_killed_process_leaves_its_sample_its_status_and_its_stacks(
    status_page: StatusPage,
) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.enable(status_page.descriptor)
        line = status_page.line(3)
        line.begin(12)
        for _ in line.each(range(10), range(10)):
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


def test_the_page_says_when_a_thread_last_moved(
    status_page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic_ns=iter(range(5, 15, 2)).__next__)
    monkeypatch.setattr("penstock.engine.far.child.time", clock)
    assert status_page.moved_ns() == 0
    status_page.line(0).begin(1)
    status_page.line(3).begin(2)
    assert status_page.moved_ns() == 7
    status_page.line(0).end()
    assert status_page.moved_ns() == 9
    items = status_page.line(3).each("ab", [0, 1])
    assert [status_page.moved_ns() for _ in items] == [11, 13]


class Line(threading.Thread):
    """Works on three samples; the first one takes until `go` is set."""

    def __init__(self, status_page: StatusPage) -> None:
        super().__init__()
        self.line = status_page.line(3)
        self.go = threading.Event()
        self.seen = ""

    def run(self) -> None:
        self.line.begin(1)
        for item in self.line.each("abc", [0, 1, 2]):
            self.seen += item
            self.go.wait()
        self.line.end()


def resting(status_page: StatusPage) -> Line:
    """Return a thread that rests before its second sample."""
    line = Line(status_page)
    line.start()
    while not status_page.at_work:
        time.sleep(0.001)
    status_page.rest(1 << 62)
    assert status_page.at_work
    line.go.set()
    while status_page.at_work:
        time.sleep(0.001)
    assert line.seen == "a"
    return line


@pytest.mark.parametrize("ahead_ns", [None, 1_000_000])
def test_a_thread_rests_before_its_next_sample_until_it_may_go_on(
    status_page: StatusPage, ahead_ns: int | None
) -> None:
    line = resting(status_page)
    status_page.rest(0 if ahead_ns is None else time.monotonic_ns() + ahead_ns)
    line.join(20)
    assert line.seen == "abc"
    assert status_page.held() == []


def test_a_rest_does_not_count_as_time_at_a_sample(status_page: StatusPage) -> None:
    line = resting(status_page)
    [first] = status_page.held()
    while status_page.held() == [first]:
        time.sleep(0.001)
    [later] = status_page.held()
    assert (later.task, later.row) == (first.task, first.row)
    assert later.since_ns > first.since_ns
    status_page.rest(0)
    line.join(20)
