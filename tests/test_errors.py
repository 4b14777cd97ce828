"""Exceptions in user code: which one is raised, where it says it was, and when."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ExitError
from support.datasets import KINDS, WORKERS, Counting, Numbers
from support.functions import (
    BadSample,
    Tongue,
    UnpicklableError,
    fails_on,
    indices,
)
from support.moves import workers_pay

Kind = Mapping[str, Any]


@pytest.fixture(params=KINDS, scope="module")
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


def outcomes(pipe: ps.Pipeline, steps: int = 5) -> Iterator[Any]:
    """Yield what each step of an epoch comes to: a batch, or the exception."""
    loop = iter(pipe)
    for _ in range(steps):
        try:
            yield next(loop)
        except BaseException as error:  # noqa: BLE001 looked at
            yield error


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


# What the trainer sees


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every change."""

    index: int


class Mute(Exception):
    """Refuses notes."""

    def add_note(self, note: str) -> None:
        raise RuntimeError(note)


def error_of(index: int) -> BaseException:
    """Return an exception of another kind for each batch."""
    errors: list[Any] = [Frozen, Mute, BadSample, KeyError, SystemExit]
    return errors[index // 8](index)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def raised(kind: Kind) -> list[BaseException]:
    """Return what each of five steps raises, on the sixth of eight samples.

    The pipeline is made once for each kind of workers, and several tests look at it.
    """
    bad = 5, 13, 21, 29, 37
    with failing(kind, *bad, error=error_of) as pipe:
        return list(outcomes(pipe))


def test_an_exception_keeps_its_type_and_arguments(raised: list[BaseException]) -> None:
    assert [type(error) for error in raised[2:4]] == [BadSample, KeyError]
    assert [error.args for error in raised[2:4]] == [(21,), (29,)]


def test_an_exception_that_refuses_changes_is_raised_unchanged(
    kind: Kind, raised: list[BaseException]
) -> None:
    in_process = kind["executor"] == "process"
    frozen = ps.errors.WorkerError if in_process else Frozen  # it cannot be pickled
    assert [type(error) for error in raised[:2]] == [frozen, Mute]
    assert "sample index 5" in notes(raised[0])
    assert "sample index 13" in notes(raised[1])


def test_an_exception_names_the_stage_the_sample_and_the_batch(
    raised: list[BaseException],
) -> None:
    text = notes(raised[2])
    assert "Map(ID:1) check" in text
    assert "sample index 21 (epoch 0, step 2, row 5 of the batch)" in text


def test_the_traceback_leads_to_the_line_that_raised(
    raised: list[BaseException],
) -> None:
    text = "".join(traceback.format_exception(raised[2]))
    assert "in _fail" in text
    assert "raise error(sample[1])" in text


def test_the_traceback_has_only_the_users_frames(raised: list[BaseException]) -> None:
    error = raised[2]
    errors = [error, error.__cause__] if error.__cause__ else [error]
    files = re.findall(r'File "(.*)", line', "".join(map(traces, errors)))
    assert files
    assert [file for file in files if "/tests/" not in file] == []


def traces(error: BaseException) -> str:
    """Return what is printed for one exception, without its causes."""
    return "".join(traceback.format_exception(error, chain=False))


def test_system_exit_in_user_code_ends_the_trainer_if_it_was_its_own(
    kind: Kind, raised: list[BaseException]
) -> None:
    error = raised[4]
    if kind["executor"] == "process":  # it was to end the worker
        assert isinstance(error, ps.WorkerError)
        assert "SystemExit: 37" in str(error)
    else:
        assert isinstance(error, SystemExit)
        assert error.code == 37


# The stage that raises


class Torn(Numbers):
    """Cannot read one of its samples."""

    def __getitem__(self, index: int) -> Any:
        if index == 39:
            raise OSError(5, "cannot read", "disk")
        return super().__getitem__(index)


def refuses_a_tail(samples: list[Any]) -> Any:
    if len(samples) < 8:
        raise BadSample(len(samples))
    return samples


def chained(sample: Any) -> Any:
    try:
        return {}[sample[1]] if sample[1] == 5 else sample
    except KeyError as error:
        raise BadSample(5) from error


@pytest.fixture(scope="module")
def by_stage(kind: Kind) -> dict[str, BaseException]:
    """Return what each stage of a shuffled pipeline raises, by the stage's name.

    The order puts each bad sample into another batch.
    """
    pipe = (
        ps.Pipeline.from_dataset(Torn(41), **kind)
        .shuffle(seed=0)
        .map(chained, **kind)
        .filter(fails_on(13), **kind, name="keep")
        .batch(8, collate_fn=refuses_a_tail)
    )
    with pipe:
        steps = list(outcomes(pipe, 6))
    errors = [step for step in steps if isinstance(step, BaseException)]
    names = "Torn", "chained", "keep", "collate_fn"
    return {name: one(errors, name) for name in names}


def one(errors: list[BaseException], name: str) -> BaseException:
    (error,) = (error for error in errors if name in notes(error))
    return error


def test_an_error_in_the_dataset_names_the_reading_stage(
    by_stage: dict[str, BaseException],
) -> None:
    error = by_stage["Torn"]
    assert type(error) is OSError
    assert (error.errno, error.filename) == (5, "disk")
    assert "Dataset(ID:0) Torn, sample index 39" in notes(error)


def test_after_a_shuffle_an_exception_names_the_index_into_the_dataset(
    by_stage: dict[str, BaseException],
) -> None:
    error = by_stage["chained"]
    assert error.args == (5,)
    assert "Map(ID:2) chained, sample index 5 (" in notes(error)


def test_an_exception_in_a_predicate_names_the_filter(
    by_stage: dict[str, BaseException],
) -> None:
    error = by_stage["keep"]
    assert type(error) is BadSample
    assert "Filter(ID:3) keep, sample index 13" in notes(error)


def test_an_exception_in_a_collate_fn_names_the_batch_stage(
    by_stage: dict[str, BaseException],
) -> None:
    error = by_stage["collate_fn"]
    assert type(error) is BadSample
    assert "in the collate_fn of Batch(ID:4) (epoch 0, step 2)" in notes(error)


def test_the_exceptions_cause_is_shown(by_stage: dict[str, BaseException]) -> None:
    text = "".join(traceback.format_exception(by_stage["chained"]))
    assert "KeyError: 5" in text
    assert "direct cause" in text


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


def test_the_first_row_that_failed_is_the_one_raised(kind: Kind) -> None:
    assert first_error(failing(kind, 23, 17, 20)).args == (17,)


def test_an_exception_that_cannot_be_pickled_is_quoted() -> None:
    def make(index: int) -> Exception:
        return UnpicklableError(index, "odd") if index == 21 else Tongue(index)

    with failing(WORKERS["3 processes"], 21, 29, error=make) as pipe:
        *_, unpicklable, tongue = outcomes(pipe, 4)
    for error, name in ((unpicklable, "UnpicklableError"), (tongue, "Tongue")):
        index = 21 if error is unpicklable else 29
        assert type(error) is ps.WorkerError
        assert name in str(error)
        assert str(index) in str(error)
        assert f"sample index {index} (" in notes(error)
        assert "in _fail" in "".join(traceback.format_exception(error))


# When it comes


def test_an_exception_comes_when_its_batch_is_due_and_the_next_batch_after_it(
    kind: Kind,
) -> None:
    with failing(kind, 3, 16, 39) as pipe:
        rows, states = [], []
        for outcome in outcomes(pipe):
            failed = isinstance(outcome, BadSample)
            rows.append(outcome.args[0] if failed else outcome[1].tolist())
            states.append(pipe.state_dict()["batch"])
    assert rows == [3, [*range(8, 16)], 16, [*range(24, 32)], 39]
    # The state after an error leads to the batch that failed.
    assert states == [0, 2, 2, 4, 4]


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
        return subprocess.run(["/bin/sh", "-c", "exit 3"], check=False).returncode

    pipe = ps.Pipeline.from_dataset(Numbers(2), **kind).map(fail, **kind).batch(2)
    with pipe:
        assert next(iter(pipe)).tolist() == [3, 3]


# Bad samples may be substituted


def test_substitutes_are_the_next_rows_of_the_batch_and_are_marked(kind: Kind) -> None:
    def make(index: int) -> BaseException:
        return SystemExit(3) if index == 33 else BadSample(index)

    bad = 1, 6, 7, 22, 33
    marking: Any = {"on_error": "substitute", "error_budget": 0.2}
    batches, marks = [], []
    with failing(kind, *bad, error=make, **marking) as pipe:
        for batch in outcomes(pipe):
            batches.append(batch)
            marks.append(pipe.plan.substituted)  # type: ignore[union-attr]
    assert isinstance(batches.pop(), (SystemExit, ExitError))  # not a bad sample
    assert marks[:-1] == [(1, 6, 7), (), (6,), ()]
    assert list(indices(batches)) == [
        [0, 2, 2, 3, 4, 5, 0, 0],
        [*range(8, 16)],
        [16, 17, 18, 19, 20, 21, 23, 23],
        [*range(24, 32)],
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
            *_, middle, tail = [(batch[1].tolist(), pipe.plan) for batch in pipe]
            assert middle[0] == [5, 6, 7, 8, 5]
            assert (tail[0], tail[1].substituted) == ([8], (0,))  # type: ignore[union-attr]


# The budget is kept by the trainer, whoever works: these need no worker processes.
TRAINERS = pytest.mark.parametrize("workers", ["inline", "2 threads"])


@TRAINERS
def test_errors_beyond_the_error_budget_are_raised(workers: str) -> None:
    budget: Any = {"on_error": "substitute", "error_budget": 0.05}
    with failing(WORKERS[workers], 1, 9, 17, **budget) as pipe:
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


def test_each_pass_over_an_epoch_has_its_own_error_budget(kind: Kind) -> None:
    with failing(kind, 1, 9, on_error="substitute", error_budget=0.05) as pipe:
        for _ in range(3):
            pipe.set_epoch(0)
            assert len(list(pipe)) == 5


def test_the_error_budget_is_for_all_hosts_of_a_pass() -> None:
    budget: Any = {"on_error": "substitute", "error_budget": 0.05}
    with workers_pay(), failing({}, 1, 9, 17, **budget) as pipe:
        loop = iter(pipe)
        next(loop)
        run = pipe._slot.run  # noqa: SLF001 there is no other way to its knobs
        assert run is not None
        next(knob for knob in run.knobs() if knob.name == "host").set("process")
        next(loop)
        assert run.read().host == "process"
        with pytest.raises(BadSample, match="17"):
            next(loop)


@TRAINERS
def test_a_batch_in_which_every_sample_fails_is_raised(workers: str) -> None:
    budget: Any = {"on_error": "substitute", "error_budget": 1.0}
    pipe = failing(WORKERS[workers], *range(8, 16), **budget)
    assert first_error(pipe).args == (8,)


def test_failed_samples_of_an_iterable_are_left_out_within_the_budget() -> None:
    pipe = ps.Pipeline.from_dataset(Counting(40)).map(fails_on(5, 9))
    with pipe.batch(8, on_error="substitute", error_budget=0.2) as batched_pipe:
        rows = [index for batch in indices(batched_pipe) for index in batch]
    assert rows == [index for index in range(40) if index not in (5, 9)]


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

    source = ps.Pipeline.from_dataset(Numbers(8), executor="inline")
    functions = source.map(closure, executor="inline")
    pipe = functions.map(lambda function: function(), **WORKERS["3 processes"])
    error = first_error(pipe.batch(8))
    assert type(error) is ps.SampleError
    assert "sample index 0 (" in notes(error)


def test_a_sample_that_kills_its_worker_again_and_again_is_named() -> None:
    def crash(sample: Any) -> Any:
        if sample[1] == 21:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    workers = WORKERS["3 processes"]
    pipe = ps.Pipeline.from_dataset(Numbers(40), **workers).map(crash, **workers)
    with pipe.batch(8) as batched_pipe:
        loop = iter(batched_pipe)
        assert list(indices([next(loop), next(loop)])) == [[*range(8)], [*range(8, 16)]]
        with pytest.raises(ps.WorkerError, match="crash died 5 times") as caught:
            next(loop)
        assert list(indices(loop)) == [[*range(24, 32)], [*range(32, 40)]]
    assert "killed by signal 9 (SIGKILL)" in str(caught.value)
    assert "Map(ID:1) crash, sample index 21 (" in notes(caught.value)


def test_a_killed_fork_server_is_replaced_and_its_work_done_again(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "crashed"

    def crash(sample: Any) -> Any:
        if sample[1] == 21 and not marker.exists():
            marker.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    workers = WORKERS["3 processes"]
    pipe = ps.Pipeline.from_dataset(Numbers(40), **workers).map(crash, **workers)
    with pipe.batch(8) as batched_pipe:
        batches = [index for _ in range(2) for index in indices(batched_pipe)]
    assert marker.exists()
    assert batches == [[*range(at, at + 8)] for at in range(0, 40, 8)] * 2
