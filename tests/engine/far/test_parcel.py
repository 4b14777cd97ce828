"""Objects travel to fresh interpreters, and one that cannot is named."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from penstock.engine.far import handover
from penstock.engine.far.handover import loads, pack
from penstock.engine.program.program import Map, Program, Read
from penstock.errors import SpecError
from support import warm
from support.datasets import Numbers


class Locked:
    """Holds an object that no process can send to another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Rows:
    """A dataset with a transform."""

    def __init__(self, transform: Any) -> None:
        self.numbers = np.arange(10_000)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.numbers[index]


class Careful(Rows):
    """Sends the transform, but not its own lock."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"transform": self.transform}


class Rebuilt(Careful):
    """Is rebuilt from the transform."""

    def __reduce__(self) -> Any:
        return Rebuilt, (self.transform,)


class Making(Rows):
    """Sends a lock that it makes for this."""

    def __getstate__(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


class Grumpy:
    """Refuses to be sent."""

    def __reduce__(self) -> Any:
        raise ValueError("not me")


def around(thing: Any) -> Any:
    return lambda sample: (sample, thing)


class Slotted:
    """Holds a lock in a slot."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


def endless() -> list[Any]:
    """Return a list that holds itself, and a lock."""
    ring: list[Any] = [threading.Lock()]
    ring.insert(0, ring)
    return ring


def in_a_program(dataset: Any, function: Any) -> Any:
    operations = Read("read", dataset.__getitem__), Map("map", 1, function)
    return (Program(operations, places="Batch(ID:3)"),), 7


STUCK: dict[str, tuple[Any, str]] = {
    "itself": (threading.Lock(), "`thing` (a _thread.lock)"),
    "an attribute": (Rows(Locked()), "`thing.transform.lock` (a _thread.lock)"),
    "a slot": (Rows(Slotted()), "`thing.transform.lock` (a _thread.lock)"),
    "a member": (
        Rows({"k": [0, Locked()]}),
        "`thing.transform['k'][1].lock` (a _thread.lock)",
    ),
    "a closure": (around(Locked()), "`thing.<closure>.thing.lock` (a _thread.lock)"),
    "an argument": (partial(print, Locked()), "`thing.args[0].lock` (a _thread.lock)"),
    "a method's object": (Locked().__init__, "`thing.__self__.lock` (a _thread.lock)"),
    "not what is kept back": (
        Careful(letter for letter in "abc"),
        "`thing.transform` (a generator)",
    ),
    "what it is rebuilt from": (
        Rebuilt(Locked()),
        "`thing.transform.lock` (a _thread.lock)",
    ),
    "what is made when it is sent": (
        in_a_program(Rows(None), Making(None)),
        "`Making` (a ",
    ),
    "what refuses": (Rows(Grumpy()), "Grumpy) cannot be sent"),
    "beside a cycle": (endless(), "`thing[1]` (a _thread.lock)"),
    "a stage's dataset": (
        in_a_program(Rows(Locked()), np.negative),
        "`dataset.transform.lock` (a _thread.lock)",
    ),
    "a stage's function": (
        in_a_program(Rows(None), around(Locked())),
        "`lambda.<closure>.thing.lock` (a _thread.lock)",
    ),
}


@pytest.mark.parametrize("case", STUCK)
def test_the_innermost_that_cannot_travel_is_named(case: str) -> None:
    thing, name = STUCK[case]
    with pytest.raises(SpecError) as caught:
        pack(thing, "thing")
    assert name in str(caught.value)


def test_the_error_says_why_and_what_would_help() -> None:
    with pytest.raises(SpecError) as caught:
        pack(Rows(Locked()), "dataset")
    assert str(caught.value) == (
        "`dataset.transform.lock` (a _thread.lock) cannot be sent to worker processes "
        "that are not forked from the trainer: cannot pickle '_thread.lock' object; "
        "create it when it is first used (drop it in __getstate__), or use "
        'options(multiprocessing_context="fork"), or executor="thread"'
    )
    assert isinstance(caught.value.__cause__, TypeError)


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True
    device = torch.device("cuda:0")


def test_a_tensor_on_a_gpu_is_not_copied_to_every_worker() -> None:
    tensors = {"mean": torch.zeros(3), "std": torch.zeros(3).as_subclass(OnGpu)}
    with pytest.raises(SpecError) as caught:
        pack(Rows(tensors), "dataset")
    assert "`dataset.transform['std']` (a " in str(caught.value)
    assert "it is on cuda:0; keep it on the CPU (.cpu())" in str(caught.value)


@pytest.mark.gpu
def test_a_tensor_that_is_on_a_gpu_says_so() -> None:
    with pytest.raises(SpecError, match="it is on cuda:0"):
        pack(Rows(torch.zeros(3, device="cuda")), "dataset")


def test_packed_objects_are_unpacked_unchanged() -> None:
    rows = loads(pack(Rows(around(torch.arange(3))), "dataset"))
    assert rows[3] == 3
    assert torch.equal(rows.transform(1)[1], torch.arange(3))
    assert loads(pack(Numbers(3), "dataset")) == Numbers(3)
    assert loads(pack(Careful(5), "dataset")).transform == 5


SCRIPT = """
import sys
from penstock.engine.far.handover import pack

OFFSET = 40

class Rows:
    def __getitem__(self, index):
        return plus(index)

def plus(index):
    return index + OFFSET

print(pack([Rows(), lambda sample: plus(sample) + 1], "stages").hex())
"""


@pytest.mark.long
def test_objects_that_main_defines_travel_by_value(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = warm.run([sys.executable, str(script)], cwd=tmp_path)
    rows, function = loads(bytes.fromhex(process.stdout))
    assert (rows[2], function(2)) == (42, 43)


def test_a_spawned_program_s_own_file_travels_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that `spawn` started knows its file by a name of its own."""
    file = ModuleType("__mp_main__")
    double = FunctionType((lambda number: 2 * number).__code__, vars(file), "double")
    vars(file)["double"] = double
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__mp_main__", file)
        handover.program_pickler.cache_clear()
        body = pack(double, "map")
        cloudpickle.unregister_pickle_by_value(file)
    handover.program_pickler.cache_clear()
    assert loads(body)(4) == 8
