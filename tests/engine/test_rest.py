"""All workers rest for a moment, and go on by themselves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

import penstock as ps
from support.thread_limit import no_more_threads

COUNT: Any = multiprocessing.get_context("fork").RawValue("q")
"""Samples made, in all processes."""


def counted(sample: Any) -> Any:
    time.sleep(0.002)
    COUNT.value += 1
    return sample


def still_s(seconds: float) -> bool:
    """Whether no sample is made for some time."""
    before = COUNT.value
    time.sleep(seconds)
    return bool(COUNT.value == before)


kinds = pytest.mark.parametrize("executor", ["thread", "process"])


def resting(executor: Any) -> tuple[ps.Pipeline, Any, Any]:
    """Return a pipeline, its loop and what lets its workers rest, while they work."""
    source = ps.Pipeline.from_dataset(range(100_000))
    two: Any = {"executor": executor, "num_parallel_workers": 2}
    pipe = source.map(counted, **two).batch(64)
    loop = iter(pipe)
    next(loop)
    engine = pipe._slot.run.host.engine  # type: ignore[union-attr]  # noqa: SLF001
    assert engine is not None
    return pipe, loop, engine.rest


@kinds
def test_workers_rest_until_they_are_woken(executor: str) -> None:
    pipe, loop, rest = resting(executor)
    with pipe:
        assert rest.beside
        assert not rest.resting
        rest.pause(1 << 62)
        while not rest.resting:
            time.sleep(0.001)
        assert still_s(0.1)
        while rest.ready:  # what is there may be taken
            next(loop)
        rest.resume()
        next(loop)
        assert not rest.resting
        del loop


@kinds
def test_a_rest_ends_by_itself(executor: str) -> None:
    pipe, loop, rest = resting(executor)
    with pipe:
        rest.pause(time.monotonic_ns() + 100_000_000)
        for _ in range(10):  # it would wait without end
            next(loop)
        assert not rest.resting
        rest.resume()
        next(loop)
        del loop


def test_nobody_rests_where_no_alarm_can_be_set() -> None:
    pipe, loop, rest = resting("thread")
    with pipe:
        with no_more_threads():
            rest.pause(1 << 62)
        for _ in range(10):  # it would wait without end
            next(loop)
        del loop


@kinds
def test_an_engine_that_rests_can_be_closed(executor: str) -> None:
    pipe, loop, rest = resting(executor)
    with pipe:
        rest.pause(1 << 62)
        while not rest.resting:
            time.sleep(0.001)
        del loop


def test_a_pause_that_somebody_else_has_asked_for_goes_on() -> None:
    pipe, loop, rest = resting("thread")
    with pipe:
        rest.pause(time.monotonic_ns())
        while rest._alarm is not None:  # noqa: SLF001 until it has ended by itself
            time.sleep(0.001)
        engine = pipe._slot.run.host.engine  # type: ignore[union-attr]  # noqa: SLF001
        assert engine is not None
        with engine.still():
            rest.resume()
            assert still_s(0.1)
        next(loop)
        del loop


def test_the_end_of_a_rest_does_not_end_a_pause_that_began_meanwhile() -> None:
    pipe, loop, rest = resting("thread")
    with pipe:
        engine = pipe._slot.run.host.engine  # type: ignore[union-attr]  # noqa: SLF001
        assert engine is not None
        rest.pause(time.monotonic_ns() + 1_000_000_000)
        with engine.still():
            while rest._alarm is not None:  # noqa: SLF001 until its alarm has come
                time.sleep(0.001)
            assert still_s(0.1)
        next(loop)
        del loop


def test_a_child_that_dies_while_it_rests_loses_nothing() -> None:
    pipe, loop, rest = resting("process")
    with pipe:
        rest.pause(1 << 62)
        while not rest.resting:
            time.sleep(0.001)
        engine = pipe._slot.run.host.engine  # type: ignore[union-attr]  # noqa: SLF001
        assert engine is not None
        for child in list(engine.segments[-1].pool._children):  # type: ignore[attr-defined]  # noqa: SLF001
            os.kill(child.pid, signal.SIGKILL)
        rest.resume()
        rows = [row for _ in range(20) for row in next(loop).tolist()]
        assert rows == list(range(64, 21 * 64))
        del loop
