"""A bell is heard once for any number of rings, and never after it is closed."""

from __future__ import annotations

import select

from penstock.system.wakeup import Bell


def rung(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_it_is_heard_once_however_often_it_was_rung() -> None:
    bell = Bell()
    assert not rung(bell)
    for _ in range(3):
        bell.ring()
    assert rung(bell)
    bell.hear()
    assert not rung(bell)
    bell.ring()
    assert rung(bell)
    bell.close()


def test_nobody_is_disturbed_once_it_is_closed() -> None:
    bell = Bell()
    bell.close()
    again = Bell()  # has the number of the first one, most likely
    bell.ring()
    assert not rung(again)
    again.close()
