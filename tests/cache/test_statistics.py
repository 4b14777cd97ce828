"""Sums over processes, both those that run and those that are gone."""

# ruff: noqa: SLF001 what cannot be brought about from outside is done inside

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.cache.statistics import NBYTES, CacheStatistics, Counters, TierStatistics
from penstock.system.shared_memory import shared_file, titled
from support.forked import End, forked


@pytest.fixture
def shared() -> Iterator[tuple[Counters, str]]:
    title = f"test-{os.urandom(8).hex()}"
    counters = Counters(shared_file(title, NBYTES))
    yield counters, title
    counters.close()


def opened(title: str) -> Counters:
    return Counters(next(titled(title)))


def test_threads_lose_no_count(shared: tuple[Counters, str]) -> None:
    counters, _ = shared

    def work() -> None:
        for _ in range(1000):
            counters.add(misses=1, compute_ns=2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.totals() == CacheStatistics(misses=4000, compute_ns=8000)


def test_processes_count_in_rows_of_their_own(shared: tuple[Counters, str]) -> None:
    counters, title = shared

    def work(end: End) -> None:
        mine = opened(title)
        mine.add(misses=5)
        end.tell(str(mine._start))
        end.hear()

    counters.add(misses=1)
    with forked(work) as one, forked(work) as other:
        rows = {counters._start, int(one.hear()), int(other.hear())}
    assert len(rows) == 3
    assert counters.total("misses") == 11


def test_a_killed_process_leaves_its_counts_and_its_row_to_others(
    shared: tuple[Counters, str],
) -> None:
    counters, title = shared

    def work(end: End) -> None:
        mine = opened(title)
        mine.add(misses=3)
        end.tell(str(mine._start))
        end.hear()

    with forked(work) as child:
        row = int(child.hear())
    heir = opened(title)
    assert heir._start == row
    heir.add(misses=1)
    assert counters.total("misses") == 4
    heir.close()


def test_closing_twice_closes_no_file_of_others() -> None:
    counters = Counters(shared_file("test", NBYTES))
    counters.close()
    other = os.open(os.devnull, os.O_RDONLY)
    counters.close()
    os.fstat(other)
    os.close(other)


@pytest.mark.parametrize(("made_ns", "loses"), [(10_000, True), (50_000, False)])
def test_a_cache_that_finds_samples_more_slowly_than_they_are_made_says_so(
    made_ns: int, *, loses: bool
) -> None:
    tier = TierStatistics("RAM", 400, 400, 4000, 1 << 20, 0, 0.0)
    counts = CacheStatistics(
        misses=100, compute_ns=100 * made_ns, ram_ns=400 * 20_000, tiers=(tier,)
    )
    words = "to find one takes 0.02 ms, and to make one 0.01: without this cache"
    assert (words in counts.line) == loses
    few = replace(counts, misses=99, compute_ns=99 * made_ns)
    assert "without this cache" not in few.line
