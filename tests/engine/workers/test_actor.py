"""What an actor does with rows, without Ray: its class is a plain one."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.core.chunk import Chunk, Outcome
from penstock.engine.plan import Context
from penstock.engine.program.program import Map, Program, Read
from penstock.engine.program.randomness import SampleRandom
from penstock.engine.program.seeding import restore, states
from penstock.engine.witness.witness import Witness
from penstock.engine.workers.actor import Actor
from penstock.engine.workers.process.handover import flattened, recall, restored
from penstock.engine.workers.process.parcel import pack

CHUNK = Chunk(3, 4, np.arange(10, 16), np.arange(6), Context(0, 3, None))
"""Rows 4 to 9 of the batch of step 3."""
SEEDS = 7, 2, 0
"""The seed of the pipeline, and what distinguishes the run."""


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Restore what an actor has for itself in its own process."""
    known, threads = states(), torch.get_num_threads()
    environment = dict(os.environ)
    yield
    restore(known)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


class Rows:
    """Returns its index, but not for 13."""

    def __init__(self) -> None:
        self.asked = 0

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        if index == 13:
            raise ValueError(index)
        return index


def drawn(sample: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return the sample, and what it draws."""
    return sample, int(rng.integers(1 << 40))


def refused(sample: int) -> Any:
    """Return what cannot be sent."""
    return threading.Lock()


def program(*operations: Any, places: str = "", data: Any = None) -> Program:
    read = Read("Dataset(ID:0)", (data or Rows()).__getitem__)
    return Program((read, *operations), places)


def begun(program: Program, number: int = 0, seeds: tuple[int, ...] = SEEDS) -> Actor:
    actor = Actor(np.frombuffer(pack(program, "program"), np.uint8), seeds, number)
    assert str(os.getpid()) in actor.begin()
    return actor


def outcome(actor: Actor, inputs: list[Any] | None = None) -> Outcome:
    made = actor.run(CHUNK, None if inputs is None else flattened(inputs))
    found: Outcome = restored(made)
    return found


@pytest.mark.parametrize("places", ["", "Batch(ID:2)"])
def test_rows_are_made_as_by_any_other_worker(places: str) -> None:
    made = program(Map("Map(ID:1)", 1, drawn, wants_rng=True), places=places)
    found = outcome(begun(made))
    expected = program(*made.operations[1:]).run(CHUNK, None, None, SampleRandom(7))
    assert found.outputs == expected.outputs
    assert found.offsets == [0, 1, 2, 4, 5]
    assert found.done == 6
    assert found.nbytes == expected.nbytes
    (failure,) = found.failures
    assert (failure.index, failure.row) == (13, 7)
    assert isinstance(recall(failure.error), ValueError)
    assert "in __getitem__" in str(recall(failure.error).__cause__)


def test_inputs_come_from_the_stage_before() -> None:
    doubled = Program((Map("Map(ID:1)", 1, lambda sample: 2 * sample),))
    assert outcome(begun(doubled), list(range(6))).outputs == [0, 2, 4, 6, 8, 10]


def test_what_cannot_be_sent_is_the_error_of_its_row() -> None:
    found = outcome(begun(program(Map("Map(ID:1) refused", 1, refused))))
    assert found.outputs is None
    assert [failure.row for failure in found.failures] == list(range(4, 10))
    text = str(found.failures[0].error)
    assert "a sample made by Map(ID:1) refused cannot be sent" in text


def test_an_input_that_cannot_be_restored_is_the_error_of_its_row() -> None:
    class Broken:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("x",)

    actor = begun(Program((Map("Map(ID:1)", 1, str),)))
    found = outcome(actor, [Broken()] * 6)
    assert len(found.failures) == 6
    assert "an actor cannot receive a sample" in str(found.failures[0].error)


def test_actors_draw_different_values_and_the_same_in_each_run() -> None:
    def first_draw(number: int, seeds: tuple[int, ...]) -> float:
        begun(program(), number, seeds)
        return random.random()

    before = [first_draw(number, SEEDS) for number in range(2)]
    assert before == [first_draw(number, SEEDS) for number in range(2)]
    assert len({*before, first_draw(0, (7, 3, 0))}) == 3


def test_an_only_worker_reports_what_changed_in_its_copy() -> None:
    data = Rows()
    watched = Program(program(data=data).operations, watched=(data,))
    assert Witness([data]).changed() is None
    assert "asked" in str(outcome(begun(watched)).changed)
    assert outcome(begun(program())).changed is None
