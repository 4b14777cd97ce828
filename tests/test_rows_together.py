"""A function that takes several samples at once: the same samples as one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.plan import Context
from support.datasets import KINDS

LENGTH = 200
Row = tuple[int, float, int]


class Drawing:
    """Draws a number for each sample; knows how many it took at once."""

    def __call__(self, index: int, rng: np.random.Generator, ctx: Context) -> Row:
        return index, rng.random(), ctx.epoch

    def __penstock_rows__(
        self, samples: Sequence[int], rngs: Iterator[np.random.Generator], ctx: Context
    ) -> Sequence[Row | None]:
        return [
            (index, rng.random(), ctx.epoch)
            for index, rng in zip(samples, rngs, strict=True)
        ]


class OneByOne(Drawing):
    """The same without the method."""

    __penstock_rows__ = None  # type: ignore[assignment]


class LeavesSome(Drawing):
    """Leaves every third sample, having drawn for it."""

    def __penstock_rows__(self, *args: Any) -> Sequence[Row | None]:
        all_rows = super().__penstock_rows__(*args)
        return [None if row and row[0] % 3 == 0 else row for row in all_rows]


class Breaks(Drawing):
    """Fails for the chunks that have an even number of sevens, midway."""

    def __penstock_rows__(
        self, samples: Sequence[int], rngs: Iterator[np.random.Generator], ctx: Context
    ) -> Sequence[Row | None]:
        for index in samples:
            if index % 7 == 0:
                raise ValueError(index)
            next(rngs).random()
        return super().__penstock_rows__(samples, rngs, ctx)


class TooFew(Drawing):
    """Returns fewer samples than it is given."""

    def __penstock_rows__(self, *args: Any) -> Sequence[Row | None]:
        return super().__penstock_rows__(*args)[1:]


def rows(function: Any, **workers: Any) -> list[list[list[float]]]:
    pipe = ps.Pipeline.from_dataset(range(LENGTH)).shuffle(seed=3)
    with pipe.map(function, **workers).batch(32) as pipe:
        return [[part.tolist() for part in batch] for _ in range(2) for batch in pipe]


@pytest.mark.parametrize("function", [Drawing(), LeavesSome(), Breaks(), TooFew()])
@pytest.mark.parametrize("workers", KINDS)
def test_samples_made_together_are_those_made_one_by_one(
    function: Any, workers: str
) -> None:
    expected = rows(OneByOne(), executor="inline")
    assert rows(function, **KINDS[workers]) == expected


class Negated(Drawing):
    """Makes other samples, one by one."""

    def __call__(self, index: int, rng: np.random.Generator, ctx: Context) -> Row:
        same, draw, epoch = super().__call__(index, rng, ctx)
        return -same, draw, epoch


def test_a_class_that_changes_the_call_alone_is_called_for_each_sample() -> None:
    expected = [[[-at for at in part[0]], *part[1:]] for part in rows(OneByOne())]
    assert rows(Negated()) == expected


class Bad(Drawing):
    """Cannot make one sample."""

    def __call__(self, index: int, rng: np.random.Generator, ctx: Context) -> Row:
        if index == 57:
            raise ValueError("no such sample")
        return super().__call__(index, rng, ctx)

    def __penstock_rows__(
        self, samples: Sequence[int], rngs: Iterator[np.random.Generator], ctx: Context
    ) -> Sequence[Row | None]:
        if 57 in samples:
            raise ValueError("of many")
        return super().__penstock_rows__(samples, rngs, ctx)


def test_an_error_is_that_of_the_sample_alone() -> None:
    pipe = ps.Pipeline.from_dataset(range(LENGTH)).map(Bad()).batch(100)
    with pipe, pytest.raises(ValueError, match="no such sample") as caught:
        list(pipe)
    assert "sample index 57 " in "".join(caught.value.__notes__)


class Never(Drawing):
    """Never returns if it is given several samples."""

    def __penstock_rows__(self, *_: Any) -> Sequence[Row | None]:
        threading.Event().wait()
        return ()


def test_samples_with_a_time_limit_are_passed_one_by_one() -> None:
    assert rows(Never(), executor="process", timeout=60) == rows(OneByOne())
