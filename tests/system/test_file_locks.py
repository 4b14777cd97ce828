"""Locks of files and bytes keep others out, and are waited for with patience."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.system import file_locks
from penstock.system.file_locks import lock_file, wait_until


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Yield two openings of a file: a lock of one keeps out the other."""
    (tmp_path / "file").touch()
    descriptors = [os.open(tmp_path / "file", os.O_RDWR) for _ in range(2)]
    try:
        yield descriptors[0], descriptors[1]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Clock:
    """Time that passes in sleep alone."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(file_locks, "time", clock)
    return clock


def test_a_locked_file_keeps_the_others_out(two: tuple[int, int], clock: Clock) -> None:
    lock_file(two[0], fcntl.LOCK_EX, 0.0)
    for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        with pytest.raises(TimeoutError, match="has held a lock of the cache for 5 s"):
            lock_file(two[1], kind, 5.0)
    fcntl.flock(two[0], fcntl.LOCK_UN)
    lock_file(two[1], fcntl.LOCK_EX, 0.0)
    with pytest.raises(BlockingIOError):
        fcntl.flock(two[0], fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_shared_lock_keeps_out_only_who_wants_it_alone(
    two: tuple[int, int], clock: Clock
) -> None:
    lock_file(two[0], fcntl.LOCK_SH, 0.0)
    lock_file(two[1], fcntl.LOCK_SH, 0.0)
    with pytest.raises(TimeoutError):
        lock_file(two[1], fcntl.LOCK_EX, 0.0)


def test_a_lock_is_waited_for_in_pauses_that_grow_to_a_limit(clock: Clock) -> None:
    tries = iter([False] * 20 + [True])
    wait_until(lambda: next(tries), 60.0)
    assert clock.slept_s[:3] == [
        file_locks.FIRST_PAUSE_S * factor for factor in (1, 2, 4)
    ]
    assert len(clock.slept_s) == 20
    assert max(clock.slept_s) == clock.slept_s[-1] == file_locks.MAX_PAUSE_S


def test_patience_ends_once_and_not_before(clock: Clock) -> None:
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, 3.0)
    waited_s = clock.now_s - 100.0
    assert 3.0 < waited_s <= 3.0 + file_locks.MAX_PAUSE_S


def test_who_need_not_wait_never_sleeps(clock: Clock) -> None:
    wait_until(lambda: True, 0.0)
    assert clock.slept_s == []
