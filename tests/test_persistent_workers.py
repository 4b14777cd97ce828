"""Workers that outlive an epoch, and changes of the dataset that they see."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from support.datasets import KINDS
from support.functions import pids


class Changing:
    """Sample i is `(i, the value last set)`."""

    def __init__(self) -> None:
        self.value = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.value


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_end_with_their_epoch_see_changes_between_epochs(
    kind: str,
) -> None:
    dataset = Changing()
    source = ps.Pipeline.from_dataset(dataset, **KINDS[kind])
    seen = []
    with source.batch(4).options(persistent_workers=False) as pipe:
        for epoch in range(3):
            dataset.value = epoch
            seen.append([value for batch in pipe for value in batch[1].tolist()])
    assert seen == [[epoch] * 24 for epoch in range(3)]


def processes_of(pipe: Any) -> set[int]:
    return {pid for batch in pipe for pid in batch[1].tolist()}


@pytest.mark.parametrize("persistent", [True, False])
def test_only_persistent_worker_processes_outlive_an_epoch(persistent: bool) -> None:  # noqa: FBT001
    workers = KINDS["3 processes"]
    described = ps.Pipeline.from_dataset(Changing(), **workers).map(pids, **workers)
    chosen = described.batch(4).options(persistent_workers=persistent)
    with chosen as pipe:
        first, second = processes_of(pipe), processes_of(pipe)
    assert bool(first & second) is persistent


def test_a_state_resumes_without_persistent_workers() -> None:
    chosen = (
        ps.Pipeline.from_dataset(list(range(40)), executor="thread")
        .shuffle(seed=1)
        .batch(4)
        .options(persistent_workers=False)
    )
    with chosen as pipe:
        whole = [batch.tolist() for _ in range(2) for batch in pipe]
    with chosen as pipe:
        pipe.set_epoch(0)
        loop = iter(pipe)
        head = [next(loop).tolist() for _ in range(7)]
        state = pipe.state_dict()
        pipe.load_state_dict(state)
        rest = [batch.tolist() for _ in range(2) for batch in pipe]
    assert head + rest == whole


def test_workers_that_end_with_their_epoch_do_not_count_as_deaths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        ps.Pipeline.from_dataset(Changing(), **KINDS["3 processes"])
        .batch(4)
        .options(persistent_workers=False) as pipe
    ):
        for _ in range(5):
            list(pipe)
    assert caplog.messages == []
