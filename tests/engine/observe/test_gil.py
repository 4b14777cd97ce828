"""The GIL probe beside threads that hold the GIL or release it."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock.engine.observe.gil import BURST, SLEEP_S, GilProbe

pytestmark = pytest.mark.serial  # measures time

DATA = os.urandom(1 << 18)


def keeps_the_gil() -> None:
    sum(range(1000))


def lets_go_of_the_gil() -> None:
    zlib.compress(DATA, 1)


@contextmanager
def at_work(work: Callable[[], object]) -> Iterator[None]:
    """Have two threads do this work over and over."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            work()

    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def held_share(probe: GilProbe) -> float:
    probe.burst()
    thread = probe._thread  # noqa: SLF001 it is not waited for in use
    assert thread is not None
    thread.join()
    share = probe.held_share
    assert share is not None
    return share


@pytest.mark.slow  # on a busy machine waiting for a core looks the same
def test_the_probe_tells_python_from_work_that_releases_the_gil() -> None:
    with GilProbe() as probe:
        with at_work(keeps_the_gil):
            bound = held_share(probe)
        with at_work(lets_go_of_the_gil):
            free = held_share(probe)
    assert bound > 0.8
    assert free < 0.2


def test_the_probe_says_nothing_before_a_burst_is_over() -> None:
    with GilProbe() as probe:
        assert probe.held_share is None
        held_share(probe)
        probe.clear()
        assert probe.held_share is None


def test_a_burst_takes_little_cpu() -> None:
    with GilProbe() as probe:
        start = time.process_time()
        held_share(probe)
        spent = time.process_time() - start
    assert spent < 0.1 * BURST * SLEEP_S


def test_closing_ends_a_burst_at_once_and_for_good() -> None:
    before = threading.active_count()
    probe = GilProbe()
    probe.burst()
    probe.close()
    probe.close()
    assert probe.held_share is None
    probe.burst()
    assert threading.active_count() == before


def test_there_is_one_burst_at_a_time() -> None:
    before = threading.active_count()
    with GilProbe() as probe:
        probe.burst()
        probe.burst()
        assert threading.active_count() == before + 1
