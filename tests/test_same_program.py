"""A tuned loader gives the right data where torch without workers does."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import penstock as ps
from penstock.engine.far import rehearsal
from penstock.engine.witness.witness import Witness
from support.moves import workers_pay
from support.short_epochs import LENGTH, samples

RECORD = 64


def give_way() -> None:
    """Let another thread or process come between."""
    time.sleep(0.0001)


class Records:
    """Reads records of one file, through a handle that it keeps."""

    def __init__(self, folder: Path, *, buffered: bool) -> None:
        path = folder / "records.bin"
        rows = np.arange(LENGTH, dtype=np.int64).repeat(RECORD // 8)
        if not path.exists():
            path.write_bytes(rows.tobytes())
        self.file = path.open("rb", buffering=-1 if buffered else 0)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        self.file.seek(index * RECORD)
        give_way()
        return int(np.frombuffer(self.file.read(RECORD), np.int64)[-1])


class Zipped(Records):
    """Reads the same from an archive."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, buffered=True)
        self.file.close()
        path = folder / "records.zip"
        if not path.exists():
            with zipfile.ZipFile(path, "w") as archive:
                for index in range(LENGTH):
                    archive.writestr(str(index), str(index))
        self.archive = zipfile.ZipFile(path)

    def __getitem__(self, index: int) -> int:
        give_way()
        return int(self.archive.read(str(index)))


class BareDescriptor(Records):
    """Reads through a descriptor, which is only a number."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, buffered=False)
        self.number = os.dup(self.file.fileno())
        self.file.close()

    def __getitem__(self, index: int) -> int:
        os.lseek(self.number, index * RECORD, os.SEEK_SET)
        give_way()
        return int(np.frombuffer(os.read(self.number, RECORD), np.int64)[-1])

    def __del__(self) -> None:
        os.close(self.number)


class OwnStream:
    """Draws from a generator of its own, in the order of the calls."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.generator = make()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        give_way()
        if isinstance(self.generator, torch.Generator):
            return float(torch.rand((), generator=self.generator))
        return float(self.generator.random())


class Counting:
    """Counts its calls, and keeps the samples that it made."""

    def __init__(self) -> None:
        self.kept: dict[int, int] = {}
        self.calls = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        give_way()
        self.calls += 1
        self.kept.setdefault(index, self.calls)
        return self.kept[index], self.calls


class OpensLate:
    """Makes a dataset when it is first read; no two threads may read at once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.inner: Any = None
        self.reading = threading.Lock()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self.inner is None:
            self.inner = self.make()
        assert self.reading.acquire(blocking=False), "read by two threads at once"
        try:
            give_way()
            return self.inner[index], os.getpid()
        finally:
            self.reading.release()


class BeginsDamaged(OpensLate):
    """Cannot make its first samples, and opens nothing for them."""

    def __init__(self, make: Callable[[], Any], damaged: int) -> None:
        super().__init__(make)
        self.damaged = damaged

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index < self.damaged:
            raise ValueError(index)
        return super().__getitem__(index)


class OutOfSight(Records):
    """Opens its file at first use, and holds it where no search finds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, buffered=False)
        self.file.close()
        self.opened = functools.cache(partial(open, self.file.name, "rb", buffering=0))
        self.reading = threading.Lock()

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        assert self.reading.acquire(blocking=False), "read by two threads at once"
        try:
            file = self.opened()
            file.seek(index * RECORD)
            give_way()
            return int(np.frombuffer(file.read(RECORD), np.int64)[-1]), os.getpid()
        finally:
            self.reading.release()


DATASETS: dict[str, Callable[[Path], Any]] = {
    "a file": lambda folder: Records(folder, buffered=True),
    "a raw file": lambda folder: Records(folder, buffered=False),
    "a bare descriptor": BareDescriptor,
    "an archive": Zipped,
    "a file out of sight": OutOfSight,
    "numpy's generator": lambda _: OwnStream(lambda: np.random.default_rng(0)),
    "Python's generator": lambda _: OwnStream(lambda: random.Random(0)),
    "torch's generator": lambda _: OwnStream(lambda: torch.Generator().manual_seed(0)),
    "a counter and a cache": lambda _: Counting(),
}


@pytest.fixture(autouse=True)
def _tuned() -> Iterator[None]:
    ps.set_enable_autotune(True)
    with workers_pay():
        yield


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # the user's datasets leave handles open
@pytest.mark.parametrize("what", DATASETS)
def test_without_requested_workers_a_loader_gives_what_torch_gives(
    what: str, tmp_path: Path
) -> None:
    expected, ours = (
        samples(
            Loader(
                DATASETS[what](tmp_path),
                batch_size=8,
                shuffle=True,
                generator=torch.Generator().manual_seed(3),
            )
        )
        for Loader in (torch.utils.data.DataLoader, ps.DataLoader)
    )
    assert ours == expected


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", DATASETS)
def test_a_pipeline_gives_the_same(what: str, tmp_path: Path) -> None:
    expected = samples(
        torch.utils.data.DataLoader(DATASETS[what](tmp_path), batch_size=8)
    )
    with ps.Pipeline.from_dataset(DATASETS[what](tmp_path)).batch(8) as pipe:
        assert samples(pipe) == expected


OPENED = ("a file", "a raw file", "a bare descriptor", "an archive")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", OPENED)
def test_several_workers_each_open_a_file(what: str, tmp_path: Path) -> None:
    DATASETS[what](tmp_path)  # its file is there
    data = OpensLate(lambda: DATASETS[what](tmp_path))
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=2)
    pids: set[int] = set()
    with pipe.batch(8) as pipe:
        while len(pids) < 2:  # the other may still be starting
            pairs = samples(pipe)
            assert [row for row, _ in pairs] == 2 * [*range(LENGTH)]
            pids |= {pid for _, pid in pairs}
            assert os.getpid() not in pids
    assert data.inner is None


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("damaged", [1, 9])
def test_samples_that_fail_do_not_hide_a_file_that_opens_late(
    damaged: int, tmp_path: Path
) -> None:
    data = BeginsDamaged(lambda: Records(tmp_path, buffered=True), damaged)
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=4)
    budget = damaged / LENGTH
    with pipe.batch(LENGTH, on_error="substitute", error_budget=budget) as pipe:
        rows = [row for row, _ in samples(pipe)]
    assert rows[damaged:LENGTH] == [*range(damaged, LENGTH)]
    assert rows[LENGTH + damaged :] == [*range(damaged, LENGTH)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("cpus", [1, 2])
def test_several_workers_each_open_a_file_that_no_search_finds(
    cpus: int, tmp_path: Path
) -> None:
    ps.set_cpu_budget(cpus)  # with one, one process carries the leases of all
    pipe = ps.Pipeline.from_dataset(OutOfSight(tmp_path), num_parallel_workers=2)
    with pipe.batch(8) as pipe:
        pairs = samples(pipe)
    assert [row for row, _ in pairs] == 2 * [*range(LENGTH)]
    assert os.getpid() not in {pid for _, pid in pairs}


class KeepsLast:
    """Reads rows in groups, and keeps the group that it read last."""

    def __init__(self) -> None:
        self.kept: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        number, offset = divmod(index, 4)
        if self.kept[0] != number:
            self.kept = number, [*range(4 * number, 4 * number + 4)]
        give_way()
        return self.kept[1][offset], os.getpid()


@pytest.mark.parametrize(("executor", "cpus"), [("auto", 1), ("process", 2)])
def test_several_workers_each_keep_what_they_read_last(
    executor: Any, cpus: int
) -> None:
    ps.set_cpu_budget(cpus)  # with one, one process carries the leases of all
    data = KeepsLast()
    data[0]  # the first sample finds its group already read
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=4, executor=executor)
    with pipe.batch(8) as pipe:
        pairs = samples(pipe)
    assert [row for row, _ in pairs] == 2 * [*range(LENGTH)]
    assert os.getpid() not in {pid for _, pid in pairs}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_several_workers_each_open_a_file_for_a_function(tmp_path: Path) -> None:
    Records(tmp_path, buffered=False)  # its file is there
    read = OpensLate(lambda: Records(tmp_path, buffered=False)).__getitem__
    pipe = ps.Pipeline.from_dataset(range(LENGTH)).map(read, num_parallel_workers=2)
    with pipe.batch(8) as pipe:
        pairs = samples(pipe)
    assert [row for row, _ in pairs] == 2 * [*range(LENGTH)]
    assert os.getpid() not in {pid for _, pid in pairs}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("executor", ["auto", "process"])
def test_threads_of_a_worker_process_do_not_share_a_file_it_opens_late(
    executor: Any, tmp_path: Path
) -> None:
    ps.set_cpu_budget(1)  # so one process carries the leases of all workers
    data = OpensLate(lambda: Records(tmp_path, buffered=True))
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=6, executor=executor)
    with pipe.batch(8) as pipe:
        assert [row for row, _ in samples(pipe)] == 2 * [*range(LENGTH)]


class HeldUp:
    """Waits forever in any process but this one."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if os.getpid() != self.home:
            threading.Event().wait()
        return index


def test_a_trial_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearsal, "WAIT_S", 0.1)
    pipe = ps.Pipeline.from_dataset(HeldUp(), num_parallel_workers=2)
    with pipe.batch(8) as pipe:
        assert [row for (row,) in samples(pipe)] == 2 * [*range(LENGTH)]


class StartsLate:
    """Starts a process at its first sample, and notes its pid in a file."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.helper: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if self.helper is None:
            wait = threading.Event().wait
            context = multiprocessing.get_context("fork")
            self.helper = context.Process(target=wait, daemon=True)
            self.helper.start()
            with self.notes.open("a") as file:
                file.write(f"{self.helper.pid}\n")
        return index


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_trial_leaves_a_process_behind_or_moves_what_starts_one(
    tmp_path: Path,
) -> None:
    data = StartsLate(tmp_path / "pids")
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=2)
    try:
        with pipe.batch(8) as pipe:
            assert [row for (row,) in samples(pipe)] == 2 * [*range(LENGTH)]
        assert data.notes.read_text().split() == [str(data.helper.pid)]
    finally:
        for pid in data.notes.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        data.helper.join()


class OfQueue:
    """Takes the next item of a queue that processes share."""

    def __init__(self) -> None:
        self.queue: Any = multiprocessing.get_context("fork").SimpleQueue()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return self.queue.get()  # type: ignore[no-any-return]


def test_no_item_of_a_shared_queue_is_lost_to_a_discarded_sample() -> None:
    data = OfQueue()
    for number in range(3 * LENGTH):
        data.queue.put(number)
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=2).batch(8)
    with pipe.options(persistent_workers=False) as pipe:
        assert sorted(row for (row,) in samples(pipe)) == [*range(2 * LENGTH)]


@pytest.mark.parametrize("make", [w for w in DATASETS if "generator" in w])
def test_only_one_thread_draws_from_a_generator_made_late(
    make: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = OpensLate(lambda: DATASETS[make](tmp_path))
    pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=2)
    with pipe.batch(8) as pipe:
        rows = [row for row, _ in samples(pipe)]
    assert len(set(rows)) == 2 * LENGTH
    assert "one thread works" in caplog.text


EACH_ITS_OWN = "a file out of sight"
"""Each worker process opens this file."""


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("what", [w for w in DATASETS if w != EACH_ITS_OWN])
def test_a_single_requested_worker_stays_alone_on_data_with_one_position(
    what: str, tmp_path: Path
) -> None:
    data = DATASETS[what](tmp_path)
    face: Any
    if what == "a file":
        face = ps.DataLoader(data, batch_size=8, num_workers=1)
    else:
        alone = {"num_parallel_workers": 1, "executor": "process"}
        face = ps.Pipeline.from_dataset(data, **alone).batch(8)
    next(batches := iter(face))
    knobs = {knob.name: knob for knob in face._slot.run.knobs()}  # noqa: SLF001
    assert knobs["num_parallel_workers"].upper == 1
    del batches
    face.close()
    for handle in vars(data).values():
        if hasattr(handle, "close"):
            handle.close()


class Reusing:
    """Collates into one buffer, as torch allows with no workers."""

    def __init__(self) -> None:
        self.out = torch.empty(8, dtype=torch.int64)
        self.running = threading.Lock()

    def __call__(self, rows: list[int]) -> torch.Tensor:
        assert self.running.acquire(blocking=False), "called by two threads at once"
        try:
            return self.out.copy_(torch.tensor(rows))
        finally:
            self.running.release()


class Slow:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        give_way()
        return index


def test_a_collate_fn_may_reuse_its_buffer_for_the_next_batch() -> None:
    loader = ps.DataLoader(Slow(), batch_size=8, collate_fn=Reusing())
    rows = [row for batch in loader for row in batch.tolist()]
    assert rows == list(range(LENGTH))


def masked(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows), torch.rand(len(rows))


def unmasked(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows), torch.zeros(len(rows))


def masks(loader: Any, pauses: Iterator[float]) -> tuple[list[float], list[float]]:
    """Return an epoch's masks, and what the trainer draws meanwhile."""
    torch.manual_seed(0)
    values, own = [], []
    for _, mask in loader:
        values += mask.tolist()
        own.append(float(torch.rand(())))
        time.sleep(next(pauses))
    return values, own


def uneven(seed: int) -> Iterator[float]:
    dice = random.Random(seed)
    return iter(lambda: dice.choice([0.0, 0.001]), None)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}])
def test_draws_in_a_collate_fn_are_repeatable_and_separate_from_the_trainers(
    settings: dict[str, Any],
) -> None:
    def loader(collate: Any = masked) -> Any:
        return ps.DataLoader(Slow(), 8, collate_fn=collate, **settings)

    first, again = masks(loader(), uneven(1)), masks(loader(), uneven(2))
    assert first == again
    assert len(set(first[0])) == LENGTH
    _, undisturbed = masks(loader(unmasked), uneven(1))
    assert first[1] == undisturbed


def test_a_collate_fn_draws_from_torchs_seed_and_resumes_from_a_state() -> None:
    def epoch(state: Any = None) -> list[Any]:
        loader = ps.DataLoader(Slow(), 8, collate_fn=masked)
        loader.load_state_dict(state or {})
        return [(mask.tolist(), loader.state_dict()) for _, mask in loader]

    torch.manual_seed(1)
    first, second = epoch(), epoch()
    torch.manual_seed(1)
    again = epoch()
    torch.manual_seed(2)
    rest = epoch(first[4][1])
    assert [mask for mask, _ in again] == [mask for mask, _ in first]
    assert [mask for mask, _ in rest] == [mask for mask, _ in first[5:]]
    assert not {mask[0] for mask, _ in first} & {mask[0] for mask, _ in second}


class Late:
    """Draws from the global generators in one sample of a hundred."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(())) if index % 100 == 99 else float(index)


def test_rare_draws_are_the_same_for_any_number_of_workers() -> None:
    outcomes = []
    several: dict[str, Any] = {"num_workers": 2}
    for settings in ({}, several):
        torch.manual_seed(1)
        loader = ps.DataLoader(Late(), batch_size=4, **settings)
        outcomes.append([samples(loader), float(torch.rand(()))])
    assert outcomes[0] == outcomes[1]


class FromQueue(torch.utils.data.IterableDataset[int]):
    """Workers take the next number from one queue."""

    def __init__(self) -> None:
        self.numbers = multiprocessing.SimpleQueue()
        for number in [*range(LENGTH), None, None]:
            self.numbers.put(number)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.get, None)


class ByArgument(torch.utils.data.IterableDataset[int]):
    """Gets its share only from the argument of a `worker_init_fn`."""

    first, step = 0, 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, LENGTH, self.step))


def take_share(number: int) -> None:
    ByArgument.first, ByArgument.step = number, 2


@pytest.mark.parametrize("data", [FromQueue, ByArgument])
def test_an_iterable_that_shares_its_samples_among_workers_loses_none(
    data: Any,
) -> None:
    init = take_share if data is ByArgument else None
    loader = ps.DataLoader(data(), 4, num_workers=2, worker_init_fn=init)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(LENGTH))


class Nested:
    def __init__(self, layout: torch.layout) -> None:
        self.layout = layout

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        parts = [torch.full((index + 1,), 1.0), torch.full((2,), float(index))]
        return torch.nested.nested_tensor(parts, layout=self.layout)


# One test: torch's first jagged tensor imports a thousand modules.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_as_by_torch_or_passed_unchanged() -> None:
    for layout, workers in product((torch.strided, torch.jagged), (0, 1)):
        with pytest.raises(RuntimeError, match="provide a custom collate_fn"):
            list(ps.DataLoader(Nested(layout), 2, num_workers=workers))
        loader = ps.DataLoader(Nested(layout), 2, num_workers=workers, collate_fn=list)
        rows = [[part.tolist() for part in row] for batch in loader for row in batch]
        assert rows == [[[1.0] * (at + 1), [at, at]] for at in range(6)]


def test_a_snapshot_shows_what_has_changed() -> None:
    data = Counting()
    witness = Witness([data])
    assert witness.changed() is None
    data[0]
    assert witness.changed() in (".kept", ".calls")
    data.calls = float("nan")  # type: ignore[assignment]
    assert Witness([data]).changed() is None
    data.calls = 0
    subset = torch.utils.data.Subset(data, [0, 1])  # type: ignore[arg-type]
    witness = Witness([subset])
    subset[1]
    assert witness.changed() in (".dataset.kept", ".dataset.calls")


def windows(rows: Any) -> Any:
    return np.lib.stride_tricks.sliding_window_view(rows, 60_000)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda rows: rows,
    "windows": windows,
    "reversed": lambda rows: rows[::-1],
    "every other": lambda rows: rows[5::-2],
    "broadcast": lambda rows: np.broadcast_to(rows, (1000, len(rows))),
    "columns": lambda rows: rows.reshape(4, -1).T,
    "tensor": torch.from_numpy,
    "a tensor's array": lambda rows: torch.from_numpy(rows).flip(0).numpy(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_only_the_memory_of_an_array_is_read_to_compare_it(view: str) -> None:
    """The windows count 60,000 times as many bytes as there are."""
    rows = np.zeros(120_000)
    things = [{"array": VIEWS[view](rows)}]
    witness = Witness(things)
    assert witness.changed() is None
    np.copyto(rows, 1)
    shared = view != "a tensor's array"  # which is a copy
    assert witness.changed() == ("['array']" if shared else None)


@torch.inference_mode()
def test_a_tensor_that_counts_no_writes_is_compared_by_its_contents() -> None:
    things = [[torch.zeros(3)]]
    witness = Witness(things)
    assert witness.changed() is None
    things[0][0] += 1
    assert witness.changed() == "[0]"


def test_arrays_without_memory_here_are_compared_by_identity(tmp_path: Path) -> None:
    np.zeros(9000).tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.float64, "r")
    things = [[mapped, mapped[3:], np.zeros((0, 3)), torch.zeros(2, device="meta")]]
    assert Witness(things).changed() is None
