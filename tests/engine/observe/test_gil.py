"""The GIL probe beside threads that hold the GIL or release it."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from penstock.engine import monitor
from penstock.engine.monitor import BURST, LATE_NS, SLEEP_S, GilProbe
from support.thread_limit import no_more_threads

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


@pytest.mark.slow
@pytest.mark.serial  # on a busy machine waiting for a core looks the same
def test_the_probe_tells_python_from_work_that_releases_the_gil() -> None:
    with closing(GilProbe()) as probe:
        with at_work(keeps_the_gil):
            bound = held_share(probe)
        with at_work(lets_go_of_the_gil):
            free = held_share(probe)
    assert bound > 0.8
    assert free < 0.2


def test_the_probe_says_nothing_before_a_burst_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "SLEEP_S", 1000.0)
    with closing(GilProbe()) as probe:
        assert probe.held_share is None
        assert probe.burst()
        assert probe.held_share is None


class Late:
    """The probe's bed and its clocks, by which it wakes late, and why."""

    def __init__(self, gil_ns: int, queued_ns: int) -> None:
        self.slept: list[float] = []
        self._now_ns = self._queued_ns = 0
        self._late_ns = gil_ns, queued_ns

    def acquire(self, timeout: float) -> bool:
        self.slept.append(timeout)
        gil_ns, queued_ns = self._late_ns
        self._queued_ns += queued_ns
        self._now_ns += int(timeout * 1e9) + gil_ns + queued_ns
        return False

    def release(self) -> None:
        """Let it wake: it does so by itself."""

    def perf_counter_ns(self) -> int:
        return self._now_ns

    @contextmanager
    def run_queue_clock(self) -> Iterator[Callable[[], int]]:
        yield lambda: self._queued_ns


def probe_of(late: Late, monkeypatch: pytest.MonkeyPatch) -> GilProbe:
    monkeypatch.setattr(
        monitor, "time", SimpleNamespace(perf_counter_ns=late.perf_counter_ns)
    )
    monkeypatch.setattr(monitor, "run_queue_clock", late.run_queue_clock)
    probe = GilProbe()
    monkeypatch.setattr(probe, "_bed", late)
    return probe


@pytest.mark.parametrize(
    ("gil_ns", "queued_ns", "share"),
    [(LATE_NS + 1, 0, 1.0), (LATE_NS, 0, 0.0), (LATE_NS, 10 * LATE_NS, 0.0)],
)
def test_only_a_wait_that_is_not_for_a_core_is_one_for_the_gil(
    gil_ns: int, queued_ns: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(probe_of(Late(gil_ns, queued_ns), monkeypatch)) as probe:
        assert held_share(probe) == share


def test_a_burst_sleeps_before_each_of_its_few_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Late(0, 0)
    with closing(probe_of(late, monkeypatch)) as probe:
        held_share(probe)
    assert late.slept == [SLEEP_S] * BURST


def test_closing_ends_a_burst_at_once_and_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "SLEEP_S", 1000.0)
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
    with closing(GilProbe()) as probe:
        assert probe.burst()
        assert not probe.burst()
        assert threading.active_count() == before + 1


def test_a_burst_is_left_out_where_no_thread_can_start() -> None:
    with closing(GilProbe()) as probe:
        with no_more_threads():
            assert not probe.burst()
        probe.close()


def test_no_probe_is_closed_before_its_burst_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tuner's thread looks while the trainer's closes its engine."""
    probe, closers = GilProbe(), []
    start = threading.Thread.start

    def start_last(thread: threading.Thread) -> None:
        monkeypatch.undo()
        closers.append(threading.Thread(target=probe.close))
        closers[0].start()
        assert not probe._closed.is_set()  # noqa: SLF001 it waits
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_last)
    probe.burst()
    closers[0].join()
    with pytest.raises(RuntimeError, match="once"):  # it has been started, and joined
        start(probe._thread)  # type: ignore[arg-type]  # noqa: SLF001
