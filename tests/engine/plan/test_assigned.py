"""Assignments are numbered as they come, and forgotten in that order."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.plan import AssignedPlan, PlannedBatch, Rows
from support.core_script import Script


def planned(step: int, first_row: int = 0) -> PlannedBatch:
    script = Script((8,))
    rows = Rows(np.arange(3), np.zeros(3, np.int64))
    return PlannedBatch(script.batch(step), rows, first_row, whole=False)


def test_assignments_are_numbered_as_they_come_whatever_their_step() -> None:
    plan, assignments = AssignedPlan(), [planned(7), planned(2, 3), planned(2, 5)]
    for seed, assignment in enumerate(assignments):
        plan.add(assignment, seed)
    assert plan.stop == 3
    assert [plan.planned(number) for number in range(3)] == assignments


def test_the_seed_is_that_of_the_oldest_one_that_is_not_done() -> None:
    plan = AssignedPlan()
    for seed in (5, 6):
        plan.add(planned(seed), seed)
    assert (plan.oldest, plan.seed) == (0, 5)
    plan.forget()
    assert (plan.oldest, plan.seed) == (1, 6)
    assert plan.planned(1).plan.step == 6
    plan.forget()
    with pytest.raises(IndexError):
        plan.planned(2)
