"""A function of a schedule that raises ends the loop at its batch, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps

SIZE = 4
FAILS_AT = 3
"""The step for which the function raises."""
RATES = [1.0] * FAILS_AT


def rate(step: int) -> float:
    """Return the learning rate of a step: a table that ends too soon."""
    return RATES[step]


def size(epoch: int) -> int:
    return (SIZE, SIZE)[epoch]


def same(sample: Any) -> Any:
    return sample


def pipe_of(schedule: Any, executor: str, host: str = "trainer") -> ps.Pipeline:
    pipe = ps.Pipeline.from_dataset([*range(40)], schedule=schedule)
    return pipe.map(same, executor=executor).batch().options(host=host)


@pytest.mark.parametrize(
    ("executor", "host"),
    [
        ("auto", "trainer"),
        ("thread", "trainer"),
        ("process", "trainer"),
        ("inline", "process"),
    ],
)
def test_batches_before_it_come_first_and_the_error_says_where(
    executor: Any, host: Any
) -> None:
    schedule = ps.schedule.of(
        batch_size=SIZE, lr_mult=ps.schedule.function(rate, "steps")
    )
    with pipe_of(schedule, executor, host) as pipe:
        for _ in range(2):
            batches = []
            with pytest.raises(IndexError) as caught:
                batches.extend(batch.tolist() for batch in pipe)
            first = [*range(FAILS_AT * SIZE)]
            assert sum(batches, []) == first  # noqa: RUF017 some batches
            (note,) = caught.value.__notes__
            assert "in the schedule: schedule.function(rate" in note
            assert f"at {FAILS_AT} steps" in note
            pipe.load_state_dict(pipe_of(schedule, executor).state_dict())


def test_so_does_a_function_for_the_batch_size() -> None:
    schedule = ps.schedule.of(batch_size=ps.schedule.function(size, until=4))
    with (
        pipe_of(schedule, "thread") as pipe,
        pytest.raises(IndexError, match="out of range"),
    ):
        list(pipe)
