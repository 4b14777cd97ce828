"""Exceptions come back from worker processes as what they were, or quoted."""

from __future__ import annotations

import pickle
import traceback

import pytest

from penstock.engine.core.chunk import Failure
from penstock.engine.workers.process.worker import RemoteTraceback, recall, travel
from penstock.errors import WorkerError


class Plain(ValueError):
    """Comes out of pickle as it went in."""


class Demanding(Exception):
    """Its constructor takes other arguments than it keeps."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")


class Holding(Exception):
    """Backoffs what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.handle = lambda: None


def give_up(error: BaseException) -> None:
    """Raise it."""
    raise error


def raised(error: BaseException) -> BaseException:
    """Return it with a traceback, and a context."""
    try:
        try:
            give_up(KeyError("first"))
        except KeyError:
            give_up(error)
    except BaseException as caught:  # noqa: BLE001 any
        return caught
    raise AssertionError


def journey(error: BaseException) -> Failure:
    """Bring a failure over a pipe."""
    sent = travel(Failure(raised(error), "Map(ID:1) f", 17, 3))
    return recall(pickle.loads(pickle.dumps(sent)))  # noqa: S301 our own


@pytest.mark.parametrize("error", [Plain("bad"), OSError(2, "gone"), SystemExit(3)])
def test_an_exception_comes_back_as_its_own_type(error: BaseException) -> None:
    failure = journey(error)
    assert type(failure.error) is type(error)
    assert failure.error.args == error.args
    assert (failure.stage, failure.index, failure.row) == ("Map(ID:1) f", 17, 3)


@pytest.mark.parametrize(
    ("error", "told"),
    [(Demanding("a.py", 3), "Demanding: a.py:3"), (Holding("shut"), "Holding: shut")],
)
def test_one_that_cannot_travel_is_quoted(error: Exception, told: str) -> None:
    failure = journey(error)
    assert type(failure.error) is WorkerError
    assert str(failure.error) == told


@pytest.mark.parametrize("error", [Plain("bad"), Demanding("a.py", 3)])
def test_the_workers_traceback_hangs_on_it_as_its_cause(error: Exception) -> None:
    came = journey(error).error
    assert isinstance(came.__cause__, RemoteTraceback)
    shown = "".join(traceback.format_exception(came))
    assert "in give_up" in shown
    assert "KeyError: 'first'" in shown
    assert getattr(came, "__notes__", []) == []


def test_notes_of_the_users_stay() -> None:
    error = Plain("bad")
    error.add_note("while reading the index")
    assert journey(error).error.__notes__ == ["while reading the index"]
