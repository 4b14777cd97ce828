"""Coroutines as workers: the cost of a wakeup, their meters, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.engine.core.connector import Connector, EngineLock, WorkerMeter
from penstock.engine.core.core import Core, Gauge, SegmentState
from penstock.engine.core.in_flight import (
    ByteBudget,
    Lease,
    Outcome,
    Reservations,
    Wait,
)
from penstock.engine.program.program import Map, Program
from penstock.engine.workers import Coroutines
from support.core_script import Script

SOON_S = 60.0
"""The limit for what happens at once; a busy machine may need that long."""


class Counted(Connector):
    """Counts requests for work, and signals when there were as many as expected."""

    def __init__(self, engine_lock: EngineLock, segment: int) -> None:
        super().__init__(engine_lock, segment, lambda in_flight: "batch")
        self.tries = 0
        self.wanted = 0
        self.there = threading.Event()

    def try_take(self, meter: WorkerMeter) -> Lease | None:
        lease = super().try_take(meter)
        self.tries += 1
        if self.tries == self.wanted:
            self.there.set()
        return lease

    def expect(self, tries: int) -> None:
        self.there.clear()
        self.wanted = self.tries + tries


class Site:
    """A pool at the second of three segments; the test works on the first."""

    def __init__(self, function: Any, sizes: tuple[int, ...] = (4,)) -> None:
        segments = [SegmentState(0, 1, 1, Gauge(1, 0)) for _ in range(3)]
        reservations = Reservations(
            ByteBudget(1 << 40),
            lambda: self.engine_lock.notify(),  # noqa: PLW0108 there is none yet
        )
        core = Core(Script(sizes), lambda plan: None, segments, reservations, 0)  # type: ignore[arg-type, return-value]
        self.engine_lock = EngineLock(core)
        self.source = Connector(self.engine_lock, 0, lambda in_flight: "batch")
        self.connector = Counted(self.engine_lock, 1)
        program = Program((Map("Map(ID:1) f", 1, function),))
        self.pool = Coroutines(self.connector, program, 0, "f")

    def close(self) -> None:
        with self.engine_lock.lock:
            self.engine_lock.core.close(0)
            self.engine_lock.wake()
        self.pool.close()

    def load(self) -> int:
        """Let the source pass on its next rows; return how many."""
        meter = self.source.enter()
        lease = self.source.try_take(meter)
        assert lease is not None
        rows = len(lease.chunk)
        self.source.settle(lease, Outcome(rows, outputs=[None] * rows), meter)
        return rows

    def waits(self) -> list[Wait | None]:
        """Return what each worker waits for."""
        with self.engine_lock.lock:
            return [meter.waiting_for for meter in self.connector.meters]


@contextmanager
def site(function: Any) -> Iterator[Site]:
    here = Site(function)
    try:
        yield here
    finally:
        here.close()


async def hand_on(sample: Any) -> Any:
    return sample


def test_a_new_permit_tries_once_so_its_meter_knows_what_it_waits_for() -> None:
    with site(hand_on) as here:
        here.connector.expect(100)
        here.pool.resize(100)
        assert here.connector.there.wait(SOON_S)
        assert here.waits() == [Wait.INPUT] * 100
        assert here.pool.statistics().alive == 100


def test_a_wakeup_without_work_costs_one_try_not_one_per_permit() -> None:
    with site(hand_on) as here:
        here.connector.expect(1000)
        here.pool.resize(1000)
        assert here.connector.there.wait(SOON_S)
        before = here.connector.tries
        for _ in range(10):
            here.connector.expect(1)
            here.connector.engine_lock.notify(here.connector.segment)
            assert here.connector.there.wait(SOON_S)
        late = 1  # from the resize, if the loop began to start workers before it
        assert here.connector.tries <= before + 10 + late


def test_retiring_lets_active_workers_finish_and_ends_the_thread() -> None:
    has_begun, finish = threading.Event(), threading.Event()

    async def slow(sample: Any) -> int:
        has_begun.set()
        await asyncio.to_thread(finish.wait)
        return 1

    with site(slow) as here:
        here.pool.resize(3)
        rows = here.load()
        assert has_begun.wait(SOON_S)
        here.pool.retire()
        finish.set()
        here.pool._thread.join(SOON_S)  # noqa: SLF001 close() waits as long
        assert not here.pool._thread.is_alive()  # noqa: SLF001
        assert here.pool.statistics().alive == 0
        assert here.connector.read(0, 1.0)[0].rows == rows


def test_a_permit_that_its_function_cancels_while_it_is_idle_is_replaced() -> None:
    tasks: list[asyncio.Task[Any]] = []
    was_called, has_ended = threading.Event(), threading.Event()

    async def once(sample: Any) -> Any:
        loop = asyncio.get_running_loop()

        def cancel_once_idle() -> None:
            if here.pool._idle:  # noqa: SLF001
                tasks[0].add_done_callback(lambda _: has_ended.set())
                tasks[0].cancel()
            else:
                loop.call_soon(cancel_once_idle)

        if not tasks:
            tasks.extend(filter(None, [asyncio.current_task()]))
            loop.call_soon(cancel_once_idle)
        else:
            was_called.set()
        return sample

    with site(once) as here:
        here.pool.resize(1)
        assert here.load() == 1
        assert has_ended.wait(SOON_S)
        here.load()
        assert was_called.wait(SOON_S)
        assert here.pool.statistics().alive == 1


def test_a_fault_of_the_engine_itself_is_reported() -> None:
    class Broken(Exception):
        pass

    with site(hand_on) as here:

        def fail(meter: WorkerMeter) -> None:
            raise Broken

        here.connector.try_take = fail  # type: ignore[method-assign, assignment]
        here.pool.resize(1)
        here.pool._thread.join(SOON_S)  # noqa: SLF001 it cannot go on
        assert type(here.engine_lock.broken) is Broken


@pytest.mark.parametrize("workers", [1, 50])
def test_resizing_after_the_end_is_harmless(workers: int) -> None:
    with site(hand_on) as here:
        here.pool.resize(2)
    here.pool.resize(workers)
    here.pool.retire()
    assert here.pool.statistics().alive == 0
