"""Collections of garbage come later, and only if the program wants any."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

import penstock as ps
from penstock.system.garbage import collected_later

BEGINNING = """
import gc
import torch.utils.data

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return index

collections = []
gc.callbacks.append(
    lambda phase, info: phase == "start" and collections.append(info["generation"])
)
import penstock as ps
ps.set_enable_autotune(True)
next(iter(MADE))
print(max(collections, default=0), gc.isenabled())
"""
FACES = (
    "ps.DataLoader(Samples(), 8)",
    "ps.DataLoader(Samples(), 8, num_workers=1)",
    "ps.Pipeline.from_dataset(Samples()).batch(8)",
)


def test_garbage_is_collected_again_afterwards_if_it_was_before() -> None:
    with collected_later():
        assert not gc.isenabled()
        with collected_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collected_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_collected_again_after_an_error() -> None:
    with pytest.raises(KeyError), collected_later():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize("face", FACES)
def test_a_first_batch_does_not_wait_for_a_full_collection(face: str) -> None:
    program = BEGINNING.replace("MADE", face)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    generation, enabled = run.stdout.split()
    assert (int(generation) < 2, enabled) == (True, "True")


class Enabled(Dataset[int]):
    """Whether garbage is collected where samples are made."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(gc.isenabled())


WORKERS: dict[str, Callable[[], Iterable[Any]]] = {
    "a loader": lambda: ps.DataLoader(Enabled(), 2, num_workers=2),
    "a pipeline": lambda: ps.Pipeline.from_dataset(
        Enabled(), executor="process", num_parallel_workers=2
    ).batch(2),
    "a host": lambda: (
        ps.Pipeline.from_dataset(Enabled()).batch(2).options(host="process")
    ),
    "torch's own": lambda: ps.DataLoader(
        Enabled(), 2, num_workers=2, worker_init_fn=print
    ),
}


@pytest.mark.parametrize("workers", WORKERS)
def test_worker_processes_collect_garbage(workers: str) -> None:
    batches = WORKERS[workers]()
    for _ in range(2):  # processes of a second epoch, too
        assert [sum(batch.tolist()) for batch in batches] == [2] * 4


def test_an_interrupt_leaves_collections_on() -> None:
    def interrupted() -> None:
        with collected_later():
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert gc.isenabled()


class Counted(IterableDataset[int]):
    """Notes whether garbage is collected while it is read."""

    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def __iter__(self) -> Iterator[int]:
        for at in range(8):
            self.enabled.append(gc.isenabled())
            yield at


def test_a_resumed_iterable_is_read_while_garbage_is_collected() -> None:
    loader = ps.DataLoader(Counted(), 2)
    batches = iter(loader)
    next(batches)
    next(batches)
    state, data = loader.state_dict(), Counted()
    resumed = ps.DataLoader(data, 2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[4, 5], [6, 7]]
    assert all(data.enabled)
