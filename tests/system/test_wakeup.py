"""A wakeup is received once for any number of notices, and never after closing.

A weak callback works as long as its object lives, and does not keep it.
"""

from __future__ import annotations

import os
import select
import weakref

import pytest

from penstock.system.wakeup import Wakeup, weakly


def notified(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup], [], [], 0)[0])


def test_a_wakeup_is_received_once_however_often_it_was_notified() -> None:
    wakeup = Wakeup()
    assert not notified(wakeup)
    for _ in range(3):
        wakeup.notify()
    assert notified(wakeup)
    wakeup.clear()
    assert not notified(wakeup)
    wakeup.notify()
    assert notified(wakeup)
    wakeup.close()


def test_a_closed_wakeup_writes_to_nobodys_descriptor() -> None:
    wakeup = Wakeup()
    wakeup.close()
    again = Wakeup()  # most likely it has the number of the first one
    wakeup.notify()
    assert not notified(again)
    again.close()


def test_a_wakeup_that_is_dropped_leaves_no_descriptor() -> None:
    wakeup = Wakeup()
    descriptor = wakeup.fileno()
    del wakeup
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


class Adder:
    def add(self, one: int, other: int) -> int:
        return one + other


def test_a_callback_calls_its_method_until_the_object_is_gone() -> None:
    adder = Adder()
    gone = weakref.ref(adder)
    add = weakly(adder.add)
    assert add(1, 2) == 3
    del adder
    assert gone() is None
    assert add(1, 2) is None
