"""Coroutine functions that fail, take too long or are cancelled.

Reads wait forever, so that nothing depends on timing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

import penstock as ps
from penstock.engine import engine
from support import warm
from support.coroutines import hand_on, pipe_of
from support.datasets import Numbers, Sample
from support.functions import BadSample, fails_on, indices


class Forever:
    """A function that waits forever on one sample, and notes the end of the wait."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad
        self.reached = threading.Event()
        self.exits: list[int] = []

    async def __call__(self, sample: Sample) -> Sample:
        if sample[1] in self.bad:
            self.reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.exits.append(sample[1])
        return sample


def first_error(pipe: ps.Pipeline) -> BaseException:
    with pipe, pytest.raises(BaseException) as caught:  # noqa: PT011 looked at
        list(pipe)
    return caught.value


# Errors


def test_an_exception_belongs_to_its_batch_and_names_its_sample() -> None:
    async def check(sample: Sample) -> Sample:
        return fails_on(21)(await hand_on(sample))

    with pipe_of(check) as pipe:
        batches = iter(pipe)
        next(batches), next(batches)
        with pytest.raises(BadSample) as caught:
            next(batches)
    (note,) = caught.value.__notes__
    assert "in Map(ID:1) fetch, sample index 21 (epoch 0, step 2, row 5" in note


def test_a_bad_sample_may_be_substituted() -> None:
    async def check(sample: Sample) -> Sample:
        return fails_on(21)(await hand_on(sample))

    options = {"on_error": "substitute", "error_budget": 1.0}
    with pipe_of(check, batch=options) as pipe:
        samples = [index for batch in indices(pipe) for index in batch]
    assert len(samples) == 48
    assert 21 not in samples


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]
)
def test_exceptions_that_end_programs_reach_the_trainer(
    error: type[BaseException],
) -> None:
    async def check(sample: Sample) -> Sample:
        return fails_on(21, error=error)(await hand_on(sample))

    assert type(first_error(pipe_of(check))) is error


def test_a_function_that_cancels_its_own_task_fails_only_its_rows() -> None:
    async def check(sample: Sample) -> Sample:
        task = asyncio.current_task()
        assert task is not None
        if sample[1] in (3, 21):
            task.cancel()
        if sample[1] == 21:
            await asyncio.sleep(0)
        return sample

    error = first_error(pipe_of(check, num_parallel_workers=2))
    assert type(error) is asyncio.CancelledError
    assert "step 2, row 5" in error.__notes__[0]


def test_none_is_not_a_sample() -> None:
    async def forget(sample: Sample) -> None:
        await hand_on(sample)

    error = first_error(pipe_of(forget))
    assert type(error) is ps.SampleError
    assert "fetch returned None" in str(error)


def test_a_sample_that_takes_too_long_is_cancelled_and_its_row_fails() -> None:
    function = Forever(21)
    error = first_error(pipe_of(function, timeout=0.05))
    assert type(error) is TimeoutError
    assert "fetch was still waiting for this sample after its `timeout` of 0.05 s" in (
        str(error)
    )
    assert "row 5 of the batch" in error.__notes__[0]
    assert set(function.exits) == {21}  # of the next epochs, too


def test_a_timeout_applies_to_each_sample_alone() -> None:
    options = {"on_error": "substitute", "error_budget": 1.0}
    function = Forever(9, 10, 21)
    with pipe_of(function, timeout=0.05, batch=options) as pipe:
        assert len(list(pipe)) == 6
    assert set(function.exits) == {9, 10, 21}  # of the next epochs, too


def test_a_timeout_error_raised_by_a_function_stays_its_own() -> None:
    async def check(sample: Sample) -> Sample:
        async with asyncio.timeout(0):
            return await hand_on(sample)

    assert str(first_error(pipe_of(check, timeout=60))) == ""


# Endings


def test_a_loop_left_early_cancels_what_waits() -> None:
    function = Forever(12)
    pipe = pipe_of(function)
    for _ in pipe:
        assert function.reached.wait(timeout=60)
        break
    pipe.close()
    assert function.exits == [12]


def test_tasks_that_coroutines_began_end_with_them() -> None:
    ended = []

    async def numbers() -> Any:
        try:
            while True:
                yield 1
        finally:
            ended.append("generator")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    references = []

    async def begin(sample: Sample) -> Sample:
        if not references:
            references.extend([numbers(), asyncio.create_task(wait())])
            await anext(references[0])
        return await asyncio.to_thread(lambda: sample)

    with pipe_of(begin) as pipe:
        assert len(list(pipe)) == 6
    assert sorted(ended) == ["generator", "task"]


def test_a_coroutine_that_resists_cancellation_does_not_delay_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "CLOSE_S", 0.1)
    reached, refused, released = (threading.Event() for _ in range(3))

    async def stubborn(sample: Sample) -> Sample:
        while sample[1] == 12 and not released.is_set():
            reached.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                refused.set()
                await asyncio.to_thread(released.wait)
        return sample

    before = threading.active_count()
    source = ps.Pipeline.from_dataset(Numbers(48), executor="thread")  # it reads ahead
    pipe = source.map(stubborn).batch(8)
    batches = iter(pipe)
    next(batches)
    assert reached.wait(timeout=60)
    pipe.close()
    assert refused.wait(timeout=60)
    assert threading.active_count() > before
    released.set()  # the rest ends by itself, or the guard around the test reports it


CTRL_C = """
import asyncio, threading
import penstock as ps
from support.datasets import Numbers

async def fetch(sample):
    if sample[1] >= 16:
        await asyncio.Event().wait()
    return sample

pipe = ps.Pipeline.from_dataset(Numbers(10**6)).map(fetch).batch(8)
try:
    for at, batch in enumerate(pipe):
        if at == 1:
            print("ready", flush=True)
except KeyboardInterrupt:
    print(threading.active_count(), pipe.stats() is None)
"""


def test_ctrl_c_ends_a_loop_whose_reads_wait_forever() -> None:
    script = warm.Popen(
        [sys.executable, "-c", textwrap.dedent(CTRL_C)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    script.send_signal(signal.SIGINT)
    printed, _ = script.communicate(timeout=60)
    assert (script.returncode, printed) == (0, "1 True\n")
