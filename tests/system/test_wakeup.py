"""A wakeup is received once for any number of notices, and never after closing."""

from __future__ import annotations

import os
import select

import pytest

from penstock.system.wakeup import Wakeup


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
