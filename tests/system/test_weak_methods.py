"""A weak callback works as long as its object lives, and does not keep it."""

from __future__ import annotations

import weakref

from penstock.system.weak_methods import weakly


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
