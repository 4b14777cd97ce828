"""What a loop changes in the data is noticed at the next batch, and nothing else is."""

from __future__ import annotations

import itertools
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cached_property, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.witness import witness as module
from penstock.engine.witness.witness import ChangeWatch, Witness

factor = [1]
size = 1


class Slotted:
    """Has a slot and no dictionary."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1


class Config:
    """A user's class that nobody makes an object of."""

    scale = 1


settings = ModuleType("settings")
settings.scale = 1  # type: ignore[attr-defined]


class Rows:
    """Uses a global list, and an attribute that is named like a global number."""

    level = 0

    def __init__(self) -> None:
        self.size = 1
        self.options = {"crop": [1, 2]}
        self.slotted = Slotted()
        self.recent = deque([1])
        self.weights = torch.zeros(3)
        self.table = np.zeros(3)

    def __getitem__(self, index: int) -> int:
        scale = Config.scale * settings.scale * int(os.environ["PENSTOCK_SCALE"])
        return index * factor[0] * self.image.size * self.doubled * scale + self.level

    @property
    def image(self) -> Any:
        """Something with a size."""
        return np.zeros(1)

    @cached_property
    def doubled(self) -> int:
        """Computed when it is first used."""
        return 2 * self.size


def closed_over() -> tuple[Callable[[], int], Callable[[], None]]:
    step = 0

    def seen() -> int:
        return step

    def on() -> None:
        nonlocal step
        step += 1

    return seen, on


def set_size(rows: Rows) -> None:
    rows.size = 2


CHANGES: dict[str, Callable[[Rows], object]] = {
    ".size": set_size,
    ".options['crop'][1]": lambda rows: rows.options["crop"].__setitem__(1, 5),
    ".slotted.scale": lambda rows: setattr(rows.slotted, "scale", 3),
    ".recent": lambda rows: rows.recent.append(1),
    ".weights": lambda rows: rows.weights.add_(1),
    ".__getitem__.<globals>.factor": lambda rows: factor.append(1),
    ".__getitem__.<globals>.Config.scale": lambda _: setattr(Config, "scale", 2),
    ".__getitem__.<globals>.settings.scale": lambda _: setattr(settings, "scale", 2),
    ".__getitem__.<globals>.os.environ": lambda _: os.environ.update(
        PENSTOCK_SCALE="2"
    ),
    ".level": lambda _: setattr(Rows, "level", 1),
    ".new": lambda rows: setattr(rows, "new", 1),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_is_noticed_at_once(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SCALE", "1")
    for owner, name in ((Config, "scale"), (settings, "scale"), (Rows, "level")):
        monkeypatch.setattr(owner, name, 0)
    rows = Rows()
    watch = ChangeWatch([range(3), rows])
    assert watch.changed() is None
    CHANGES[path](rows)
    change = watch.changed()
    assert str(change).startswith("Rows" + path)
    watch.renew()
    assert watch.changed() is None


class Listed(list[int]):
    """Extends a list, and counts wrongly."""

    def __len__(self) -> int:
        return 0


CONTAINERS: dict[str, Callable[[dict[int, int]], Any]] = {
    "a dict": dict,
    "an OrderedDict": OrderedDict,
    "a defaultdict": partial(defaultdict, int),
    "a Counter": Counter,
    "a list of another class": Listed,
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_member_of_a_container_counts(kind: str) -> None:
    rows: Any = Rows()
    rows.options = CONTAINERS[kind]({number: number for number in range(200)})
    watch = ChangeWatch([rows])
    assert watch.changed() is None
    rows.options[150] = -1000
    assert watch.changed() == "Rows.options"


def test_what_a_snapshot_does_not_reach_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEAR", 256)
    rows: Any = Rows()
    values = {f"v{number}": 1000 for number in range(40)}
    parts = [SimpleNamespace(**values) for _ in range(32)]
    rows.options = {"parts": parts}
    watch = ChangeWatch([rows])
    parts[31].v39 = int("1000")  # equal, and another object
    assert watch.changed() is None
    parts[31].v39 = 2000
    assert watch.changed() == "Rows.options['parts'][31]"


def test_a_variable_around_a_function_counts() -> None:
    function, on = closed_over()
    watch = ChangeWatch([function])
    assert watch.changed() is None
    on()
    assert watch.changed() == "seen.<closure>.step"


class Counting:
    """Hides its class's number with its own, from the first call on."""

    calls = 0

    def __call__(self) -> None:
        self.calls += 1


def test_an_attribute_that_hides_its_class_s_counts() -> None:
    counting = Counting()
    for _ in range(2):
        watch = ChangeWatch([counting])
        counting()
        assert watch.changed() == "Counting.calls"


def test_a_step_of_an_optimizer_counts() -> None:
    model = torch.nn.Linear(1, 1)
    watch = ChangeWatch([model])
    with torch.no_grad():
        model.weight.add_(1)
    assert watch.changed() == "Linear._parameters['weight']"


@pytest.mark.parametrize("value", [float("nan"), complex("nan+nanj")])
def test_what_is_not_a_number_equals_itself(value: Any) -> None:
    rows = Rows()
    rows.size = value
    assert Witness([rows]).changed() is None


def test_a_counter_counts() -> None:
    counter = itertools.count()
    before = Witness([partial(next, counter)])
    assert before.changed() is None
    next(counter)
    assert before.changed() == ".args[0]"


def test_what_no_sample_depends_on_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    watch = ChangeWatch([rows])
    monkeypatch.setitem(globals(), "size", 2)  # only attributes of that name are used
    rows.options["crop"] = rows.options["crop"]
    rows.size = int("1")
    assert rows.doubled == 2
    assert watch.changed() is None


def test_arrays_are_compared_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    watch = ChangeWatch([rows])
    rows.table[1] = 1
    assert watch.changed() is None
    monkeypatch.setattr(module, "MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "SHARE", 1e9)
    rows.size = int("1")
    watch = ChangeWatch([rows])
    rows.table[2] = 1
    assert watch.changed() == "Rows.table"
