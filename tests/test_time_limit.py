"""`timeout=`: a stuck worker shows where it is and is replaced, and nothing is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from support.datasets import Counting, Numbers
from support.functions import indices
from support.leaks import children

pytestmark = pytest.mark.serial  # measures time

SHORT_S = 0.5


def pipe_of(
    function: Any, *, workers: int = 3, length: int = 60, **settings: Any
) -> ps.Pipeline:
    source = ps.Pipeline.from_dataset(Numbers(length), executor="inline")
    staffed = source.map(
        function, executor="process", num_parallel_workers=workers, **settings
    )
    return staffed.batch(6)


def whole(pipe: ps.Pipeline) -> list[int]:
    return [index for batch in indices(pipe) for index in batch]


@pytest.mark.parametrize("workers", [1, 3, 9])
def test_a_sample_that_is_stuck_once_is_repeated(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = tmp_path / "stuck"

    def gets_stuck_here(sample: Any) -> Any:
        if sample[1] == 31 and not stuck.exists():
            stuck.touch()
            threading.Event().wait()
        return sample

    # Long enough that no worker reaches this sample of the next epoch meanwhile.
    pipe = pipe_of(gets_stuck_here, workers=workers, length=240, timeout=SHORT_S)
    with caplog.at_level(logging.WARNING, "penstock"), pipe:
        assert whole(pipe) == list(range(240))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "while working on sample index 31" in line
    assert "replaced as it was stuck" in line
    assert "gets_stuck_here" in line  # its stack


def test_a_sample_that_is_always_stuck_is_given_up_and_named() -> None:
    def gets_stuck_here(sample: Any) -> Any:
        while sample[1] == 31:
            time.sleep(1)
        return sample

    with pipe_of(gets_stuck_here, timeout=0.2) as pipe:
        loop = iter(pipe)
        assert len([next(loop) for _ in range(5)]) == 5
        with pytest.raises(ps.WorkerError, match="5 times on sample index 31") as error:
            next(loop)
        assert "gets_stuck_here" in str(error.value)
        assert [batch[1].tolist()[0] for batch in loop] == [36, 42, 48, 54]


def test_many_slow_samples_within_the_limit_are_not_disturbed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def takes_its_time(sample: Any) -> Any:
        time.sleep(SHORT_S / 10)
        return sample

    with pipe_of(takes_its_time, timeout=SHORT_S) as pipe:
        assert whole(pipe) == list(range(60))
    assert not caplog.records


def test_a_stopped_worker_is_replaced_and_reported_as_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def takes_its_time(sample: Any) -> Any:
        time.sleep(0.01)
        return sample

    with pipe_of(takes_its_time, workers=1, timeout=SHORT_S) as pipe:
        loop = iter(pipe)
        found = [next(loop)]
        fork_server = children()[0]
        os.kill(fork_server.children()[0].pid, signal.SIGSTOP)
        found += loop
    assert list(indices(found)) == [[*range(at, at + 6)] for at in range(0, 60, 6)]
    assert "stopped by a signal (SIGSTOP" in caplog.text


def test_a_stopped_worker_without_a_limit_does_not_prevent_closing() -> None:
    def takes_its_time(sample: Any) -> Any:
        time.sleep(0.01)
        return sample

    with pipe_of(takes_its_time) as pipe:
        next(iter(pipe))
        for child in children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 5


def test_auto_chooses_workers_that_can_be_stopped_if_there_is_a_limit() -> None:
    with ps.Pipeline.from_dataset(Numbers(8)).map(abs_of, timeout=9).batch(4) as pipe:
        list(pipe)
        stats = pipe.stats()
    assert stats is not None
    assert stats.segments[-1].executor == "process"


def abs_of(sample: Any) -> Any:
    return abs(sample[1])


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_workers_that_cannot_be_stopped_refuse_a_limit(executor: Any) -> None:
    with pytest.raises(ps.SpecError, match="needs workers that can be stopped"):
        ps.Pipeline.from_dataset([1]).map(abs, executor=executor, timeout=1)


@pytest.mark.parametrize("limit", [0, -1, "1", True])
def test_a_limit_must_be_a_positive_number_of_seconds(limit: Any) -> None:
    with pytest.raises(ps.SpecError, match="`timeout` is the seconds"):
        ps.Pipeline.from_dataset([1]).map(abs, timeout=limit)


def test_an_iterable_read_in_the_trainer_refuses_a_limit() -> None:
    with pytest.raises(ps.SpecError, match="cannot be interrupted"):
        ps.Pipeline.from_dataset(Counting(8), timeout=1)
