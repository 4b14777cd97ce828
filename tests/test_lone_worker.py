"""A single requested worker: state that its data keeps decides if others may join it.

A count or a cache of the dataset's own continues from sample to sample in one worker,
as in torch. Of two workers each has its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import pytest

import penstock as ps
from penstock.autotune.explain import explain
from penstock.engine.observe.observation import Knob
from penstock.system.resources import Budget

LENGTH = 4_000


class Plain:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Counts(Plain):
    """Counts its calls from a given one on."""

    def __init__(self, since: int = 0) -> None:
        self.since = since
        self.calls = 0

    def __getitem__(self, index: int) -> int:
        self.calls += index >= self.since
        return self.calls


def loader(data: Any) -> ps.DataLoader[Any]:
    ps.set_enable_autotune(True)
    return ps.DataLoader(data, batch_size=8, num_workers=1)


def processes(data: Any) -> ps.Pipeline:
    source = ps.Pipeline.from_dataset(data, num_parallel_workers=1, executor="process")
    return source.batch(8)


def threads(data: Any) -> ps.Pipeline:
    source = ps.Pipeline.from_dataset(data, num_parallel_workers=1, executor="thread")
    return source.batch(8)


faces = pytest.mark.parametrize("make", [loader, processes, threads])


def workers(face: Any) -> Knob:
    knobs = face._slot.run.knobs()  # noqa: SLF001
    return next(knob for knob in knobs if knob.name == "num_parallel_workers")


@contextmanager
def training(face: Any) -> Iterator[Callable[[Callable[[], bool]], bool]]:
    """Yield a function that trains until a condition holds, for at most 100 epochs."""
    batches = chain.from_iterable(repeat(face, 100))
    try:
        yield lambda so: any(so() for _ in batches)
    finally:
        face.close()


def train_until(so: Callable[[], bool], batches: Iterator[Any]) -> bool:
    """Train until a condition holds, or to the end of the epoch."""
    return any(so() for _ in batches)


@faces
def test_others_may_join_a_worker_whose_samples_change_nothing(
    make: Callable[[Any], Any],
) -> None:
    face = make(Plain())
    with training(face) as train:
        assert train(lambda: workers(face).upper > 1)
        assert workers(face).tunable
        assert not workers(face).held


@faces
def test_a_worker_stays_alone_where_the_data_keeps_a_count(
    make: Callable[[Any], Any],
) -> None:
    face = make(Counts())
    batches = iter(face)
    try:
        values = [next(batches) for _ in range(100)]
        assert [int(v) for batch in values for v in batch] == list(range(1, 801))
        assert not workers(face).tunable
        assert workers(face).set(4) == 1
        assert train_until(lambda: "changes" in face.stats().segments[0].held, batches)
        assert ".calls" in workers(face).held
        assert workers(face).held.endswith("num_parallel_workers=2 allows more")
    finally:
        del batches
        face.close()


@pytest.mark.parametrize("make", [loader, processes])
def test_a_worker_is_alone_again_once_the_data_begins_to_count(
    make: Callable[[Any], Any],
) -> None:
    face = make(Counts(since=400))
    with training(face) as train:
        assert train(lambda: workers(face).upper > 1)
        workers(face).set(3)
        assert train(lambda: workers(face).value == 1)
        # It may be alone a moment before the reason is there.
        assert train(lambda: bool(face.stats().segments[0].moves))
        segment = face.stats().segments[0]
        assert segment.moves[-1].line == (
            f"{segment.name}: executor process stays: one worker was requested and"
            " stays alone, because `.calls` changes there while samples are made, and"
            " each other worker would change its own copy; num_parallel_workers=2"
            " allows more."
        )
        assert workers(face).set(3) == 1


def slow(index: int, kept: list[int]) -> int:
    time.sleep(0.002)
    kept.append(index)
    return index


@pytest.mark.parametrize("why", ["changes while samples are made", "tune=False"])
def test_the_log_and_the_explanation_say_what_keeps_a_worker_alone(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.autotune")
    ps.set_enable_autotune(True)
    function = partial(slow, kept=[])
    source = ps.Pipeline.from_dataset(Plain())
    tune = why != "tune=False"
    one: Any = {"num_parallel_workers": 1, "executor": "thread", "tune": tune}
    face = source.map(function, **one).batch(16)
    with training(face) as train:
        assert train(lambda: "needs more workers, and stays at 1: " in caplog.text)
        assert why in caplog.text
        window = face.stats()
        # Other tests may take the cores, which would be a cause, too.
        free = tuple(replace(segment, run_queue_s=0.0) for segment in window.segments)
        window, budget = replace(window, segments=free), Budget(64.0, 1 << 30)
        explanation = explain(window, budget, tuned=True)
        assert why in explanation.cause
        assert not any("num_parallel_workers" in step for step in explanation.advice)
