"""Workers that outlive an epoch, and changes of the dataset that they see."""

from __future__ import annotations

import os
from typing import Any

import pytest

import penstock as ps
from support.datasets import KINDS
from support.leaks import children
from support.torch_datasets import Drawing
from support.torch_loaders import same
from support.waiting import until


class Changing:
    """Sample i is `(i, the value last set, the process that reads it)`."""

    def __init__(self) -> None:
        self.value = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, self.value, os.getpid()


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_end_with_their_epoch_see_changes_and_do_not_count_as_deaths(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Changing()
    source = ps.Pipeline.from_dataset(dataset, **KINDS[kind])
    epochs, processes = [], []
    with source.batch(4).options(persistent_workers=False) as pipe:
        for epoch in range(3):
            dataset.value = epoch
            batches = list(pipe)
            epochs.append([value for batch in batches for value in batch[1].tolist()])
            processes.append(processes_of(batches))
    assert epochs == [[epoch] * 24 for epoch in range(3)]
    if kind == "3 processes":
        first, second, third = processes
        assert not (first & second) | (second & third)
    assert caplog.messages == []


def processes_of(batches: Any) -> set[int]:
    return {pid for batch in batches for pid in batch[2].tolist()}


def test_persistent_worker_processes_outlive_an_epoch() -> None:
    source = ps.Pipeline.from_dataset(Changing(), **KINDS["3 processes"])
    with source.batch(4) as pipe:
        first, second = processes_of(pipe), processes_of(pipe)
    assert first & second


def test_no_process_stays_between_epochs_unless_workers_are_kept() -> None:
    loader = ps.DataLoader(Changing(), batch_size=4, num_workers=2, sample_seeding=True)
    for _ in range(3):
        assert os.getpid() not in processes_of(loader)
        assert until(lambda: not children())  # not even one that nobody has waited for
    loader.close()


def test_kept_workers_end_where_other_ones_take_over() -> None:
    loader = ps.DataLoader(Changing(), 4, num_workers=1, persistent_workers=True)
    earlier: set[int] = set()

    def is_gone() -> bool:
        return not earlier & {child.pid for child in children(recursive=True)}

    try:
        for tuned in (True, False, True):
            ps.set_enable_autotune(tuned)
            pids = processes_of(loader)
            assert until(is_gone)
            assert (loader.stats() is not None) == tuned
            earlier |= pids
    finally:
        ps.set_enable_autotune(False)
        loader.close()


def test_loops_that_are_left_early_draw_anew_and_a_resumed_one_draws_the_same() -> None:
    def loader() -> ps.DataLoader[Any]:
        kept = {"num_workers": 2, "persistent_workers": True}
        return ps.DataLoader(Drawing(24), 4, sample_seeding=True, **kept)  # type: ignore[arg-type]

    with loader() as first, loader() as second:
        draws = [next(iter(first))[0].tolist() for _ in range(2)]
        batches = iter(first)
        assert next(batches)[0].tolist() not in draws
        assert draws[0] != draws[1]
        second.load_state_dict(first.state_dict())
        assert same(list(batches), list(second))


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
