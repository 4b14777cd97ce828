"""Exceptions come back from worker processes unchanged or quoted."""

from __future__ import annotations

import pickle
import traceback

import pytest

from penstock.engine.far.handover import RemoteTraceback, travel
from penstock.errors import WorkerError


class Plain(ValueError):
    """Survives pickling unchanged."""


class Demanding(Exception):
    """Has a constructor whose arguments differ from those it keeps."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")


class Holding(Exception):
    """Holds an object that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.handle = lambda: None


class Mute(Holding):
    """Cannot say what it is, either."""

    def __str__(self) -> str:
        raise KeyError(self.args)


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


def journey(error: BaseException) -> BaseException:
    """Bring an exception over a pipe."""
    traveller = travel(raised(error))
    came = pickle.loads(pickle.dumps(traveller))  # noqa: S301 our own
    assert isinstance(came, BaseException)
    return came


@pytest.mark.parametrize("error", [Plain("bad"), OSError(2, "gone")])
def test_an_exception_comes_back_as_its_own_type(error: Exception) -> None:
    came = journey(error)
    assert type(came) is type(error)
    assert came.args == error.args


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_ends_a_worker_does_not_end_the_trainer(error: BaseException) -> None:
    came = journey(error)
    assert isinstance(came, WorkerError)
    assert type(error).__name__ in str(came)
    assert isinstance(came.__cause__, RemoteTraceback)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Demanding("a.py", 3), "Demanding: a.py:3"),
        (Holding("shut"), "Holding: shut"),
        (Mute("silent"), "Mute"),
    ],
)
def test_an_exception_that_cannot_travel_is_quoted(error: Exception, told: str) -> None:
    came = journey(error)
    assert type(came) is WorkerError
    assert str(came) == told


@pytest.mark.parametrize("error", [Plain("bad"), Demanding("a.py", 3)])
def test_the_workers_traceback_is_the_exceptions_cause(error: Exception) -> None:
    came = journey(error)
    assert isinstance(came.__cause__, RemoteTraceback)
    text = "".join(traceback.format_exception(came))
    assert "in give_up" in text
    assert "KeyError: 'first'" in text
    assert getattr(came, "__notes__", []) == []


def test_notes_added_by_the_user_stay() -> None:
    error = Plain("bad")
    error.add_note("while reading the index")
    assert journey(error).__notes__ == ["while reading the index"]
