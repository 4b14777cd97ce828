"""Objects are taken apart by name, without running any of their code."""

from __future__ import annotations

import threading
from collections import deque, namedtuple
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from penstock.engine.witness.reach import (
    MAX_PARTS,
    MEMBERS,
    PLAIN,
    direct_parts,
    walk,
)


def parts_of(thing: Any) -> list[tuple[str, Any]]:
    """Return what a thing holds, but for numbers and text."""
    return [part for part in direct_parts(thing) if type(part[1]) not in PLAIN]


class Thing:
    """Has the attributes that it is made with."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


HERE = Thing()
"""The object that the examples hold."""
Pair = namedtuple("Pair", "first second")  # noqa: PYI024 as users still write them


class Slotted:
    """Keeps one thing in a private slot, and leaves another slot empty."""

    __slots__ = ("__hidden", "empty")

    def __init__(self) -> None:
        self.__hidden = HERE


class Inner(Slotted):
    """Has inherited slots, and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Thing()


class Reader:
    """Has a method, and a `__getitem__` that uses a global."""

    def read(self) -> None:
        """Do nothing."""

    def __getitem__(self, index: int) -> Any:
        return [HERE for _ in range(index)]


def by_default(sample: Any, first: Any = HERE, *, second: Any = HERE) -> Any:
    return sample, first, second


def by_peer(sample: Any) -> Any:
    return by_default(sample), np.asarray(sample), walk


def closing(over: Any) -> Any:
    def inner(sample: Any) -> Any:
        return sample, over, missing

    if over is None:
        missing = 1
    return inner


READER = Reader()
NAMES: dict[str, tuple[Any, set[str]]] = {
    "attribute": (Thing(transform=HERE), {".transform"}),
    "slot": (Slotted(), {"._Slotted__hidden"}),
    "slot from above": (Inner(), {"._Slotted__hidden", ".own"}),
    "key": ({"k": HERE, 3: HERE, HERE: HERE}, {"['k']", "[3]", "[<Thing>]"}),
    "place": ([1, HERE], {"[1]"}),
    "place in a tuple": (Pair(HERE, 2), {"[0]"}),
    "place in a deque": (deque([HERE]), {"[0]"}),
    "member": ({HERE}, {"<member>"}),
    "partial": (partial(READER.read, HERE), {".func", ".args", ".keywords"}),
    "bound method": (READER.read, {".__self__", ".__func__"}),
    "bound method of a built-in": ([HERE].append, {".__self__"}),
    "closure": (closing(HERE), {".<closure>.over"}),
    "default": (by_default, {".<defaults>[0]", ".<defaults>.second"}),
    "way in": (READER, {".__getitem__"}),
    "global": (Reader.__getitem__, {".<globals>.HERE"}),
    "neighbouring function": (by_peer, {".<globals>.by_default", ".<globals>.np"}),
}


@pytest.mark.parametrize("case", NAMES)
def test_parts_are_named_as_code_would_write_them(case: str) -> None:
    thing, expected = NAMES[case]
    assert {name for name, _ in parts_of(thing)} == expected


@pytest.mark.parametrize(
    "whole",
    [
        7,
        "text",
        b"bytes",
        np.zeros(3),
        torch.zeros(3),
        Thing,
        threading,
        threading.local(),
    ],
    ids=lambda whole: type(whole).__name__,
)
def test_an_object_that_counts_as_whole_has_no_parts(whole: Any) -> None:
    assert list(parts_of(whole)) == []


class Hostile(list[Any]):
    """Raises whenever any of its code, or of its class, is run."""

    def __init__(self) -> None:
        super().__init__([HERE])
        object.__getattribute__(self, "__dict__")["kept"] = HERE

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("the user's code was run")

    __getattribute__ = __getattr__ = __iter__ = __len__ = _refuse  # type: ignore[assignment]
    __getitem__ = __repr__ = __eq__ = __bool__ = _refuse  # type: ignore[assignment]
    __hash__ = _refuse  # type: ignore[assignment]
    __class__ = property(_refuse)  # type: ignore[assignment]
    opened = property(_refuse)


def test_no_code_of_the_users_is_run() -> None:
    names = {name for name, _ in parts_of(Hostile())}
    assert {"[0]", ".kept"} <= names
    assert len(list(walk({"key": Hostile()}, "dataset"))) >= 4


class Masked(Thing):
    """Shows a `__dict__` that is not its own."""

    def __init__(self) -> None:
        self.kept = HERE

    @property
    def __dict__(self) -> NoReturn:  # type: ignore[override]
        raise AssertionError("the user's code was run")


def test_a_property_called_dict_is_ignored() -> None:
    assert list(parts_of(Masked())) == [(".kept", HERE)]


class Rows(Dataset[Any]):
    """A dataset nested as users nest them."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getitem__(self, index: int) -> Any:
        return index

    def __len__(self) -> int:
        return 9


def test_a_walk_goes_into_nested_datasets() -> None:
    nested = ConcatDataset([Subset(Rows(Thing(file=HERE)), [1, 2])])
    paths = {id(part.thing): part.path for part in walk(nested, "dataset")}
    assert paths[id(HERE)] == "dataset.datasets[0].dataset.reader.file"


def test_a_walk_names_the_shortest_way() -> None:
    thing = Thing(long=Thing(way=HERE), short=HERE)
    assert [p.path for p in walk(thing, "it") if p.thing is HERE] == ["it.short"]


def test_a_walk_through_a_cycle_ends() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert [part.path for part in walk(ring, "ring")] == ["ring"]


def test_only_a_part_of_a_large_object_is_looked_at() -> None:
    large = [[[object() for _ in range(50)] for _ in range(50)] for _ in range(50)]
    assert len(list(parts_of(large))) == MEMBERS
    assert len(list(walk(large, "dataset"))) == MAX_PARTS


def test_a_long_chain_is_followed_for_some_steps_only() -> None:
    chain: list[Any] = []
    for _ in range(100):
        chain = [chain]
    assert 5 <= len(list(walk(chain, "dataset"))) <= 20
