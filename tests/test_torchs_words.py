"""What torch's page about `DataLoader` allows, tried by a reader of that page alone.

Each test is of a kind that this reader found to differ, silently or with an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as torchs

import penstock as ps
from support.moves import workers_pay

ON = (None, 0, 2)
"""Numbers of workers; None leaves them out."""


@pytest.fixture(autouse=True)
def _tuned() -> Iterator[None]:
    ps.set_enable_autotune(True)
    with workers_pay():
        yield


def loader(data: Any, workers: int | None, **options: Any) -> Any:
    worker_options = {} if workers is None else {"num_workers": workers}
    return ps.DataLoader(data, batch_size=4, **worker_options, **options)


@pytest.mark.parametrize("workers", ON)
def test_several_threads_may_loop_over_one_loader(workers: int | None) -> None:
    loads, counts = loader(range(100), workers), []

    def loop() -> None:
        counts.extend(sum(1 for _ in loads) for _ in range(3))

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == 9 * [25]
    loads.close()


class Writes(torchs.Dataset[int]):
    """Notes each sample in a file of its own."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.file.write(f"{index}\n")
        return index


def test_a_dataset_may_write_to_its_file(tmp_path: Path) -> None:
    data = Writes(tmp_path / "log")
    loads = loader(data, None)
    for _ in range(2):
        list(loads)
    data.file.close()
    lines = (tmp_path / "log").read_text().split()
    assert lines == 2 * [str(index) for index in range(40)]


@pytest.mark.parametrize("workers", ON)
def test_what_a_file_still_holds_is_written_once(
    tmp_path: Path, workers: int | None
) -> None:
    data = Writes(tmp_path / "log")
    data.file.write("pending\n")
    loads = loader(data, workers)
    for _ in range(2):
        list(loads)
    loads.close()
    data.file.close()
    assert (tmp_path / "log").read_text().count("pending") == 1


class Learned(torchs.Dataset[torch.Tensor]):
    """Samples that depend on weights, which learn from them."""

    def __init__(self) -> None:
        self.weights = torch.ones(40, requires_grad=True)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.weights[index] * 2


def test_gradients_reach_the_dataset() -> None:
    data = Learned()
    for batch in loader(data, None):
        batch.sum().backward()
    assert data.weights.grad is not None
    assert data.weights.grad.tolist() == 40 * [2.0]


class OfEpoch(torchs.Dataset[tuple[int, int]]):
    """Samples that tell what the dataset's epoch is, and who makes them."""

    epoch = 0

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.epoch, os.getpid()


def test_kept_workers_outlive_a_loop_that_is_left_early() -> None:
    data, pids, epochs = OfEpoch(), [], []
    loads = loader(data, 2, persistent_workers=True)
    for data.epoch in range(3):
        batches = list(islice(loads, 20))
        epochs.append({int(epoch) for batch in batches for epoch in batch[0]})
        pids.append({int(pid) for batch in batches for pid in batch[1]})
    loads.close()
    assert epochs == 3 * [{0}]
    assert pids == 3 * [pids[0]]


def test_a_forked_child_may_go_on_with_a_loop_that_has_no_workers() -> None:
    batches = iter(loader(list(range(40)), 0))
    next(batches)
    pid = os.fork()
    if pid == 0:
        batches_left = 0
        try:
            batches_left = sum(1 for _ in batches)
        finally:
            os._exit(batches_left)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert sum(1 for _ in batches) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_may_share_a_generator(workers: int) -> None:
    def found(kind: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
        options |= {"shuffle": True, "generator": generator}
        one, other = kind(range(60), **options), kind(range(60), **options)
        return [
            [batch.tolist() for batch in pair] for pair in zip(one, other, strict=True)
        ]

    assert found(ps.DataLoader) == found(torchs.DataLoader)


class Unsendable(torchs.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return (index * factor for factor in range(3))


def unrolled(rows: list[Any]) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_collate_fn_makes_of_samples_is_all_that_is_sent(workers: int) -> None:
    batches = list(loader(Unsendable(), workers, collate_fn=unrolled))
    rows = [row for batch in batches for row in batch.tolist()]
    assert rows == [[0, index, 2 * index] for index in range(40)]


@pytest.mark.parametrize("workers", [None, 0])
def test_a_method_that_is_replaced_is_called_from_the_next_batch_on(
    workers: int | None,
) -> None:
    class Counts(torchs.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            return index

    def negative(_: Any, index: int) -> int:
        return -index

    batches = iter(loader(Counts(), workers))
    assert next(batches).tolist() == [0, 1, 2, 3]
    Counts.__getitem__ = negative  # type: ignore[method-assign]
    assert next(batches).tolist() == [-4, -5, -6, -7]
    assert next(batches).tolist() == [-8, -9, -10, -11]


class Surrounded(torchs.Dataset[tuple[str, str]]):
    """Samples that depend on the process they are made in."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[str, str]:
        return os.getcwd(), str(torch.zeros(1).dtype)


def test_the_loop_may_change_the_folder_and_torchs_default_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = iter(loader(Surrounded(), None))
    for _ in range(3):
        next(batches)
    monkeypatch.chdir(tmp_path)
    folders, _ = next(batches)
    assert set(folders) == {str(tmp_path)}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        _, types = next(batches)
    finally:
        torch.set_default_dtype(before)
    assert set(types) == {"torch.float64"}
