"""A worker's page: what it holds and how it ended can be read after its death."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Iterator

import pytest

from penstock.engine.workers.process.status_page import ALL_ROWS, Hands, post_status


@pytest.fixture
def hands() -> Iterator[Hands]:
    """An empty page."""
    page = Hands.make()
    yield page
    page.close()


def rows(hands: Hands) -> dict[int, int]:
    return {held.task: held.row for held in hands.held()}


def test_nothing_is_in_hand_before_a_task_and_after_it(hands: Hands) -> None:
    hand = hands.hand(0)
    assert hands.held() == []
    hand.begin(7)
    assert rows(hands) == {7: ALL_ROWS}
    hand.end()
    assert hands.held() == []


def test_the_sample_taken_is_the_sample_shown(hands: Hands) -> None:
    hand = hands.hand(0)
    hand.begin(1)
    seen = [(item, rows(hands)[1]) for item in hand.each("abc", [0, 4, 5])]
    assert seen == [("a", 0), ("b", 4), ("c", 5)]
    assert rows(hands) == {1: ALL_ROWS}


def test_lanes_do_not_mix(hands: Hands) -> None:
    for lane in (0, 1, 499):
        hands.hand(lane).begin(100 + lane)
    hands.hand(1).end()
    assert rows(hands) == {100: ALL_ROWS, 599: ALL_ROWS}


def test_a_killed_process_leaves_what_it_held_its_status_and_its_stacks(
    hands: Hands,
) -> None:
    pid = os.fork()
    if pid == 0:
        faulthandler.enable(hands.descriptor)
        hand = hands.hand(3)
        hand.begin(12)
        for _ in hand.each(range(10), range(10)):
            if rows(hands)[12] == 6:
                os.abort()
    _, status = os.waitpid(pid, 0)
    assert hands.status is None
    post_status(hands.descriptor, status)
    assert os.WTERMSIG(hands.status or 0) == 6
    assert rows(hands) == {12: 6}
    assert "Fatal Python error: Aborted" in hands.text()
    assert __file__ in hands.text()


def test_a_page_says_nothing_until_something_is_written(hands: Hands) -> None:
    assert hands.text() == ""
    assert hands.status is None


def test_it_is_known_when_a_lane_last_moved(hands: Hands) -> None:
    assert hands.moved_ns() == 0
    before = time.monotonic_ns()
    hands.hand(0).begin(1)
    hands.hand(3).begin(2)
    begun = hands.moved_ns()
    hands.hand(0).end()
    assert before <= begun <= hands.moved_ns() <= time.monotonic_ns()
