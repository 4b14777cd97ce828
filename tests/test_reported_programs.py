"""Programs that people have reported elsewhere load with penstock what torch loads.

Each is of a kind that torch runs as the user expects, and that a loader which moves
work about can get wrong: odd indices, batches that the dataset makes itself, a sampler
to which the loop says what comes next, a loop that changes the dataset.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torchs

import penstock as ps
from penstock.engine.core.in_flight import ByteBudget
from penstock.engine.witness import witness
from support import warm
from support.as_torch import LENGTH, SIZE, WORKERS, Table, check, pairs, unchanged
from support.moves import workers_pay


@pytest.fixture(autouse=True)
def _workers_pay() -> Iterator[None]:
    with workers_pay():
        yield


class Asked(torchs.Dataset[Any]):
    """Returns what it was asked for, and of which type that was."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> Any:
        return type(index).__name__, repr(index)


INDICES: dict[str, Callable[[int], Any]] = {
    "size and index": lambda i: (16 * (1 + i % 3), i),
    "name": lambda i: f"image {i}.jpg",
    "box": lambda i: (i / 7, i / 3, 1.0, 2.0),
    "number of numpy": np.int64,
    "tensor": torch.tensor,
    "flag": lambda i: i % 2 == 0,
    "nothing": lambda i: None,
    "list": lambda i: [i, i + 1],
    "large number": lambda i: 2**70 + i,
    "slice": lambda i: slice(i, i + 2),
}


@pytest.mark.parametrize(("kind", "workers"), pairs(INDICES, "size and index"))
def test_a_sampler_may_yield_any_index(kind: str, workers: int | None) -> None:
    indices = [INDICES[kind](index) for index in range(LENGTH)]
    batches = [indices[at : at + SIZE] for at in range(0, LENGTH, SIZE)]
    check(Asked(), workers, batch_sampler=batches)
    check(Asked(), workers, sampler=indices, batch_size=SIZE)


def refuse(indices: list[int]) -> Any:
    if 9 in indices:
        raise KeyError(9)
    return indices


READS: dict[str, Callable[[list[int]], Any]] = {
    "dict": lambda at: {"x": torch.tensor(at), "n": len(at)},
    "tuple": lambda at: (torch.tensor(at), torch.tensor(at) % 2),
    "tensor": torch.tensor,
    "array": np.array,
    "text": lambda at: ",".join(map(str, at)),
    "number": sum,
    "fewer": lambda at: [i for i in at if i % 5],
    "more": lambda at: [i for i in at for _ in range(2)],
    "of its batch": lambda at: [(i, len(at)) for i in at],
    "drawn": lambda at: [torch.rand(2).shape for _ in at],
    "refused": refuse,
}


@pytest.mark.parametrize(("kind", "workers"), pairs(READS, "fewer", "refused"))
def test_a_dataset_may_read_batches_itself(kind: str, workers: int | None) -> None:
    data = Table(READS[kind])
    check(data, workers, batch_size=SIZE, drop_last=True)
    some = torchs.Subset(data, range(17))
    check(some, workers, batch_size=SIZE, collate_fn=unchanged)


class Told(torchs.Sampler[int]):
    """Yields what the loop has said last."""

    def __init__(self) -> None:
        self.said = 0

    def __len__(self) -> int:
        return 4 * LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield self.said


def lags(kind: Any, workers: int | None) -> list[int]:
    """Return by how many batches a sampler is ahead of the loop, for each batch."""
    sampler, batches_ahead = Told(), []
    options: Any = {} if workers is None else {"num_workers": workers}
    loader = kind(range(5 * LENGTH), SIZE, sampler=sampler, **options)
    for at, batch in enumerate(loader):
        batches_ahead.append(at - int(batch[-1]))
        sampler.said = at + 1
    if isinstance(loader, ps.DataLoader):
        loader.close()
    return batches_ahead


@pytest.mark.parametrize("workers", WORKERS)
def test_a_sampler_is_asked_no_further_ahead_than_by_torch(workers: int | None) -> None:
    expected = lags(torchs.DataLoader, workers)
    ps.set_enable_autotune(True)
    batches_ahead = lags(ps.DataLoader, workers)
    assert len(batches_ahead) == len(expected)
    assert max(batches_ahead) <= max(expected)
    assert workers is None or batches_ahead == expected


class Sized(torchs.Dataset[Any]):
    """Returns images of a size that the loop may change."""

    size = 2

    def __len__(self) -> int:
        return 4 * LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.size,), index)


def test_a_loop_without_workers_may_change_the_dataset() -> None:
    ps.set_enable_autotune(True)
    dataset = Sized()
    with closing(ps.DataLoader(dataset, SIZE, num_workers=0)) as loader:
        for at, batch in enumerate(loader):
            assert batch.shape == (SIZE, 2 + at)
            dataset.size += 1


class Changing(torchs.Dataset[Any]):
    """Takes long enough for workers to pay, and is changed by the loop."""

    def __init__(self) -> None:
        self.size = 2
        self.options = {"add": [0]}
        self.table = np.zeros(100_000)

    def __len__(self) -> int:
        return 12 * SIZE

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        offset = self.options["add"][0] + self.table[0].item()
        return torch.full((self.size,), index + offset)


def grow(data: Changing, _epoch: int, at: int) -> None:
    data.size += at % 5 == 4


def grow_between_epochs(data: Changing, _epoch: int, at: int) -> None:
    data.size += at == 11


def add(data: Changing, epoch: int, at: int) -> None:
    data.options["add"][0] += (epoch, at) == (1, 6)


def write(data: Changing, epoch: int, at: int) -> None:
    data.table[0] += (epoch, at) == (1, 6)


CHANGES = {"attribute": grow, "epoch": grow_between_epochs, "item": add, "array": write}
FACES: dict[str, Callable[[Changing], Any]] = {
    "loader": lambda data: ps.DataLoader(data, SIZE),
    "pipeline": lambda data: ps.Pipeline.from_dataset(data).batch(SIZE),
    "two stages": lambda data: (
        ps.Pipeline.from_dataset(range(len(data)))
        .map(data.__getitem__)
        .batch(SIZE)
        .map(unchanged)
    ),
}
CHANGED = list(product(FACES, CHANGES))


@pytest.mark.parametrize(
    ("face", "change"),
    [
        pytest.param(*case, marks=() if at % 3 == 0 else pytest.mark.slow)
        for at, case in enumerate(CHANGED)
    ],
)
def test_a_loop_may_change_what_its_samples_come_from(
    face: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(witness, "SHARE", 1e9)

    def seen(make: Callable[[Changing], Any]) -> list[torch.Tensor]:
        data, batches = Changing(), []
        loader = make(data)
        for epoch in range(3):
            for at, batch in enumerate(loader):
                batches.append(batch)
                CHANGES[change](data, epoch, at)
                time.sleep(0.001)
        if not isinstance(loader, torchs.DataLoader):
            loader.close()
        return batches

    expected = seen(lambda data: torchs.DataLoader(data, SIZE))
    ps.set_enable_autotune(True)
    with workers_pay():
        batches = seen(FACES[face])
    assert len(batches) == len(expected)
    assert all(map(torch.equal, batches, expected))


class Spoilt(Changing):
    """Has a sample that cannot be made."""

    def __getitem__(self, index: int) -> Any:
        if index == 6 * SIZE:
            raise LookupError(index)
        return super().__getitem__(index)


def test_an_error_is_not_raised_again_after_a_change_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(witness, "MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(witness, "SHARE", 1e9)
    data, batches, errors = Spoilt(), [], 0
    with workers_pay(), ps.Pipeline.from_dataset(data).batch(SIZE) as pipe:
        loop = iter(pipe)
        while len(batches) < 11:
            try:
                batches.append(next(loop))
            except LookupError:
                errors += 1
                data.size += 1
    assert errors == 1
    sizes = [(int(batch[0, 0]) // SIZE, batch.shape[1]) for batch in batches]
    assert sizes == [(at, 2 + (at > 6)) for at in range(12) if at != 6]


class Keeping(torchs.Dataset[Any]):
    """Keeps what it has read in a list."""

    def __init__(self) -> None:
        self.kept: list[int | None] = [None] * LENGTH

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: int) -> int:
        reads.append(index)
        return index

    def __getitem__(self, index: int) -> int:
        value = self.kept[index]
        if value is None:
            value = self.kept[index] = self.read(index)
        return value


class KeepingByDecorator(Keeping):
    """Keeps it as `functools` does."""

    @cache  # noqa: B019
    def read(self, index: int) -> int:
        reads.append(index)
        return index

    def __getitem__(self, index: int) -> int:
        return self.read(index)


reads: list[int] = []
"""What was read in this process."""


@pytest.mark.parametrize("kind", [Keeping, KeepingByDecorator])
def test_a_dataset_that_keeps_what_it_has_read_reads_it_once(
    kind: type[Keeping],
) -> None:
    reads.clear()
    ps.set_enable_autotune(True)
    with closing(ps.DataLoader(kind(), SIZE)) as loader:
        assert len(list(chain(loader, loader, loader))) == 3 * LENGTH // SIZE
    assert sorted(reads) == list(range(LENGTH))


class Drawing(torchs.Dataset[Any]):
    """Draws from a generator of its own, which it may get only in a worker."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.state.random_sample()


def seed_own(worker: int) -> None:
    worker_info: Any = torchs.get_worker_info()
    worker_info.dataset.state.seed(worker_info.seed % 2**32)


def make_own(worker: int) -> None:
    worker_info: Any = torchs.get_worker_info()
    worker_info.dataset.state = np.random.RandomState(worker_info.seed % 2**32)


@pytest.mark.parametrize(
    ("state", "prepare"),
    [
        pytest.param(np.random.RandomState(0), seed_own),
        pytest.param(None, make_own, marks=pytest.mark.slow),
        pytest.param(np.random.RandomState(0), None, marks=pytest.mark.slow),
    ],
)
def test_a_generator_of_the_data_s_own_draws_as_in_torch_s_workers(
    state: Any, prepare: Any
) -> None:
    check(Drawing(state), 2, batch_size=SIZE, worker_init_fn=prepare)


class Scratch:
    """Decodes into an array that it keeps, where `depth` says."""

    def __init__(self, depth: int) -> None:
        self.kept: Any = np.zeros(16, np.int64)
        for _ in range(depth):
            self.kept = [self.kept]

    def __len__(self) -> int:
        return 2 * LENGTH

    def __getitem__(self, index: int) -> Any:
        array = self.kept
        while isinstance(array, list):
            (array,) = array
        array[:] = index + 1
        time.sleep(0.0005)  # another thread may come between
        return array.copy()

    __call__ = __getitem__


@pytest.mark.parametrize("face", ["dataset", "map", "map of two", "loader"])
@pytest.mark.parametrize("depth", [0, 6])
def test_an_array_that_is_written_again_and_again_is_not_shared(
    face: str, depth: int
) -> None:
    scratch = Scratch(depth)
    numbers = ps.Pipeline.from_dataset(range(len(scratch)))
    faces: dict[str, Callable[[], Any]] = {
        "dataset": lambda: ps.Pipeline.from_dataset(scratch).batch(SIZE),
        "map": lambda: numbers.map(scratch).batch(SIZE),
        "map of two": lambda: numbers.map(scratch, num_parallel_workers=2).batch(SIZE),
        "loader": lambda: ps.DataLoader(scratch, SIZE, sample_seeding=True),  # type: ignore[arg-type]
    }
    ps.set_enable_autotune(True)
    with closing(faces[face]()) as loader:
        rows = torch.cat(list(loader))
    assert torch.equal(rows, torch.arange(1, len(scratch) + 1)[:, None].expand(-1, 16))


def logged(caplog: pytest.LogCaptureFixture) -> str:
    records = caplog.records
    return "\n".join(r.getMessage() for r in records if r.name == "penstock.autotune")


def test_workers_that_are_ruled_out_stay_away_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ps.set_enable_autotune(True)
    caplog.set_level(logging.INFO, "penstock.autotune")
    with closing(ps.DataLoader(range(LENGTH), SIZE, num_workers=0)) as loader:
        assert len([*loader, *loader]) == 2 * LENGTH // SIZE
        reading = loader.stats()
    line = "the program says `num_workers=0`; leave that out to let workers load"
    assert line in logged(caplog)
    assert reading is not None
    assert reading.segments[0].executor == "inline"


def test_the_default_budget_refuses_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    byte_budget = ByteBudget(100, chosen=False)
    byte_budget.check_fits(101, 4)
    byte_budget.check_fits(102, 4)
    assert [r.getMessage()[:33] for r in caplog.records] == [
        "4 samples of one batch need 101 b"
    ]
    byte_budget.resize(100)
    with pytest.raises(ps.BudgetError):
        byte_budget.check_fits(101, 4)


class Children(torchs.Dataset[Any]):
    """Starts a process for each sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_may_start_processes_where_those_of_torch_may(workers: int) -> None:
    check(Children(), workers, batch_size=SIZE)


class Parent(torchs.Dataset[Any]):
    """Returns what multiprocessing says about this process."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        process = multiprocessing.current_process()
        is_child = multiprocessing.parent_process() is not None
        return index, process.daemon, is_child, process.name == "MainProcess"


@pytest.mark.parametrize("workers", [0, 2])
def test_multiprocessing_sees_a_worker_as_one_of_torch(workers: int | None) -> None:
    check(Parent(), workers, batch_size=SIZE)


ENDINGS = """
import atexit, os, sys, torch
from multiprocessing import util
import penstock as ps

TRAINER = os.getpid()

class Opens:
    late = False
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if self.late and os.getpid() != TRAINER:
            self.late = False
            begin(0)
        return index

def begin(number):
    util.Finalize(None, tell, ("finalised",), exitpriority=1)
    atexit.register(tell, "exited")

def tell(what):
    print(what, end=" ", flush=True)

if __name__ == "__main__":
    atexit.register(print, "trainer", flush=True)
    method = sys.argv[1]
    if method == "spawn":
        torch.multiprocessing.set_start_method(method)
    ps.set_enable_autotune(True)
    data = Opens()
    if method == "host":
        data.late = True
        pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=1)
        loader = pipe.batch(8).options(host="process")
    else:
        loader = ps.DataLoader(data, 8, num_workers=1, worker_init_fn=begin)
    assert len(list(loader)) == 8
"""


SPAWN = pytest.mark.slow
"""It starts several interpreters."""


@pytest.mark.parametrize(
    "method", ["default", "host", pytest.param("spawn", marks=SPAWN)]
)
def test_what_a_dataset_starts_in_a_worker_ends_with_it(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDINGS)
    process = warm.run([sys.executable, "-P", str(script), method], timeout=60)
    assert process.returncode == 0, process.stderr
    assert sorted(process.stdout.split()) == ["exited", "finalised", "trainer"]


METHODS = """
import os, sys, torch
import penstock as ps

class Forked:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return "colorsys" in sys.modules

if __name__ == "__main__":
    torch.multiprocessing.set_start_method(sys.argv[1])
    import colorsys  # which only a forked worker has, then
    ps.set_enable_autotune(True)
    for kind in (torch.utils.data.DataLoader, ps.DataLoader):
        loader = kind(Forked(), 8, num_workers=2)
        print({bool(flag) for flags in loader for flag in flags})
    pipe = ps.Pipeline.from_dataset(Forked(), executor="process").batch(8)
    with pipe:
        print({bool(flag) for flags in pipe for flag in flags})
"""


@pytest.mark.parametrize(
    ("method", "seen"),
    [("fork", "True"), pytest.param("spawn", "False", marks=SPAWN)],
)
def test_workers_start_as_the_program_says(
    method: str, seen: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(METHODS)
    process = warm.run([sys.executable, "-P", str(script), method], timeout=100)
    assert process.stdout.splitlines() == [f"{{{seen}}}"] * 3, process.stderr
