"""`DataLoader`: code in a worker process finds what it finds in torch's workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.utils.data as torchs

import penstock as ps
from penstock import DataLoader
from penstock.pipeline import torch_workers
from support.torch_datasets import Asks, Streamed, leave_mark


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    ps.set_enable_autotune(False)


def no_start(number: int) -> None:
    raise KeyError(f"worker {number} finds no key")


@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize(
    "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_each_worker_is_started_once_and_knows_its_number(method: str) -> None:
    loader = DataLoader(
        Asks(),
        4,
        num_workers=2,
        sample_seeding=True,
        worker_init_fn=partial(leave_mark, factor=100),
        multiprocessing_context=method,
    )
    numbers, marks, indices = (torch.cat(columns) for columns in zip(*loader))  # noqa: B905
    assert indices.tolist() == list(range(40))
    assert set(numbers.tolist()) <= {0, 1}
    assert torch.equal(marks, 100 * (numbers + 1))


def test_the_trainer_itself_is_not_a_worker() -> None:
    loader = DataLoader(Asks(), 40, sample_seeding=True, worker_init_fn=leave_mark)
    ((numbers, marks, _),) = loader
    assert set(numbers.tolist()) == set(marks.tolist()) == {-1}


def test_a_worker_that_cannot_start_says_why() -> None:
    loader = DataLoader(
        Asks(), 4, num_workers=1, sample_seeding=True, worker_init_fn=no_start
    )
    with pytest.raises(KeyError, match="worker 0 finds no key"):
        next(iter(loader))


class Falls(Asks):
    """Its worker is killed at sample 20, once."""

    def __init__(self, mark_of: Path) -> None:
        self.mark_of = mark_of

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        if index == 20 and not self.mark_of.exists():
            self.mark_of.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_replaced_worker_has_the_same_number_and_init_function(
    tmp_path: Path,
) -> None:
    loader = DataLoader(
        Falls(tmp_path / "mark"),
        4,
        num_workers=1,
        sample_seeding=True,
        worker_init_fn=leave_mark,
    )
    numbers, marks, indices = (torch.cat(columns) for columns in zip(*loader))  # noqa: B905
    assert indices.tolist() == list(range(40))
    assert set(numbers.tolist()) == {0}
    assert set(marks.tolist()) == {10}


def test_a_worker_init_fn_assigned_later_is_used_from_the_next_loop_on() -> None:
    loader = DataLoader(Asks(), 40, num_workers=1, sample_seeding=True)
    ((_, marks, _),) = loader
    assert set(marks.tolist()) == {-1}
    loader.worker_init_fn = leave_mark
    ((_, marks, _),) = loader
    assert set(marks.tolist()) == {10}


@pytest.mark.parametrize("tuned", [False, True])
def test_a_number_of_workers_assigned_later_holds_from_the_next_loop_on(
    *, tuned: bool
) -> None:
    ps.set_enable_autotune(tuned)
    loader = DataLoader(
        Asks(), 40, num_workers=0, sample_seeding=None if tuned else True
    )
    for workers in (0, 1, 0):
        loader.num_workers = workers
        ((numbers, _, _),) = loader
        assert set(numbers.tolist()) == {workers - 1}
    loader.close()


class TakesItsShare(Streamed):
    """Computes its share as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = torchs.get_worker_info()
        if info is None:
            return iter(range(self.length))
        return iter(range(info.id, self.length, info.num_workers))


class Spanned(Streamed):
    """Gets its share from a `worker_init_fn` as torch's documentation shows."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.length))


class SetsItselfBack(Streamed):
    """Is its own iterator, and restarts whenever it is asked for one."""

    def __iter__(self) -> Self:
        self.samples = iter(range(self.length))
        return self

    def __next__(self) -> int:
        return next(self.samples)


def set_span(number: int) -> None:
    info = torchs.get_worker_info()
    assert info is not None
    data, size = info.dataset, -(-info.dataset.length // info.num_workers)
    data.start = number * size
    data.length = min(data.length, data.start + size)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("data", "init"),
    [
        (TakesItsShare, None),
        (Spanned, set_span),
    ],
)
def test_no_sample_of_a_shared_iterable_comes_twice(
    data: Any, init: Any, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    ps.set_enable_autotune(True)
    loader = DataLoader(
        data(23),
        4,
        num_workers=workers,
        worker_init_fn=init if workers else None,
        persistent_workers=workers > 0,
    )
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(23))
    assert type(loader.dataset) is data
    assert "get_worker_info" not in caplog.text


@pytest.mark.parametrize(
    ("data", "tuned", "kept"),
    [
        (Streamed, False, False),
        (Streamed, True, True),
        (SetsItselfBack, False, True),
        (SetsItselfBack, True, False),
    ],
)
def test_samples_that_torch_gives_twice_come_twice_with_one_warning(
    data: Any,
    tuned: bool,  # noqa: FBT001
    kept: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch_workers.tell_once.cache_clear()
    ps.set_enable_autotune(tuned)
    loader = DataLoader(data(5), 5, num_workers=2, persistent_workers=kept)
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == sorted(2 * [*range(5)])
    assert caplog.text.count("get_worker_info()") == tuned
