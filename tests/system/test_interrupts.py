"""Ctrl-C that is handled a moment later."""

from __future__ import annotations

import signal
import threading

import pytest

from penstock.system.forking import interrupts_deferred


def test_ctrl_c_is_handled_once_the_steps_are_done() -> None:
    events = []

    def steps() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            events.append("all")

    with pytest.raises(KeyboardInterrupt):
        steps()
    assert events == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_steps_propagates_and_the_handler_is_restored() -> None:
    with pytest.raises(ValueError, match="a step"), interrupts_deferred():
        raise ValueError("a step")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_defer_nothing() -> None:
    handlers = []

    def look() -> None:
        with interrupts_deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
