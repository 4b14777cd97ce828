"""Each sample is found, computed or compared, and nobody is left waiting."""

# ruff: noqa: SLF001 what cannot be brought about from outside is done inside

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cache import cache as module
from penstock.cache import folder as folder_module
from penstock.cache.cache import (
    COMPARED,
    REPEATED,
    Cache,
    Here,
    RandomUpstreamError,
)
from penstock.cache.disk import Disk
from penstock.cache.folder import FOLDER, FolderState
from penstock.cache.housekeeping import entries
from penstock.cache.record import UnstorableError
from penstock.system.shared_memory import runtime_folder
from support.forked import End, forked
from support.tiers import Computing, a_cache, ask, is_right, sample_of

pytestmark = pytest.mark.usefixtures("own_runtime_folder")

RAM = 1 << 20


@contextmanager
def opened(disk: Path | None = None, *, ram: int = RAM) -> Iterator[Cache]:
    cache = a_cache(disk, ram=ram)
    cache.open()
    try:
        yield cache
    finally:
        cache.close()


def totals(cache: Cache) -> Any:
    assert cache._here is not None
    return cache._here.counters.totals()


def free(cache: Cache) -> bool:
    """Return whether nobody in this process has a claim."""
    assert cache._here is not None
    assert cache._here.claims is not None
    return not cache._here.claims._mine


def test_the_first_samples_are_computed_twice_and_the_others_once() -> None:
    numbers: list[int] = []

    def compute(index: int) -> Callable[[int], Any]:
        return lambda number: numbers.append(number) or sample_of(index, None)

    with opened() as cache:
        for index in range(6):
            ask(cache, index, None, compute(index))
        assert numbers == [0, 1] * REPEATED + [0] * 3
        assert totals(cache).misses == 6


def test_random_samples_are_refused_at_every_lookup() -> None:
    with opened() as cache:
        for index in range(2 * REPEATED):
            with pytest.raises(RandomUpstreamError, match=f"index {index} differed"):
                ask(cache, index, None, lambda number: number)
            assert free(cache)
        assert totals(cache).stored == 0


@pytest.mark.parametrize(
    "change", [lambda data, number: data / 255, lambda data, number: data + number]
)
def test_a_sample_that_the_second_computation_changes_is_refused(
    change: Callable[[Any, int], Any],
) -> None:
    """Code that works in place, or returns one buffer, returns one object each time."""
    data = np.full(4, 255.0)

    def in_place(number: int) -> Any:
        data[:] = change(data, number)
        return data

    with opened() as cache:
        with pytest.raises(RandomUpstreamError, match="works in place"):
            ask(cache, 0, None, in_place)
        assert totals(cache).stored == 0


def test_the_first_computation_is_what_is_returned_and_stored() -> None:
    numbers = np.zeros(4)

    def counted(number: int) -> Any:
        numbers[:] = 7
        return numbers

    with opened() as cache:
        sample = ask(cache, 0, None, counted)
        numbers[:] = 8  # used again, for the next sample
        assert sample.tolist() == ask(cache, 0, None, counted).tolist() == [7] * 4


@pytest.mark.parametrize("has_ram", [True, False])
def test_a_later_run_compares_some_samples_and_then_trusts_the_rest(
    tmp_path: Path, *, has_ram: bool
) -> None:
    ram = RAM if has_ram else 0
    with opened(tmp_path / "disk", ram=ram) as cache:
        assert all(map(Computing(cache).right, range(COMPARED + 9)))
    with opened(tmp_path / "disk", ram=ram) as cache:
        again = Computing(cache)
        assert all(map(again.right, range(COMPARED + 9)))
        assert again.computed == COMPARED
        assert totals(cache).compared == COMPARED
        assert totals(cache).disk_hits == COMPARED + 9


def test_changed_data_is_reported_once_and_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "disk") as cache:
        assert all(map(Computing(cache).right, range(9)))
    with caplog.at_level(logging.WARNING, "penstock"), opened(tmp_path / "disk") as it:
        changed = Computing(it, version=1)
        assert all(changed.right(index) for index in [*range(9), *range(9)])
        # All was dropped, and what that run may store meanwhile is doubted too.
        assert changed.computed == 9 + 9
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "sample index 0, stored by an earlier run, differs" in messages[0]


@pytest.mark.parametrize("ram", [0, RAM])
def test_a_run_compares_what_another_running_one_has_stored(
    tmp_path: Path, ram: int
) -> None:
    """Each run has its own processes, as ranks and notebooks do, and one arena."""

    def work(end: End) -> None:
        with opened(tmp_path / "disk", ram=ram) as cache:
            later = Computing(cache, version=1)
            end.tell(str(sum(map(later.right, range(2 * COMPARED)))))

    with opened(tmp_path / "disk", ram=ram) as cache:
        assert all(map(Computing(cache).right, range(2 * COMPARED)))
        cache.flush()
        assert Computing(cache).right(0)  # it opens the folder again
        with forked(work) as child:
            assert child.hear() == str(2 * COMPARED)


def test_no_thread_gets_a_record_before_one_thread_has_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "disk") as cache:
        assert all(map(Computing(cache).right, range(9)))
    looking, others = threading.Event(), threading.Event()
    look = Disk.open_namespace

    def slow(disk: Disk, *about: Any) -> Any:
        looking.set()
        assert not others.wait(0.2), "another thread got a record meanwhile"
        return look(disk, *about)

    monkeypatch.setattr(Disk, "open_namespace", slow)
    with opened(tmp_path / "disk") as cache, ThreadPoolExecutor(4) as pool:
        changed = Computing(cache, version=1)

        def ask(index: int) -> bool:
            right = changed.right(index)
            others.set()
            return right

        first = pool.submit(ask, 0)
        assert looking.wait(60)
        assert all(pool.map(ask, range(1, 9)))
        assert first.result()


def test_a_reader_does_not_put_a_dropped_record_into_ram(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "disk") as cache:
        assert all(map(Computing(cache).right, range(9)))
    with opened(tmp_path / "disk", ram=RAM) as cache:
        changed = Computing(cache, version=1)
        read_before = cache._mine().find(cache.fingerprint.key(8, None))
        assert all(map(changed.right, range(8)))
        assert read_before is not None
        assert read_before.doubted
        assert all(map(changed.right, range(9)))


def test_a_computation_that_fails_frees_its_claim() -> None:
    def fail(number: int) -> Any:
        raise OSError(5, "the disk of the dataset")

    with opened() as cache:
        for _ in range(2):
            with pytest.raises(OSError, match="of the dataset"):
                ask(cache, 1, None, fail)
            assert free(cache)
        assert Computing(cache).right(1)


def test_a_sample_that_cannot_be_stored_frees_its_claim() -> None:
    with opened() as cache:
        for _ in range(2):
            with pytest.raises(UnstorableError):
                ask(cache, 1, None, lambda number: object())
            assert free(cache)
        assert Computing(cache).right(1)


def test_an_event_loop_gets_the_same_as_threads() -> None:
    async def compute() -> Any:
        await asyncio.sleep(0)
        return sample_of(1, None)

    async def fail() -> Any:
        raise OSError(5, "the disk of the dataset")

    async def main(cache: Cache) -> None:
        with pytest.raises(OSError, match="of the dataset"):
            await cache.sample(1, None, None, fail, in_loop=True)
        lookups = [cache.sample(1, None, None, compute, in_loop=True) for _ in range(8)]
        assert all(
            is_right(sample, 1, None) for sample in await asyncio.gather(*lookups)
        )

    with opened() as cache:
        asyncio.run(main(cache))
        assert totals(cache).misses == 1
        assert totals(cache).ram_hits == 7
        assert free(cache)


def test_processes_together_compute_a_sample_once(tmp_path: Path) -> None:
    with opened(tmp_path / "disk") as cache:

        def work(end: End) -> None:
            ask = Computing(cache)
            end.hear()
            assert all(map(ask.right, range(12)))
            end.tell("right")

        with forked(work) as one, forked(work) as other:
            one.tell("go")
            other.tell("go")
            assert (one.hear(), other.hear()) == ("right", "right")
        assert Computing(cache).right(0)
        assert totals(cache).misses == 12
        assert totals(cache).ram_hits == 13


def test_a_cache_that_was_closed_may_be_opened_again(tmp_path: Path) -> None:
    with opened(tmp_path / "disk") as cache:
        assert Computing(cache).right(1)
        cache.close()
        statistics = cache.statistics()
        assert statistics is not None
        assert statistics.misses == 1
        cache.open()
        assert Computing(cache).right(1)


def test_a_cache_does_not_get_the_limit_of_another_on_its_folder(
    tmp_path: Path,
) -> None:
    caches = [a_cache(tmp_path, limit=limit) for limit in (1 << 20, None, 1 << 21)]
    with ExitStack() as stack:
        for cache in caches:
            stack.callback(cache.close)
            cache.open()
        limits = [cache._mine().disk_limit for cache in caches]
    assert (limits[0], limits[2]) == (1 << 20, 1 << 21)
    assert limits[1] > 1 << 22


def test_a_cache_that_is_closed_leaves_no_finaliser() -> None:
    before = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    with opened() as cache:
        for _ in range(3):
            cache.close()
            cache.open()
    assert len(weakref.finalize._registry) == before  # type: ignore[attr-defined]


def test_the_collector_may_close_a_cache_in_the_thread_of_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.1)  # its end waits for that thread
    cache, collected, closes = a_cache(tmp_path), threading.Event(), threading.Event()
    cache.open()
    here, key = cache._mine(), cache.fingerprint.key(0, None)
    here.stack.callback(closes.set)

    def collect() -> None:
        gc.collect()
        collected.set()

    ring = [cache]
    ring.append(ring)  # type: ignore[arg-type]
    gc.disable()
    try:
        del cache, ring
        here.keep(key, 1, 1, collect)
        assert collected.wait(60)
    finally:
        gc.enable()
    assert closes.wait(60)
    assert FolderState.read(tmp_path / FOLDER).clean


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_second_cache_with_other_ram_for_the_same_samples_logs_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"), opened():
        with opened(ram=2 * RAM):
            pass
        with opened():
            pass
    (warning,) = told_by(caplog)
    assert f"its RAM holds {RAM} bytes, not the {2 * RAM}" in warning


def test_each_kind_of_warning_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, ram=0) as cache:
        assert all(map(Computing(cache).right, range(9)))
        keys = [cache.fingerprint.key(index, None) for index in (0, 1)]
    disk = Disk(tmp_path / FOLDER)
    for key in keys:
        disk.forget(key)
        disk.put([(key, b"no record")], "numbers")
    disk.close()
    with caplog.at_level(logging.WARNING, "penstock"), opened(tmp_path, ram=0) as cache:
        assert all(map(Computing(cache, version=1).right, range(9)))
    damaged, changed = told_by(caplog)
    assert "a record was damaged" in damaged
    assert "differs from what is computed now" in changed


def test_without_a_file_for_claims_samples_are_stored_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER / "claims").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "penstock"), opened(tmp_path) as cache:
        computing = Computing(cache)
        assert all(map(computing.right, [1, 1, 2, 2]))
        assert computing.computed == 2
        assert free(cache)
    (warning,) = told_by(caplog)
    assert "several workers may compute the same sample" in warning


def test_ram_that_other_processes_cannot_find_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = runtime_folder()
    assert folder is not None
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "penstock"), opened() as cache:
        with forked(lambda end: end.tell(str(Computing(cache).right(1)))) as child:
            assert child.hear() == "True"
        assert Computing(cache).right(1)
    (warning,) = told_by(caplog)
    assert "set XDG_RUNTIME_DIR" in warning


def test_a_cache_that_ctrl_c_keeps_from_opening_leaves_nothing_and_opens_later(
    tmp_path: Path,
) -> None:
    folder, logger = runtime_folder(), logging.getLogger("penstock")
    assert folder is not None
    folder.chmod(0o777)  # opening it logs a warning, once all is open

    def interrupt(_: logging.LogRecord) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    cache, before = a_cache(tmp_path / "disk", ram=RAM), os.listdir("/proc/self/fd")
    logger.addFilter(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.open()
    finally:
        logger.removeFilter(interrupt)
    assert os.listdir("/proc/self/fd") == before
    cache.open()
    assert Computing(cache).right(1)
    cache.close()


def test_processes_of_another_pid_namespace_go_on_without_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB identifies readers by their pids, which mean nothing across namespaces."""

    def contained(end: End) -> None:
        warnings: list[str] = []
        monkeypatch.setattr(folder_module, "pid_namespace", lambda: 42)
        monkeypatch.setattr(Here, "warn", lambda _, text, kind: warnings.append(text))
        with opened(tmp_path / "disk", ram=0) as mine:
            assert all(map(Computing(mine).right, range(12)))
            assert mine._here is not None
            end.tell(str(mine._here.disk is not None))
            end.tell("".join(warnings) or "nothing")

    with opened(tmp_path / "disk", ram=0) as cache:
        assert Computing(cache).right(0)
        with forked(contained) as child:
            assert child.hear() == "False"
            assert "give this container another folder" in child.hear()
            assert child.ended() == 0
    with forked(contained) as child:
        assert child.hear() == "True"  # nobody uses it now
        assert child.hear() == "nothing"
        assert child.ended() == 0
    namespaces = dict(entries(tmp_path / "disk"))
    assert [namespace.records for namespace in namespaces.values()] == [12]


def test_the_writer_of_a_disk_that_was_given_up_ends_with_the_cache(
    tmp_path: Path,
) -> None:
    before, written = threading.enumerate(), threading.Event()
    with opened(tmp_path / "disk", ram=0) as cache:
        here = cache._mine()
        here.keep(cache.fingerprint.key(0, None), 1, 1, written.set)
        assert written.wait(60)
        assert here.disk is not None
        here.disk._env.close()  # reads fail from now on
        assert here.find(cache.fingerprint.key(1, None)) is None
        assert here.disk is None
    assert threading.enumerate() == before


def test_a_record_is_not_copied_for_a_writer_that_takes_no_more(tmp_path: Path) -> None:
    sample = np.zeros(1 << 22, np.uint8)
    with opened(tmp_path, ram=1 << 24) as cache:
        here = cache._mine()
        assert here._writer is not None
        here._writer.full = True
        tracemalloc.start()
        try:
            here.keep(cache.fingerprint.key(0, None), sample, 1, bool)
            assert tracemalloc.get_traced_memory()[1] < sample.nbytes // 2
        finally:
            tracemalloc.stop()
        assert totals(cache).stored == 1


@pytest.mark.parametrize("tier", ["arena", "disk"])
def test_a_tier_that_another_thread_gives_up_meanwhile_is_not_missed(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "disk") as cache:
        here, key = cache._mine(), cache.fingerprint.key(1, None)
        tiers = [getattr(here, tier)]

        def look(_: Here) -> Any:
            return tiers.pop() if tiers else None

        with monkeypatch.context() as patched:
            patched.setattr(Here, tier, property(look, bool), raising=False)
            for use in (
                lambda: here.admits(key),
                lambda: here.keep(key, 1, 1, bool),
                lambda: here.drop(key[:8]),
            ):
                tiers[:] = [here.__dict__[tier]]
                use()
