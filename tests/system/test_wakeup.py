"""A wakeup is heard once for any number of notices, and never after it is closed."""

from __future__ import annotations

import select

from penstock.system.wakeup import Wakeup


def notified(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup], [], [], 0)[0])


def test_it_is_heard_once_however_often_it_was_notified() -> None:
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


def test_nobody_is_disturbed_once_it_is_closed() -> None:
    wakeup = Wakeup()
    wakeup.close()
    again = Wakeup()  # has the number of the first one, most likely
    wakeup.notify()
    assert not notified(again)
    again.close()
