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

from penstock.engine.batch.buffer import FailedBatch, Finished
from penstock.engine.core.in_flight import Chunk, Outcome
from penstock.engine.far.actors import Actor
from penstock.engine.far.handover import dumps, pack, restored
from penstock.engine.far.worker import Assignment, Result
from penstock.engine.plan import BatchPlan, Context, PlannedBatch
from penstock.engine.plan import Rows as PlannedRows
from penstock.engine.program.randomness import SampleRandom, restore, states
from penstock.pipeline.stages import BatchStage, MapStage, SourceStage
from support.recipes import compiled

CHUNK = Chunk(3, 4, np.arange(10, 16), np.arange(6), Context(0, 3, None))
"""Rows 4 to 9 of the batch of step 3."""
PLAN = BatchPlan(0, 3, 3, 6, False, 12, 12, 12, 1.0, None, 1.0, None)  # noqa: FBT003
SEEDS = 7, 2, 0
"""The seed of the pipeline, and what distinguishes the run."""


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Restore what an actor has for itself in its own process."""
    generator_states, threads = states(), torch.get_num_threads()
    environment = dict(os.environ)
    yield
    restore(generator_states)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


class Rows:
    """Returns its index, but not for 13."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        if index == 13:
            raise ValueError(index)
        return index


def drawn(sample: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return the sample, and what it draws."""
    return sample, int(rng.integers(1 << 40))


def doubled(sample: int) -> int:
    """Return twice the sample."""
    return 2 * sample


INVALID = "invalid literal for int() with base 10: 'x'"


class Broken:
    """Cannot be restored."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("x",)


def refused(sample: int) -> Any:
    """Return what cannot be sent."""
    return threading.Lock()


def with_a_lock(samples: list[Any]) -> Any:
    """Return a batch that cannot be sent."""
    return samples, threading.Lock()


def begun(
    data: Any,
    *stages: Any,
    number: int = 0,
    seeds: tuple[int, ...] = SEEDS,
    collate: Any = None,
) -> Actor:
    source = SourceStage(data, name="data", executor="ray")
    recipe = compiled(source, *stages, BatchStage(6, collate_fn=collate))
    parcel = pack((recipe.elsewhere(0), recipe.segments[0]), "work")
    actor = Actor()
    process = actor.begin(np.frombuffer(parcel, np.uint8), seeds, number)
    assert str(os.getpid()) in process
    return actor


def outcome(
    actor: Actor, *, whole: bool = False, inputs: list[Any] | None = None
) -> Outcome:
    parcel, chunk, plan = None if inputs is None else dumps(inputs), CHUNK, PLAN
    if whole:
        chunk = Chunk(3, 0, chunk.indices, chunk.rounds, chunk.context)
        plan = plan._replace(n_rows=len(chunk))
    rows = PlannedRows(chunk.indices, chunk.rounds)
    batch = PlannedBatch(plan, rows, chunk.first_row, whole)
    assignment = Assignment(batch, 0, parcel)
    result: Result = restored(actor.run(assignment))
    answer = result.outcome
    if result.whole:
        answer.made = Finished(result.sent)
    else:
        answer.outputs = result.sent
    return answer


def test_rows_are_made_as_by_any_other_worker() -> None:
    draws = MapStage(drawn, executor="ray")
    answer = outcome(begun(Rows(), draws))
    random = SampleRandom(11)
    expected = [
        (index, int(random.at(round_, index, 1).integers(1 << 40)))
        for round_, index in enumerate(range(10, 16))
        if index != 13
    ]
    assert answer.outputs == expected
    assert answer.offsets == [0, 1, 2, 4, 5]
    assert answer.done == 6
    (failure,) = answer.failures
    assert (failure.index, failure.row) == (13, 7)
    error = failure.error
    assert isinstance(error, ValueError)
    assert "in __getitem__" in str(error.__cause__)


def test_a_whole_batch_is_made_of_them_where_that_is_asked_for() -> None:
    answer = outcome(begun(list(range(100))), whole=True)
    assert isinstance(answer.made, Finished)
    assert answer.made.data.tolist() == list(range(10, 16))
    failed = outcome(begun(Rows()), whole=True)
    assert isinstance(failed.made, FailedBatch)
    assert failed.failures == []
    assert "sample index 13 (" in str(failed.made.error.__notes__)


def test_inputs_come_from_the_stage_before() -> None:
    recipe = compiled(
        SourceStage(list(range(9)), executor="thread"),
        MapStage(doubled, executor="ray"),
        BatchStage(6),
    )
    parcel = pack((recipe.elsewhere(1), recipe.segments[1]), "work")
    actor = Actor()
    actor.begin(np.frombuffer(parcel, np.uint8), SEEDS, 0)
    answer = outcome(actor, inputs=list(range(6)))
    assert answer.outputs == [0, 2, 4, 6, 8, 10]


def test_what_cannot_be_sent_is_the_error_of_its_row() -> None:
    answer = outcome(begun(list(range(100)), MapStage(refused, executor="ray")))
    assert answer.outputs is None
    assert [failure.row for failure in answer.failures] == list(range(4, 10))
    text = str(answer.failures[0].error)
    assert "a sample made by Map(ID:1) refused cannot be sent" in text


def test_a_batch_that_cannot_be_sent_comes_as_its_samples() -> None:
    answer = outcome(begun(list(range(100)), collate=with_a_lock), whole=True)
    assert (answer.made, answer.outputs) == (None, list(range(10, 16)))
    assert answer.offsets == list(range(6))


def test_an_input_that_cannot_be_restored_is_the_error_of_its_row() -> None:
    actor = begun(Rows())
    answer = outcome(actor, inputs=[Broken()] * 6)
    assert len(answer.failures) == 6
    assert {str(failure.error) for failure in answer.failures} == {INVALID}
    assert outcome(actor).done == 6  # it goes on


def test_actors_draw_different_values_and_the_same_in_each_run() -> None:
    def first_draw(number: int, seeds: tuple[int, ...]) -> float:
        begun([1], number=number, seeds=seeds)
        return random.random()

    before = [first_draw(number, SEEDS) for number in range(2)]
    assert before == [first_draw(number, SEEDS) for number in range(2)]
    assert len({*before, first_draw(0, (7, 3, 0))}) == 3


def test_an_only_worker_reports_what_changed_in_its_copy() -> None:
    recipe = compiled(
        SourceStage(Rows(), executor="ray", num_parallel_workers=1), BatchStage(6)
    )
    (segment,) = recipe.segments
    assert segment.program.watched
    parcel = pack((recipe.elsewhere(0), segment), "work")
    actor = Actor()
    actor.begin(np.frombuffer(parcel, np.uint8), SEEDS, 0)
    assert "asked" in str(outcome(actor).changed)
    assert outcome(begun(Rows())).changed is None
