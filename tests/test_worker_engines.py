"""An engine in a worker process: what goes wrong there belongs to what caused it."""

from __future__ import annotations

import collections
import dataclasses
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.engine.far import slabs
from penstock.system.resources import effective_cpus
from support.datasets import WORKERS

TRAINER = os.getpid()
TWO: Any = WORKERS["3 processes"]


def outcomes(batches: Iterable[Any]) -> list[Any]:
    """Return each batch as a list, or the type of its error."""
    loop, results = iter(batches), []
    while len(results) < 1000:
        try:
            batch = next(loop)
        except StopIteration:
            return results
        except Exception as error:  # noqa: BLE001 whatever it is
            results.append(type(error))
        else:
            results.append(batch.tolist() if torch.is_tensor(batch) else batch)
    raise AssertionError


def eights(*left_out: int) -> list[Any]:
    """Return batches of eight of 0 to 31, with None for those left out."""
    return [
        None if at in left_out else list(range(8 * at, 8 * at + 8)) for at in range(4)
    ]


def without(results: list[Any], at: int) -> tuple[list[Any], Any]:
    """Return the outcomes with None for one of them, and that one."""
    return [*results[:at], None, *results[at + 1 :]], results[at]


# An iterable has one reader


class Stream:
    """Yields 200 numbers, by a generator or by itself, to a single reader."""

    def __init__(self, *, generator: bool) -> None:
        self._generator, self._at = generator, 0

    def __iter__(self) -> Iterator[int]:
        self._at = 0
        return (index for index in range(200)) if self._generator else self

    def __next__(self) -> int:
        at, self._at = self._at, self._at + 1
        time.sleep(0)  # another thread might read meanwhile
        if at >= 200:
            raise StopIteration
        return at


def as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("generator", [True, False])
@pytest.mark.parametrize("workers", ["2 threads", "16 threads", "3 processes"])
def test_an_iterable_is_read_once_wherever_its_maps_run(
    workers: str, *, generator: bool
) -> None:
    source = ps.Pipeline.from_dataset(Stream(generator=generator))
    pipe = source.map(as_it_is, **WORKERS[workers]).batch(10)
    with pipe.options(host="process") as pipe:
        for _ in range(2):
            rows = [row for batch in pipe for row in batch.tolist()]
            assert rows == list(range(200))


class Killer:
    """An iterable whose item 25 kills the process that reads it."""

    def __iter__(self) -> Iterator[int]:
        for index in range(60):
            if index == 25 and os.getpid() != TRAINER:
                os.kill(os.getpid(), signal.SIGKILL)
            yield index


def test_an_iterable_that_always_kills_its_reader_is_given_up() -> None:
    pipe = ps.Pipeline.from_dataset(Killer()).batch(8).options(host="process")
    with pipe:
        loop = iter(pipe)
        assert [next(loop)[0].item() for _ in range(3)] == [0, 8, 16]
        with pytest.raises(ps.WorkerError, match="died 6 times with no batch in"):
            next(loop)


@dataclasses.dataclass
class Killed:
    """Yields 60 numbers; the first process that gets to 57 dies, once it may."""

    may_die: Path
    died: Path

    def __iter__(self) -> Iterator[int]:
        for index in range(60):
            if index == 57 and not self.died.exists():
                while not self.may_die.exists():
                    time.sleep(0.001)
                self.died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield index


def refuse(number: int) -> int:
    if number % 8 == 4:
        raise ValueError(number)
    return number


def test_a_failed_sample_of_an_iterable_that_is_read_again_counts_once(
    tmp_path: Path,
) -> None:
    data = Killed(tmp_path / "may die", tmp_path / "died")
    seven_of_1000: Any = {"on_error": "substitute", "error_budget": 0.007}
    pipe = ps.Pipeline.from_dataset(data).map(refuse).batch(8, **seven_of_1000)
    with pipe.options(host="process") as pipe:
        loop = iter(pipe)
        rows = next(loop).tolist()
        data.may_die.touch()  # one of each eight has failed, and more than eight came
        rows += [row for batch in loop for row in batch.tolist()]
    assert rows == [row for row in range(60) if row % 8 != 4]
    assert data.died.exists()


# What cannot be sent, or received


class Odd:
    """Holds a number; some cannot be restored in the trainer, or in a worker."""

    def __init__(self, number: int, at: str) -> None:
        self.number, self.at = number, at

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        here = "trainer" if os.getpid() == TRAINER else "worker"
        if state["number"] // 8 == 1 and here == state["at"]:
            raise ValueError("it cannot be restored here")
        vars(self).update(state)


def odd_in_trainer(number: int) -> Odd:
    return Odd(number, "trainer")


def odd_in_worker(number: int) -> Odd:
    return Odd(number, "worker")


def number_of(odd: Odd) -> int:
    return odd.number


def test_samples_that_the_trainer_cannot_restore_fail_their_rows() -> None:
    source = ps.Pipeline.from_dataset(range(32)).map(odd_in_trainer, **TWO)
    with source.map(number_of, **WORKERS["2 threads"]).batch(8) as pipe:
        assert without(outcomes(pipe), 1) == (eights(1), ValueError)


def test_samples_that_a_worker_cannot_restore_fail_their_rows() -> None:
    source = ps.Pipeline.from_dataset(range(32), executor="inline")
    odd = source.map(odd_in_worker, executor="inline")
    with odd.map(number_of, **TWO).batch(8) as pipe:
        assert without(outcomes(pipe), 1) == (eights(1), ValueError)


@pytest.mark.parametrize("at", ["trainer", "worker"])
def test_whole_batches_that_cannot_be_restored_fail_alone(at: str) -> None:
    def odd(batch: torch.Tensor) -> Odd:
        return Odd(int(batch[0]), at)

    def back(odd: Odd) -> int:
        return odd.number

    source = ps.Pipeline.from_dataset(range(32), executor="inline").batch(8)
    if at == "trainer":
        pipe = source.map(odd, **TWO).map(back, executor="inline")
    else:
        pipe = source.map(odd, executor="inline").map(back, **TWO)
    with pipe:
        results = outcomes(pipe)
    assert results == [0, ValueError, 16, 24]


class Local:
    """Samples are named tuples of a class that pickle does not find."""

    def __init__(self) -> None:
        self.kind = collections.namedtuple("Hidden", "a b")  # noqa: PYI024 made at run time

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return self.kind(torch.full((4,), index), index)


def test_a_batch_of_a_class_that_pickle_does_not_find_is_a_readable_error() -> None:
    with ps.Pipeline.from_dataset(Local(), **TWO).batch(8) as pipe:
        loop = iter(pipe)
        for _ in range(4):
            with pytest.raises(ps.SampleError, match="cannot be sent to the trainer"):
                next(loop)


# Deaths, and what stands for them


def crash(samples: list[int]) -> Any:
    """Make a batch that kills its process while it is packed, if 8 is in it."""

    class Deadly:
        def __reduce__(self) -> Any:
            if os.getpid() != TRAINER:
                os.kill(os.getpid(), signal.SIGKILL)
            return int, ()

    return Deadly() if 8 in samples else list(samples)


def test_a_batch_that_kills_whoever_packs_it_is_collated_by_the_trainer() -> None:
    pipe = ps.Pipeline.from_dataset(range(32), **TWO).batch(8, collate_fn=crash)
    with pipe:
        batches = list(pipe)
    assert [*batches[:1], *batches[2:]] == [batch for batch in eights(1) if batch]
    assert type(batches[1]).__name__ == "Deadly"


def interrupts(sample: int) -> int:
    if sample == 9:
        raise KeyboardInterrupt("mine")
    return sample


def test_an_interrupt_raised_by_a_sample_fails_its_batch_alone() -> None:
    with ps.Pipeline.from_dataset(range(32)).map(interrupts, **TWO).batch(8) as pipe:
        results, error = without(outcomes(pipe), 1)
    assert results == eights(1)
    assert issubclass(error, ps.WorkerError)


# Limits of time


def slow(sample: int) -> int:
    time.sleep(0.3)
    return sample


async def waits(sample: int) -> int:
    import asyncio

    await asyncio.sleep(0.1)
    return sample


def test_a_limit_of_time_holds_for_its_own_stage() -> None:
    quick = ps.Pipeline.from_dataset(range(8)).map(as_it_is, **TWO, timeout=0.15)
    with quick.map(slow, **TWO).batch(4) as pipe:
        assert outcomes(pipe) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_coroutines_keep_their_own_limit_of_time_in_another_process() -> None:
    pipe = ps.Pipeline.from_dataset(range(16))
    awaited = pipe.map(waits, num_parallel_workers=2, timeout=0.5).batch(16)
    with awaited.options(host="process") as pipe:
        assert outcomes(pipe) == [list(range(16))]


# Ends


class Begun:
    """Notes which samples were begun, and which were finished, in a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        self._note("begun")
        time.sleep(0.02)
        self._note("ended")
        return index

    def _note(self, what: str) -> None:
        with open(self._path, "a") as file:
            file.write(f"{what}\n")


def test_closing_lets_workers_finish_their_samples(tmp_path: Any) -> None:
    noted = tmp_path / "noted"
    pipe = ps.Pipeline.from_dataset(Begun(str(noted)), **TWO).batch(64)
    with pipe:
        next(iter(pipe))
    lines = noted.read_text().split()
    assert lines.count("begun") == lines.count("ended")


# Places


def place(sample: Any) -> tuple[Any, bool]:
    return sample, os.getpid() == TRAINER


def test_a_stage_that_the_user_placed_in_the_trainer_stays_there() -> None:
    source = ps.Pipeline.from_dataset(range(8), executor="inline")
    inline = source.map(place, executor="inline")
    with inline.map(place, **TWO).batch(8, collate_fn=list) as pipe:
        (batch,) = pipe
    assert {(first, second) for (_, first), second in batch} == {(True, False)}
    beside = ps.Pipeline.from_dataset(range(8)).map(place, executor="thread")
    with beside.map(place, **TWO).batch(8, collate_fn=list) as pipe:
        (batch,) = pipe
    assert {(first, second) for (_, first), second in batch} == {(False, False)}


def test_a_map_of_a_shared_batch_runs_in_the_loop_and_draws_nothing_of_its() -> None:
    import random

    threads, draws = [], []

    def mixed(batch: torch.Tensor) -> torch.Tensor:
        threads.append((os.getpid(), threading.current_thread().name))
        draws.append(random.random())
        return batch

    pipe = ps.Pipeline.from_dataset(range(64)).batch(16).map(mixed)
    random.seed(3)
    with pipe.options(host="process") as pipe:
        assert [batch[0].item() for batch in pipe] == [0, 16, 32, 48]
    drawn = random.random()
    random.seed(3)
    assert drawn == random.random()
    assert {name for pid, name in threads if pid == TRAINER} <= {"MainThread"}
    assert drawn not in draws  # no stream is drawn twice
    assert len(set(draws)) == len(draws)


# Memory


def test_a_layout_is_known_although_its_first_batch_could_not_be_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, refusals = slabs.map_shared, [1]

    def refused_once(*arguments: Any) -> Any:
        if refusals:
            refusals.pop()
            raise OSError(12, "no memory")
        return real(*arguments)

    monkeypatch.setattr(slabs, "map_shared", refused_once)
    with ps.Pipeline.from_dataset(range(64), **TWO).batch(8) as pipe:
        results = outcomes(pipe)
    assert sum(result is OSError for result in results) <= 1
    rows = [list(range(8 * at, 8 * at + 8)) for at in range(8)]
    assert all(
        result in (OSError, row) for result, row in zip(results, rows, strict=True)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
def test_shares_of_workers_change_while_batches_are_made() -> None:
    ps.set_cpu_budget(1)  # so that one process has all workers
    pipe = ps.Pipeline.from_dataset(range(4000), thread_safe=True, **TWO).batch(8)
    with pipe:
        loop, numbers = iter(pipe), []
        run = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
        assert run is not None
        (knob,) = (k for k in run.knobs() if k.name == "num_parallel_workers")
        for at, batch in enumerate(loop):
            if at % 20 == 0:
                knob.set(1 + at // 20 % 4)
            numbers += batch.tolist()
    assert numbers == list(range(4000))


def page_faults(_: int) -> int:
    """Make and drop a megabyte; return how many pages this process was given so far."""
    bytes(bytearray(1 << 20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
def test_memory_that_a_sample_frees_serves_the_next_one() -> None:
    one: Any = {"executor": "process", "num_parallel_workers": 1}
    pipe = ps.Pipeline.from_dataset(range(400)).map(page_faults, **one)
    with pipe.batch(8) as pipe:
        faults = torch.cat(list(pipe))
    new = faults[-200:].diff()
    assert new.float().mean() < 100, "a megabyte has 256 pages"


class Readers:
    """Each sample knows how many were read at the same time in its process."""

    lock, count = threading.Lock(), 0

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[int, int]:
        with Readers.lock:
            Readers.count += 1
            count = Readers.count
        time.sleep(0.005)
        with Readers.lock:
            Readers.count -= 1
        return index, count


def twice(sample: tuple[int, int]) -> tuple[int, int]:
    index, count = sample
    return 2 * index, count


def test_a_stage_of_many_threads_keeps_them_before_one_of_few_processes() -> None:
    source = ps.Pipeline.from_dataset(
        Readers(), executor="thread", num_parallel_workers=24, thread_safe=True
    )
    pipe = source.map(twice, executor="process", num_parallel_workers=2)
    with pipe.batch(16) as batches:
        pairs = list(batches)
        (segment,) = batches.stats().segments
    assert torch.cat([rows for rows, _ in pairs]).tolist() == list(range(0, 1280, 2))
    threads = 24 // min(2, round(effective_cpus()))  # on one core, one process has all
    assert threads // 2 < max(int(counts.max()) for _, counts in pairs) <= threads
    assert segment.num_parallel_workers == 2
    read, mapped, *_ = segment.parts
    assert segment.run_s_per_row < read.run_s_per_row > mapped.run_s_per_row


class Own(Readers):
    """Must not be shared among threads."""


@pytest.mark.parametrize(
    "reading", [{"executor": "thread", "thread_safe": False}, {"thread_safe": True}]
)
def test_threads_that_nobody_asked_for_or_that_may_not_share_stay_one(
    reading: Any,
) -> None:
    ps.set_num_parallel_workers(8)
    if reading.get("executor"):
        reading = {**reading, "num_parallel_workers": 8}
    source = ps.Pipeline.from_dataset(Own(), **reading).take(64)
    pipe = source.map(twice, executor="process", num_parallel_workers=1)
    with pipe.batch(16) as batches:
        assert {int(count) for _, counts in batches for count in counts} == {1}
