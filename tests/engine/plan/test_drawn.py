"""A drawn plan is as far ahead of the trainer as its sampler allows, and no further."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.engine.plan import DrawnPlan
from penstock.engine.plan.drawn import AHEAD


@pytest.mark.parametrize(("most", "drawn"), [(0, 1), (1, 1), (4, 4), (AHEAD, 9)])
def test_workers_have_at_least_the_batch_that_is_due(most: int, drawn: int) -> None:
    plan = DrawnPlan(AHEAD)
    plan.begin(0, iter([[index] for index in range(9)]), 1, most=most)
    assert plan.stop == drawn
    for head in range(1, 9):
        plan.draw(head)
        assert plan.stop == min(9, head + drawn)
        assert plan.planned(head).rows.indices.tolist() == [head]


def test_a_trainer_that_loads_draws_one_batch_at_a_time() -> None:
    indices = []

    def batches() -> Iterator[list[int]]:
        for index in range(3):
            indices.append(index)
            yield [index]

    plan = DrawnPlan()
    plan.begin(0, batches(), 1, most=0)
    for step in range(3):
        batch = plan.draw_batch(step)
        assert batch is not None
        assert batch[1] == [step]
        assert indices == [*range(step + 1)]
