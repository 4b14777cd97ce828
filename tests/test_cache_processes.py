"""All processes of a host share one cache, and none of it outlives them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cache.cache import COMPARED, REPEATED
from support.cached_data import (
    EXECUTORS,
    SHARED,
    TIERS,
    Noted,
    cached,
    ran,
    ran_by_several,
    spawned,
    statistics,
    tiers,
    two_epochs,
)
from support.functions import BadSample, digest, fails_on

pytestmark = pytest.mark.usefixtures("own_runtime_folder", "warm_interpreters")

INLINE = EXECUTORS["inline"]
PROCESSES = EXECUTORS["4 process"]
LENGTH = 40


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    log = tmp_path_factory.mktemp("plain") / "log"
    return two_epochs(cached(log, INLINE, None))


def most_reads(workers: int, length: int = LENGTH) -> int:
    """Return the most reads: each sample once, a few twice, and one more a worker.

    Before that, a child process may look at two samples, to find what threads must not
    share.
    """
    return length + REPEATED + workers + 2


# However the processes start


@pytest.mark.parametrize(
    ("method", "executor"),
    [
        ("fork", "4 process"),
        ("forkserver", "4 process"),
        pytest.param("spawn", "4 process", marks=pytest.mark.slow),  # each loads torch
    ],
)
def test_processes_share_one_cache_however_they_start(
    method: Any, executor: str, expected: str, log: Path, tmp_path: Path
) -> None:
    pipe = cached(log, EXECUTORS[executor], tiers("both", tmp_path / "disk"))
    with pipe.options(multiprocessing_context=method) as chosen:
        assert digest([*chosen, *chosen]) == expected
        assert statistics(chosen).misses == LENGTH
    reads = Noted(LENGTH, log).reads()
    assert len(reads) == LENGTH
    assert reads.total() <= most_reads(4)


@pytest.mark.parametrize(
    ("which", "executor"),
    [
        ("disk", "inline"),
        ("both", "4 thread"),
        ("RAM", "4 process"),
        ("both", "4 async"),
    ],
)
def test_an_engine_in_its_own_process_uses_the_same_cache(
    which: str, executor: str, expected: str, log: Path, tmp_path: Path
) -> None:
    pipe = cached(log, EXECUTORS[executor], tiers(which, tmp_path / "disk"))
    with pipe.options(host="process") as hosted:
        assert digest([*hosted, *hosted]) == expected
        assert statistics(hosted).misses == LENGTH
    assert Noted(LENGTH, log).reads().total() <= most_reads(4)


@pytest.mark.parametrize("which", ["RAM", pytest.param("both", marks=pytest.mark.slow)])
def test_processes_that_end_with_their_epoch_leave_their_records(
    which: str, expected: str, log: Path, tmp_path: Path
) -> None:
    pipe = cached(log, PROCESSES, tiers(which, tmp_path / "disk"))
    with pipe.options(persistent_workers=False) as chosen:
        assert digest([*chosen, *chosen]) == expected
        assert statistics(chosen).misses == LENGTH
        assert statistics(chosen).hits == LENGTH


# Other processes of the host


def test_a_new_process_finds_the_records_on_disk(log: Path, tmp_path: Path) -> None:
    with cached(log, INLINE, {"disk": tmp_path / "disk"}) as pipe:
        expected = digest(pipe)
    before = Noted(LENGTH, log).reads().total()
    outcome = spawned(ran, log, INLINE, {"disk": tmp_path / "disk"})
    assert outcome.digest == expected
    assert (outcome.hits, outcome.misses) == (LENGTH, 0)
    assert Noted(LENGTH, log).reads().total() - before == COMPARED  # for comparison


def test_records_in_ram_end_with_their_process(log: Path) -> None:
    first = spawned(ran, log, INLINE, {"ram": "1MB"})
    assert ran(log, INLINE, {"ram": "1MB"}) == first
    assert (first.hits, first.misses) == (0, LENGTH)


@pytest.mark.parametrize(
    "which", ["RAM", "both", pytest.param("disk", marks=pytest.mark.slow)]
)
def test_three_processes_on_a_cold_cache_compute_each_sample_once(
    which: str, log: Path, tmp_path: Path
) -> None:
    settings = tiers(which, tmp_path / "disk")
    outcomes = spawned(ran_by_several, 3, log, EXECUTORS["1 thread"], settings)
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert sum(outcome.misses for outcome in outcomes) == SHARED
    assert sum(outcome.hits for outcome in outcomes) >= 2 * SHARED
    reads = Noted(SHARED, log).reads()
    assert len(reads) == SHARED
    # a process that finds records of another run compares some
    assert reads.total() <= most_reads(3, SHARED) + 2 * (REPEATED + COMPARED)


# Nothing stays behind: the fixture around every test checks it


def leave(pipe: ps.Pipeline) -> None:
    for _ in pipe:
        break


def drop(pipe: ps.Pipeline) -> None:
    iterator = iter(pipe)
    next(iterator)
    del iterator


def close(pipe: ps.Pipeline) -> None:
    iterator = iter(pipe)
    next(iterator)
    pipe.close()


def interrupt(pipe: ps.Pipeline) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        for _ in pipe:
            raise KeyboardInterrupt


ENDS: Mapping[str, Callable[[ps.Pipeline], None]] = {
    "break": leave,
    "dropped": drop,
    "closed": close,
    "interrupted": interrupt,
}


def early_ends() -> list[Any]:
    """Return all cases (host, executor, end), most of them for `make test-all`."""
    few = {
        *(("trainer", "4 thread", end) for end in ENDS),
        ("trainer", "inline", "dropped"),
        ("trainer", "4 process", "break"),
        ("trainer", "4 process", "interrupted"),
        ("trainer", "4 async", "closed"),
    }
    kinds = ("inline", "4 thread", "4 process", "4 async")
    return [
        pytest.param(*case, marks=() if case in few else pytest.mark.slow)
        for case in product(("trainer", "process"), kinds, ENDS)
    ]


@pytest.mark.parametrize(("host", "executor", "end"), early_ends())
def test_a_loop_that_ends_early_leaves_nothing_behind(
    host: Any, executor: str, end: str, log: Path, tmp_path: Path
) -> None:
    settings = tiers("both", tmp_path / "disk")
    pipe = cached(log, EXECUTORS[executor], settings).options(host=host)
    ENDS[end](pipe)
    del pipe
    gc.collect()


@pytest.mark.parametrize("executor", ["inline", "4 thread", "4 process"])
def test_an_exception_before_the_cache_leaves_nothing_behind(
    executor: str, log: Path, tmp_path: Path
) -> None:
    kind = EXECUTORS[executor]
    pipe = ps.Pipeline.from_dataset(Noted(LENGTH, log), **kind)
    pipe = pipe.map(fails_on(21), **kind).cache(ram="1MB", disk=tmp_path).batch(8)
    with pipe, pytest.raises(BadSample):
        list(pipe)


def test_pipelines_that_never_run_hold_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        pipe = ps.Pipeline.from_dataset(range(9)).cache(ram="1GB", disk=tmp_path / "d")
        assert len(pipe.batch(3)) == 3
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
@pytest.mark.parametrize("which", TIERS)
def test_many_runs_over_many_processes_compute_each_sample_once(
    which: str, tmp_path: Path
) -> None:
    for run in range(5):
        log, settings = tmp_path / f"log{run}", tiers(which, tmp_path / f"disk{run}")
        outcomes = spawned(ran_by_several, 8, log, EXECUTORS["4 thread"], settings)
        assert len({outcome.digest for outcome in outcomes}) == 1
        assert sum(outcome.misses for outcome in outcomes) == SHARED
        assert len(Noted(SHARED, log).reads()) == SHARED
