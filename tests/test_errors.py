"""Exceptions in user code: which one is raised, where it says it was, and when."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from support.datasets import KINDS, WORKERS, Counting, Numbers
from support.functions import (
    BadSample,
    Tongue,
    UnpicklableError,
    fails_on,
    indices,
)

Kind = Mapping[str, Any]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def failing(kind: Kind, *bad: int, error: Any = BadSample, **batch: Any) -> ps.Pipeline:
    """Return a pipeline over 0 to 39 in batches of 8 that raises on some samples."""
    return (
        ps.Pipeline.from_dataset(Numbers(40), **kind)
        .map(fails_on(*bad, error=error), **kind, name="check")
        .batch(8, **batch)
    )


def first_error(pipe: ps.Pipeline) -> BaseException:
    with pipe, pytest.raises(BaseException) as caught:  # noqa: PT011 looked at
        list(pipe)
    return caught.value


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


# What the trainer sees


def test_an_exception_keeps_its_type_and_arguments(kind: Kind) -> None:
    error = first_error(failing(kind, 21))
    assert type(error) is BadSample
    assert error.args == (21,)


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every change."""

    index: int


class Mute(Exception):
    """Refuses notes."""

    def add_note(self, note: str) -> None:
        raise RuntimeError(note)


@pytest.mark.parametrize("error", [Frozen, Mute])
def test_an_exception_that_refuses_changes_is_raised_unchanged(
    kind: Kind, error: type[Exception]
) -> None:
    raised = first_error(failing(kind, 21, error=error))
    quoted = (
        error is Frozen and kind.get("executor") == "process"
    )  # it cannot be pickled
    assert type(raised) is (ps.errors.WorkerError if quoted else error)
    assert "sample index 21" in notes(raised)


def test_an_exception_names_the_stage_the_sample_and_the_batch(kind: Kind) -> None:
    said = notes(first_error(failing(kind, 21)))
    assert "Map(ID:1) check" in said
    assert "sample index 21 (epoch 0, step 2, row 5 of the batch)" in said


def test_after_a_shuffle_an_exception_names_the_index_into_the_dataset(
    kind: Kind,
) -> None:
    pipe = (
        ps.Pipeline.from_dataset(Numbers(40), **kind)
        .shuffle(seed=0)
        .map(fails_on(21), **kind)
        .batch(8)
    )
    assert "sample index 21 (" in notes(first_error(pipe))


def test_the_traceback_leads_to_the_line_that_raised(kind: Kind) -> None:
    error = first_error(failing(kind, 21))
    text = "".join(traceback.format_exception(error))
    assert "in _fail" in text
    assert "raise error(sample[1])" in text


def test_the_traceback_has_only_the_users_frames(kind: Kind) -> None:
    error = first_error(failing(kind, 21))
    told = [error, error.__cause__] if error.__cause__ else [error]
    files = re.findall(r'File "(.*)", line', "".join(map(traces, told)))
    assert files
    assert [file for file in files if "/tests/" not in file] == []


def traces(error: BaseException) -> str:
    """Return what is printed for one exception, without its causes."""
    return "".join(traceback.format_exception(error, chain=False))


def test_an_error_in_the_dataset_names_the_reading_stage(kind: Kind) -> None:
    class Torn(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 21:
                raise OSError(5, "cannot read", "disk")
            return super().__getitem__(index)

    error = first_error(ps.Pipeline.from_dataset(Torn(40), **kind).batch(8))
    assert type(error) is OSError
    assert (error.errno, error.filename) == (5, "disk")
    assert "Dataset(ID:0) Torn, sample index 21" in notes(error)


def test_an_exception_in_a_predicate_names_the_filter(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(40), **kind)
    error = first_error(pipe.filter(fails_on(21), **kind, name="keep").batch(8))
    assert type(error) is BadSample
    assert "Filter(ID:1) keep, sample index 21" in notes(error)


def test_an_exception_in_an_iterable_is_the_users_own() -> None:
    class Torn(Counting):
        def __iter__(self) -> Any:
            yield from ((np.ones(2), index) for index in range(10))
            raise BadSample(10)

    with ps.Pipeline.from_dataset(Torn(40)).batch(4) as pipe:
        loop = iter(pipe)
        assert list(indices([next(loop), next(loop)])) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(BadSample):
            next(loop)


def test_an_exception_in_a_collate_fn_names_the_batch_stage(kind: Kind) -> None:
    def refuse(samples: list[Any]) -> Any:
        raise BadSample(len(samples))

    pipe = ps.Pipeline.from_dataset(Numbers(40), **kind).batch(8, collate_fn=refuse)
    error = first_error(pipe)
    assert type(error) is BadSample
    assert "in the collate_fn of Batch(ID:1) (epoch 0, step 0)" in notes(error)


def test_the_first_row_that_failed_is_the_one_raised(kind: Kind) -> None:
    assert first_error(failing(kind, 23, 17, 20)).args == (17,)


@pytest.mark.parametrize("error", [UnpicklableError, Tongue])
def test_an_exception_that_cannot_be_pickled_is_quoted(error: type[Exception]) -> None:
    def make(index: int) -> Exception:
        return error(index, "odd") if error is UnpicklableError else error(index)

    found = first_error(failing(WORKERS["3 processes"], 21, error=make))
    assert type(found) is ps.WorkerError
    assert error.__name__ in str(found)
    assert "21" in str(found)
    assert "sample index 21 (" in notes(found)
    assert "in _fail" in "".join(traceback.format_exception(found))


def test_the_exceptions_cause_is_shown(kind: Kind) -> None:
    def chained(sample: Any) -> Any:
        try:
            return {}["missing"]
        except KeyError as error:
            raise BadSample(1) from error

    error = first_error(
        ps.Pipeline.from_dataset(Numbers(8), **kind).map(chained, **kind).batch(8)
    )
    text = "".join(traceback.format_exception(error))
    assert "KeyError: 'missing'" in text
    assert "direct cause" in text


# When it comes


def test_an_exception_is_raised_when_its_batch_is_due_and_not_before(
    kind: Kind,
) -> None:
    with failing(kind, 16) as pipe:
        loop = iter(pipe)
        assert list(indices([next(loop), next(loop)])) == [
            [*range(8)],
            [*range(8, 16)],
        ]
        with pytest.raises(BadSample):
            next(loop)


def test_the_next_call_goes_on_with_the_batch_after(kind: Kind) -> None:
    with failing(kind, 3, 16, 39) as pipe:
        loop = iter(pipe)
        found: list[Any] = []
        for _ in range(5):
            try:
                found += indices([next(loop)])
            except BadSample as error:
                found.append(error.args[0])
        with pytest.raises(StopIteration):
            next(loop)
    assert found == [3, [*range(8, 16)], 16, [*range(24, 32)], 39]


def test_the_epoch_after_an_error_is_complete(kind: Kind) -> None:
    broken = True

    def once(sample: Any) -> Any:
        if broken and sample[1] == 12:
            raise BadSample(12)
        return sample

    pipe = ps.Pipeline.from_dataset(Numbers(40), **kind).map(once, **kind).batch(8)
    with pipe:
        with pytest.raises(BadSample):
            list(pipe)
        broken = False
        assert len(list(pipe)) == 5


def test_a_state_after_an_error_leads_to_the_batch_that_failed(kind: Kind) -> None:
    with failing(kind, 16) as pipe:
        loop = iter(pipe)
        next(loop)
        next(loop)
        with pytest.raises(BadSample):
            next(loop)
        assert pipe.state_dict()["batch"] == 2


def test_workers_end_once_the_exception_is_dropped() -> None:
    """They end without the collector: the exception must not be part of a cycle."""
    pipe = failing(WORKERS["2 threads"], 3)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(BadSample):
            list(pipe)
        assert pipe.stats() is None
    finally:
        gc.enable()
        pipe.close()


# SystemExit, KeyboardInterrupt


def test_system_exit_in_user_code_reaches_the_trainer(kind: Kind) -> None:
    error = first_error(failing(kind, 21, error=lambda _: SystemExit(3)))
    assert type(error) is SystemExit
    assert error.code == 3


def test_system_exit_is_not_a_bad_sample(kind: Kind) -> None:
    pipe = failing(
        kind,
        21,
        error=lambda _: SystemExit(3),
        on_error="substitute",
        error_budget=1.0,
    )
    assert type(first_error(pipe)) is SystemExit


def test_keyboard_interrupt_is_not_a_bad_sample() -> None:
    pipe = failing(
        WORKERS["inline"],
        21,
        error=lambda _: KeyboardInterrupt(),
        on_error="substitute",
        error_budget=1.0,
    )
    assert type(first_error(pipe)) is KeyboardInterrupt


def test_user_code_sees_the_exit_code_of_its_own_command(kind: Kind) -> None:
    def fail(sample: Any) -> int:
        return subprocess.run([sys.executable, "-c", "exit(3)"], check=False).returncode

    pipe = ps.Pipeline.from_dataset(Numbers(2), **kind).map(fail, **kind).batch(2)
    with pipe:
        assert next(iter(pipe)).tolist() == [3, 3]


# Bad samples may be substituted


def test_substitutes_are_the_next_rows_of_the_batch_and_are_marked(kind: Kind) -> None:
    bad = 1, 6, 7, 22
    with failing(kind, *bad, on_error="substitute", error_budget=0.2) as pipe:
        batches = list(pipe)
    marked = [batch.plan.substituted for batch in batches]
    assert marked == [(1, 6, 7), (), (6,), (), ()]
    assert list(indices(batches)) == [
        [0, 2, 2, 3, 4, 5, 0, 0],
        [*range(8, 16)],
        [16, 17, 18, 19, 20, 21, 23, 23],
        [*range(24, 32)],
        [*range(32, 40)],
    ]
    values = [batch[0][:, 0].int().tolist() for batch in batches]
    assert values == list(indices(batches))


def test_a_tail_without_a_healthy_row_repeats_the_last_healthy_sample(
    kind: Kind,
) -> None:
    def refuse(sample: Any) -> Any:
        if sample[1] in (9, 10):  # the tail of one row, and the sample before it
            raise ValueError(sample[1])
        return sample

    pipe = ps.Pipeline.from_dataset(Numbers(11), **kind).map(refuse, **kind)
    with pipe.batch(5, on_error="substitute", error_budget=1.0) as pipe:
        for _ in range(2):
            *_, middle, tail = list(pipe)
            assert middle[1].tolist() == [5, 6, 7, 8, 5]
            assert (tail[1].tolist(), tail.plan.substituted) == ([8], (0,))


def test_the_stamp_of_the_pipeline_shows_substitutes_too(kind: Kind) -> None:
    with failing(kind, 1, on_error="substitute", error_budget=1.0) as pipe:
        next(iter(pipe))
        assert pipe.plan is not None
        assert pipe.plan.substituted == (1,)


def test_errors_beyond_the_error_budget_are_raised(kind: Kind) -> None:
    pipe = failing(kind, 1, 9, 17, on_error="substitute", error_budget=0.05)
    with pipe:
        loop = iter(pipe)
        assert len([next(loop), next(loop)]) == 2
        with pytest.raises(BadSample) as caught:
            next(loop)
    assert caught.value.args == (17,)
    assert "3 samples of epoch 0 have failed, but the error budget allows 2" in notes(
        caught.value
    )


def test_each_epoch_has_its_own_error_budget(kind: Kind) -> None:
    with failing(kind, 1, 9, on_error="substitute", error_budget=0.05) as pipe:
        assert [len(list(pipe)) for _ in range(3)] == [5, 5, 5]


def test_a_batch_in_which_every_sample_fails_is_raised(kind: Kind) -> None:
    pipe = failing(kind, *range(8, 16), on_error="substitute", error_budget=1.0)
    assert first_error(pipe).args == (8,)


def test_failed_samples_of_an_iterable_are_left_out_within_the_budget() -> None:
    pipe = ps.Pipeline.from_dataset(Counting(40)).map(fails_on(5, 9))
    with pipe.batch(8, on_error="substitute", error_budget=0.2) as batched:
        found = [index for batch in indices(batched) for index in batch]
    assert found == [index for index in range(40) if index not in (5, 9)]


# Worker processes


def test_a_sample_that_cannot_be_sent_back_is_named() -> None:
    def closure(sample: Any) -> Any:
        return lambda: sample

    workers = WORKERS["3 processes"]
    pipe = ps.Pipeline.from_dataset(Numbers(8), **workers).map(closure, **workers)
    error = first_error(pipe.batch(8, collate_fn=list))
    assert type(error) is ps.SampleError
    assert "Map(ID:1) closure cannot be sent to the trainer's process" in str(error)
    assert "sample index 0 (" in notes(error)


def test_a_sample_that_cannot_be_sent_to_a_worker_is_named() -> None:
    def closure(sample: Any) -> Any:
        return lambda: sample

    pipe = (
        ps.Pipeline.from_dataset(Numbers(8), **WORKERS["2 threads"])
        .map(closure, **WORKERS["2 threads"])
        .map(lambda function: function(), **WORKERS["3 processes"])
        .batch(8)
    )
    error = first_error(pipe)
    assert type(error) is ps.SampleError
    assert "sample index 0 (" in notes(error)


def test_a_sample_that_kills_its_worker_again_and_again_is_named() -> None:
    def crash(sample: Any) -> Any:
        if sample[1] == 21:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    workers = WORKERS["3 processes"]
    pipe = ps.Pipeline.from_dataset(Numbers(40), **workers).map(crash, **workers)
    with pipe.batch(8) as batched:
        loop = iter(batched)
        assert list(indices([next(loop), next(loop)])) == [[*range(8)], [*range(8, 16)]]
        with pytest.raises(ps.WorkerError, match="crash died 5 times") as caught:
            next(loop)
        assert list(indices(loop)) == [[*range(24, 32)], [*range(32, 40)]]
    assert "killed by signal 9 (SIGKILL)" in str(caught.value)
    assert "Map(ID:1) crash, sample index 21 (" in notes(caught.value)


def test_a_killed_fork_server_is_replaced_and_its_work_done_again(
    tmp_path: Path,
) -> None:
    crashed = tmp_path / "crashed"

    def crash(sample: Any) -> Any:
        if sample[1] == 21 and not crashed.exists():
            crashed.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    workers = WORKERS["3 processes"]
    pipe = ps.Pipeline.from_dataset(Numbers(40), **workers).map(crash, **workers)
    with pipe.batch(8) as batched:
        found = [index for _ in range(2) for index in indices(batched)]
    assert crashed.exists()
    assert found == [[*range(at, at + 8)] for at in range(0, 40, 8)] * 2
