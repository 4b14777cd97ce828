"""The trainer as worker: what it does when asked, and how fast it tells it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.core.in_flight import Failure, Outcome
from penstock.engine.workers import Inline


class Connected:
    """A connector with some leases, and a program that takes as long as each says."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.settled: list[Outcome] = []
        self.left = 0
        self.begun = 0
        self.own_queue = self

    # As a connector

    def enter(self) -> Any:
        return SimpleNamespace(clock=None)

    def leave(self, meter: object) -> None:
        self.left += 1

    def try_take(self, meter: object) -> Any:
        return SimpleNamespace(chunk=(), inputs=()) if self.outcomes else None

    def settle(self, lease: object, outcome: Outcome, meter: object) -> None:
        self.settled.append(outcome)

    # As the queue of the thread

    def begin(self) -> None:
        self.begun += 1

    def end(self, run_ns: int) -> None:
        self.begun -= 1

    # As a program

    def run(self, *_: object, clock: object) -> Outcome:
        assert self.begun == 1
        return self.outcomes.pop(0)


@pytest.fixture(autouse=True)
def no_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.workers.sink_of", lambda program, lease: None)


def working(*outcomes: Outcome) -> tuple[Inline, Connected]:
    connected: Any = Connected(*outcomes)
    return Inline(connected, connected, 0), connected


def took(rows: int, run_ns: int) -> Outcome:
    return Outcome(rows, run_ns=run_ns)


def test_a_step_works_on_one_lease_and_says_whether_there_was_one() -> None:
    inline, connected = working(took(4, 100), took(2, 100))
    assert [inline.step() for _ in range(3)] == [True, True, False]
    assert [outcome.done for outcome in connected.settled] == [4, 2]
    assert inline.done == 6
    assert connected.begun == 0


def test_its_speed_is_that_of_all_but_the_first_and_the_slowest_lease() -> None:
    inline, _ = working(took(4, 9000), took(4, 400), took(4, 800), took(2, 100))
    tallies = [inline.tally]
    while inline.step():
        tallies.append(inline.tally)
    assert tallies == [(0, 0), (0, 0), (4, 400), (4, 400), (6, 500)]


def test_ctrl_c_in_a_users_function_reaches_the_loop_at_once() -> None:
    failure = Failure(KeyboardInterrupt(), "f", index=0, row=0)
    inline, connected = working(Outcome(1, failures=[failure]))
    with pytest.raises(KeyboardInterrupt):
        inline.step()
    assert connected.settled == []


def test_there_is_one_worker_until_it_retires() -> None:
    inline, connected = working()
    inline.resize(5)
    statistics = inline.statistics()
    assert (inline.executor, statistics.alive) == ("inline", 1)
    assert inline.threads() == []
    assert inline.close() == []
    assert connected.left == 1
    statistics = inline.statistics()
    assert statistics.alive == 0
