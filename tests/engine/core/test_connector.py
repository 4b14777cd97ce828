"""Connectors with real threads: a thread is woken by the event that it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.engine.core.connector import Connector, EngineLock
from penstock.engine.core.core import Core, Gauge, SegmentState
from penstock.engine.core.in_flight import (
    ByteBudget,
    InFlightBatch,
    Lease,
    Outcome,
    Reservations,
    Wait,
)
from support.core_script import Script

JOIN_S = 60.0
"""A woken thread ends at once; only a lost wakeup takes this long."""


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Site:
    """The engine lock and the connectors of a core with two segments."""

    def __init__(
        self, sizes: tuple[int, ...] = (2,), byte_budget: ByteBudget | None = None
    ) -> None:
        segments = [SegmentState(0, 1, 1, Gauge(1, 0)) for _ in range(2)]
        for segment in segments:
            segment.learn(1, 1, 1)  # a lease is a whole batch
        reservations = Reservations(
            byte_budget or ByteBudget(1 << 40),
            lambda: self.engine_lock.notify(),  # noqa: PLW0108 there is none yet
        )
        self.core = core = Core(
            Script(sizes), lambda plan: None, segments, reservations, 0
        )  # type: ignore[arg-type, return-value]
        self.clock = Clock()
        self.engine_lock = EngineLock(core, self.clock)
        self.finished: list[int] = []
        self.connectors = [
            Connector(self.engine_lock, at, self.finish) for at in range(2)
        ]
        self.meters = [connector.enter() for connector in self.connectors]

    def finish(self, in_flight: InFlightBatch) -> object:
        """Finish a batch; user code runs here, so no lock may be held."""
        assert self.engine_lock.lock.acquire(blocking=False)
        self.engine_lock.lock.release()
        self.finished.append(in_flight.plan.step)
        return f"batch {in_flight.plan.step}"

    def lease(self, at: int) -> Lease:
        """Take work that must be there."""
        lease = self.connectors[at].try_take(self.meters[at])
        assert lease is not None
        return lease

    def settle(self, lease: Lease) -> None:
        """Finish all rows of a lease."""
        at, rows = lease.segment, len(lease.chunk)
        outcome = Outcome(rows, run_ns=rows, nbytes=rows)
        if at == 0:
            outcome.outputs = [None] * rows
        self.connectors[at].settle(lease, outcome, self.meters[at])

    def load(self) -> None:
        """Bring one batch to the outbox."""
        self.settle(self.lease(0))
        self.settle(self.lease(1))

    def pop(self) -> Any:
        """Take the next batch as the trainer does."""
        with self.engine_lock.lock:
            popped = self.engine_lock.pop()
        self.engine_lock.notify_others()
        return popped


@contextmanager
def held(engine_lock: EngineLock) -> Iterator[EngineLock]:
    """Hold the lock, and afterwards notify other pipelines."""
    with engine_lock.lock:
        yield engine_lock
    engine_lock.notify_others()


class Taker(threading.Thread):
    """A worker that asks for work once."""

    def __init__(self, connector: Connector) -> None:
        super().__init__(daemon=True)
        self.connector = connector
        self.lease: Lease | None = None
        self.retiring = False
        self._looked = threading.Event()

    def run(self) -> None:
        meter = self.connector.enter()
        try:
            self.lease = self.connector.take(meter, self.surplus)
        finally:
            self.connector.leave(meter)

    def surplus(self) -> bool:
        """Say whether to retire; called under the lock before each look for work."""
        self._looked.set()
        return self.retiring

    def wait_until_it_sleeps(self) -> None:
        """Return once the worker has looked in vain; the lock is not free before."""
        assert self._looked.wait(JOIN_S)
        with self.connector.engine_lock.lock:
            pass
        assert self.lease is None

    def result(self) -> Lease | None:
        """Wait until the worker is woken, and return what it was given."""
        self.join(JOIN_S)
        assert not self.is_alive(), "nothing woke it"
        return self.lease


@contextmanager
def sleeping(connector: Connector) -> Iterator[Taker]:
    """Start a worker that finds nothing to do, and end it afterwards."""
    taker = Taker(connector)
    taker.start()
    try:
        taker.wait_until_it_sleeps()
        yield taker
    finally:
        taker.retiring = True
        connector.engine_lock.notify(connector.segment)
        taker.join(JOIN_S)


def test_available_work_is_given_without_waiting() -> None:
    site = Site()
    lease = site.connectors[0].take(site.meters[0], lambda: False)
    assert isinstance(lease, Lease)
    assert len(lease.chunk) == 2


def test_a_worker_without_input_waits_until_there_is_some() -> None:
    site = Site()
    with sleeping(site.connectors[1]) as taker:
        site.settle(site.lease(0))
        lease = taker.result()
    assert isinstance(lease, Lease)
    assert lease.segment == 1


def test_a_worker_waits_for_credit_until_the_trainer_takes_a_batch() -> None:
    site = Site()
    site.load()
    while (lease := site.connectors[0].try_take(site.meters[0])) is not None:
        site.settle(lease)
    assert site.meters[0].waiting_for is Wait.CREDIT
    with sleeping(site.connectors[0]) as taker:
        assert site.pop() is not None
        site.settle(site.lease(1))
        assert isinstance(taker.result(), Lease)


def test_a_worker_is_woken_when_its_segment_may_go_further_ahead() -> None:
    site = Site()
    site.load()
    site.settle(site.lease(0))
    site.settle(site.lease(0))
    with sleeping(site.connectors[0]) as taker:
        with held(site.engine_lock):
            site.core.set_prefetch(0, 8)
            site.engine_lock.wake()
        assert isinstance(taker.result(), Lease)


def test_rows_put_back_wake_a_worker() -> None:
    site = Site()
    lease = site.lease(0)
    with sleeping(site.connectors[0]) as taker:
        site.connectors[0].settle(lease, Outcome(0), site.meters[0])
        second = taker.result()
    assert isinstance(second, Lease)
    assert second.chunk.indices.tolist() == lease.chunk.indices.tolist()


@pytest.mark.parametrize("at", [0, 1])
def test_a_waiting_worker_retires_when_it_is_asked_to(at: int) -> None:
    site = Site()
    lease = site.lease(0)
    with sleeping(site.connectors[at]) as taker:
        taker.retiring = True
        site.connectors[at].engine_lock.notify(at)
        assert taker.result() is None
    assert lease in site.core.leases


def test_retiring_comes_before_work() -> None:
    site = Site()
    assert site.connectors[0].take(site.meters[0], lambda: True) is None


@pytest.mark.parametrize("at", [0, 1])
def test_closing_wakes_every_waiting_worker(at: int) -> None:
    site = Site()
    site.lease(0)
    with sleeping(site.connectors[at]) as one, sleeping(site.connectors[at]) as two:
        with held(site.engine_lock) as engine_lock:
            engine_lock.core.close(0)
            engine_lock.wake()
        assert one.result() is None
        assert two.result() is None


def test_closing_comes_before_retiring_and_work() -> None:
    site = Site()
    with held(site.engine_lock) as engine_lock:
        engine_lock.core.close(0)
        engine_lock.wake()
    calls: list[bool] = []

    def surplus() -> bool:
        calls.append(True)
        return True

    assert site.connectors[0].take(site.meters[0], surplus) is None
    assert calls == []
    assert site.connectors[0].try_take(site.meters[0]) is None


def test_a_restart_wakes_a_waiting_worker() -> None:
    site = Site()
    site.lease(0)
    with sleeping(site.connectors[0]) as taker:
        with held(site.engine_lock) as engine_lock:
            engine_lock.core.restart(5, 0)
            engine_lock.wake()
        lease = taker.result()
    assert isinstance(lease, Lease)
    assert lease.chunk.step == 5


def test_bytes_given_back_by_one_pipeline_wake_the_source_of_another() -> None:
    byte_budget = ByteBudget(4)
    here, there = Site(byte_budget=byte_budget), Site(byte_budget=byte_budget)
    for site in (here, there):
        site.load()
        assert site.pop() is not None
    there.lease(0)
    here.load()
    with sleeping(here.connectors[0]) as taker:
        with held(there.engine_lock) as engine_lock:
            engine_lock.core.close(0)
            engine_lock.wake()
        assert isinstance(taker.result(), Lease)


def trainer_at(site: Site, woken: Callable[[], bool]) -> threading.Thread:
    """Return a started thread that waits like the trainer and is asleep by now."""
    looked = threading.Event()

    def wait() -> None:
        while True:
            with site.engine_lock.lock:
                looked.set()
                if woken():
                    return
                site.engine_lock.trainer_waits = True
            site.engine_lock.sleep()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert looked.wait(JOIN_S)
    with site.engine_lock.lock:
        return thread


def test_a_finished_batch_wakes_the_trainer() -> None:
    site = Site()
    thread = trainer_at(site, lambda: site.engine_lock.peek() is not None)
    site.load()
    thread.join(JOIN_S)
    assert not thread.is_alive()
    in_flight, batch = site.pop()
    assert (in_flight.plan.step, batch) == (0, "batch 0")
    assert site.finished == [0]


def test_a_fault_of_the_engine_wakes_the_trainer_with_the_first_error() -> None:
    site = Site()
    thread = trainer_at(site, lambda: site.engine_lock.broken is not None)
    first = RuntimeError("first")
    site.engine_lock.fail(first)
    site.engine_lock.fail(RuntimeError("second"))
    thread.join(JOIN_S)
    assert not thread.is_alive()
    assert site.engine_lock.broken is first


def test_the_trainer_wakes_by_itself_after_a_missed_signal() -> None:
    Site().engine_lock.sleep()  # comes back although nobody wakes it


def test_a_listener_is_called_instead_of_woken() -> None:
    site = Site()
    rung: list[str] = []
    site.engine_lock.listeners[1].append(lambda: rung.append("segment 1"))
    lease = site.lease(0)
    assert rung == []
    site.settle(lease)
    assert rung == ["segment 1"]


def test_settling_twice_finishes_a_batch_once() -> None:
    site = Site()
    site.settle(site.lease(0))
    lease = site.lease(1)
    site.settle(lease)
    site.settle(lease)
    assert site.finished == [0]


def test_the_time_of_workers_that_have_left_counts_too() -> None:
    site = Site()
    connector, meter = site.connectors[1], site.meters[1]
    assert connector.try_take(meter) is None
    site.clock.now_ns = 3_000_000_000
    site.settle(site.lease(0))
    lease = site.lease(1)
    site.clock.now_ns = 5_000_000_000
    connector.settle(lease, Outcome(2, run_ns=10**9, cpu_ns=5 * 10**8), meter)
    connector.leave(meter)
    connector.leave(meter)
    site.clock.now_ns = 9_000_000_000
    with site.engine_lock.lock:
        assert not connector.meters
        total = connector.read(site.clock(), 9.0)[0]
    assert (total.rows, total.worker_s, total.run_s, total.cpu_s) == (2, 5.0, 1.0, 0.5)
    assert (total.wait_input_s, total.wait_credit_s) == (3.0, 0.0)


def test_the_outbox_is_measured_in_batches() -> None:
    site = Site()
    site.load()
    _, output, _ = site.connectors[1].read(0, 1.0)
    assert output.capacity == 2
    assert output.row_bytes == site.core.reservations.batch_bytes / 2 == 1
