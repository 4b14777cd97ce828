"""What torch documents of a loader, and a stranger tried, holds for a tuned one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torchs
from torch.utils.data._utils.collate import default_collate_fn_map

import penstock as ps
from support.as_torch import LENGTH, SIZE, WORKERS, Table, check, pairs, unchanged
from support.moves import workers_pay


@pytest.fixture(autouse=True)
def _workers_pay() -> Iterator[None]:
    with workers_pay():
        yield


CONTAINERS: dict[str, Callable[[range], Any]] = {
    "tuple": tuple,
    "range": lambda some: some,
    "dict": dict.fromkeys,
    "array": np.array,
    "tensor": torch.tensor,
}


@pytest.mark.parametrize(("kind", "workers"), pairs(CONTAINERS, "tuple"))
def test_a_dataset_gets_what_its_batch_sampler_yields(
    kind: str, workers: int | None
) -> None:
    batches = [CONTAINERS[kind](range(at, at + SIZE)) for at in range(0, LENGTH, SIZE)]
    data = Table(lambda indices: (type(indices).__name__, sum(indices)))
    check(data, workers, batch_sampler=batches, collate_fn=unchanged)


class Endless(torchs.Dataset[Any]):
    """Cannot say how long it is; its sampler can."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> int:
        return 2 * index


class Alarm(BaseException):
    """As a signal handler raises it, at the seventh sample."""


class Interrupted(torchs.Dataset[Any]):
    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        self.count += 1
        if self.count == 7:
            raise Alarm
        return index


@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_need_not_know_its_length(workers: int | None) -> None:
    check(Endless(), workers, sampler=range(3, 9), batch_size=SIZE)
    check(Endless(), workers, batch_sampler=[[1, 2], [3]])


def pulled(loader: Any) -> list[Any]:
    """Return the batches, with each exception in place of one."""
    batches: list[Any] = []
    loop = iter(loader)
    while True:
        try:
            batches.append(next(loop).tolist())
        except StopIteration:
            return batches
        except BaseException as error:  # noqa: BLE001 it is compared
            batches.append(type(error))


def test_a_loop_without_workers_goes_on_after_an_interruption() -> None:
    expected = pulled(torchs.DataLoader(Interrupted(), SIZE))
    ps.set_enable_autotune(True)
    with closing(ps.DataLoader(Interrupted(), SIZE)) as loader:
        assert pulled(loader) == expected


@pytest.mark.parametrize("workers", [None, 0])
def test_a_time_limit_is_for_workers(workers: int | None) -> None:
    options: Any = {} if workers is None else {"num_workers": workers}
    ps.set_enable_autotune(True)
    with pytest.raises(AssertionError, match="timeout"):
        iter(torchs.DataLoader(range(8), timeout=5, **options))
    with pytest.raises(AssertionError, match="timeout"):
        iter(ps.DataLoader(range(8), timeout=5, **options))


@pytest.mark.parametrize("tuned", [False, True])
def test_what_is_no_generator_is_refused_as_by_torch(*, tuned: bool) -> None:
    ps.set_enable_autotune(tuned)
    with pytest.raises(TypeError, match="random_"):
        next(iter(ps.DataLoader(range(8), generator=3)))  # type: ignore[arg-type]


def collate_strictly(numbers: list[int], **_: Any) -> list[int]:
    return numbers


@pytest.mark.parametrize("workers", WORKERS)
def test_default_collation_can_be_changed_for_any_type(
    workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, int, collate_strictly)
    check(range(LENGTH), workers, batch_size=SIZE)


class Training(ps.DataLoader[Any]):
    name = "train"


def test_a_subclass_may_have_a_name_of_its_own() -> None:
    assert Training(range(3)).name == "train"
    assert Training(range(3), name="other").name == "other"
