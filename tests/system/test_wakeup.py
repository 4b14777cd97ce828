"""A bell is heard once for any number of rings, and never after it is closed."""

from __future__ import annotations

import select

from penstock.system.wakeup import Wakeup


def rung(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup], [], [], 0)[0])


def test_it_is_heard_once_however_often_it_was_rung() -> None:
    wakeup = Wakeup()
    assert not rung(wakeup)
    for _ in range(3):
        wakeup.ring()
    assert rung(wakeup)
    wakeup.hear()
    assert not rung(wakeup)
    wakeup.ring()
    assert rung(wakeup)
    wakeup.close()


def test_nobody_is_disturbed_once_it_is_closed() -> None:
    wakeup = Wakeup()
    wakeup.close()
    again = Wakeup()  # has the number of the first one, most likely
    wakeup.ring()
    assert not rung(again)
    again.close()
