"""Instruments: every nanosecond is counted once, the open interval too."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.connector import (
    LONG_NS,
    QUEUE_LONG_NS,
    SOME,
    SampledClock,
    WorkerMeter,
    own_queue,
)
from penstock.engine.core.core import Gauge
from penstock.engine.core.in_flight import Wait
from penstock.engine.observe.observation import ConnectorObservation, WorkerReading

S = 1_000_000_000


def test_a_gauge_integrates_its_level() -> None:
    gauge = Gauge(4, 0)
    gauge.move(2, 1 * S)
    gauge.move(4, 3 * S)
    gauge.move(0, 4 * S)
    assert gauge.read(10 * S, 10.0, 7.0) == ConnectorObservation(
        occupancy=pytest.approx((2 * 2 + 4 * 1) / 10),
        capacity=4,
        empty=pytest.approx((1 + 6) / 10),
        full=pytest.approx(1 / 10),
        row_bytes=7.0,
    )


def test_an_interval_that_is_still_open_is_counted_once() -> None:
    gauge = Gauge(1, 0)
    gauge.move(1, 0)
    for now_s in (5, 5, 7):
        assert gauge.read(now_s * S, 1.0).full == pytest.approx(now_s)


def test_a_gauge_above_its_capacity_counts_as_full() -> None:
    gauge = Gauge(2, 0)
    gauge.move(3, 0)
    assert gauge.read(S, 1.0).full == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=20))
def test_empty_full_and_partly_full_add_up_to_the_time(
    moves: list[tuple[int, int]],
) -> None:
    gauge, now_s, area, empty_s, full_s = Gauge(3, 0), 0, 0, 0, 0
    level = 0
    for following, pause_s in moves:
        now_s += pause_s
        area += level * pause_s
        empty_s += pause_s * (level == 0)
        full_s += pause_s * (level >= 3)
        level = following
        gauge.move(level, now_s * S)
    reading = gauge.read(now_s * S, 1.0)
    shares = reading.occupancy, reading.empty, reading.full
    assert shares == pytest.approx((area, empty_s, full_s))


def test_a_worker_waits_for_one_thing_at_a_time() -> None:
    meter = WorkerMeter(0)
    meter.wait(Wait.INPUT, 1 * S)
    meter.wait(Wait.INPUT, 2 * S)  # the worker looked again in vain
    meter.wait(Wait.CREDIT, 4 * S)
    meter.start(9 * S)
    assert meter.waiting_for is None
    total = meter.read(10 * S)
    assert (total.wait_input_s, total.wait_credit_s) == (3, 5)
    assert total.worker_s == 10


def test_a_wait_or_a_lease_still_open_is_counted() -> None:
    meter = WorkerMeter(0)
    meter.wait(Wait.CREDIT, 0)
    assert meter.read(60 * S).wait_credit_s == 60
    meter.start(60 * S)
    assert meter.read(65 * S).run_s == 5
    meter.stop(3, 6 * S, 2 * S, 66 * S)
    total = meter.read(70 * S)
    assert (total.rows, total.run_s, total.cpu_s, total.wait_credit_s) == (3, 6, 2, 60)


NAMES = [field.name for field in fields(WorkerReading)]
NUMBERS = st.builds(WorkerReading, **dict.fromkeys(NAMES, st.integers(0, 9)))


@given(NUMBERS, NUMBERS)
def test_readings_add_up_and_subtract(one: WorkerReading, two: WorkerReading) -> None:
    assert one + two - two == one
    assert (one + two).rows == one.rows + two.rows


def test_readings_of_several_workers_are_summed() -> None:
    one = WorkerReading(rows=1, worker_s=2, cpu_s=4, wait_memory_s=6)
    three = WorkerReading(rows=3, worker_s=6, cpu_s=12, wait_memory_s=18)
    assert sum([one] * 3, WorkerReading()) == three


def test_a_reading_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        WorkerReading().rows = 1  # type: ignore[misc]


def test_a_lease_behind_another_begins_when_that_one_ends() -> None:
    meter = WorkerMeter(0)
    meter.start(0)
    meter.start(1 * S)
    meter.wait(Wait.INPUT, 2 * S)  # no third lease; the worker itself waits for nothing
    assert meter.waiting_for is None
    meter.stop(1, 4 * S, 0, 4 * S)
    assert meter.leases == 1
    assert meter.read(6 * S).run_s == 4 + 2
    meter.stop(1, 5 * S, 0, 9 * S)
    assert meter.read(20 * S).run_s == 9


def test_the_cpu_clock_is_read_for_long_pieces_and_for_few_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[int] = []

    def half(*_: object) -> int:
        reads.append(0)
        return len(reads) // 2 * 500

    monkeypatch.setattr("penstock.engine.core.connector.time.thread_time_ns", half)
    clock = SampledClock()
    assert clock.begin() is None  # the first is read
    assert clock.end(1000) == 500
    for _ in range(SOME):
        assert clock.begin() == 0.5
        assert clock.end(600) == 300  # those not read count like it
    assert len(reads) == 2
    clock.begin()
    clock.end(1000)
    clock.begin()
    assert clock.end(1000 * LONG_NS) == LONG_NS // 2  # as far as is known, a wait
    reads.clear()
    for _ in range(3):
        assert clock.begin() is None
        clock.end(LONG_NS)
    assert len(reads) == 6


def test_waits_for_a_core_are_read_for_long_pieces_and_stand_for_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter, reads = [0], []

    def waited_ns(thread: str) -> int:
        assert thread == "/proc/thread-self"
        reads.append(thread)
        return counter[0]

    def work(run_ns: int, waited_ns: int) -> int:
        queue.begin()
        counter[0] += waited_ns
        return queue.end(run_ns)

    monkeypatch.setattr("penstock.engine.core.connector.waited_ns", waited_ns)
    queue = own_queue()
    assert queue.total_ns == 0
    assert work(QUEUE_LONG_NS, QUEUE_LONG_NS // 2) == QUEUE_LONG_NS // 2
    assert work(100, 50) == 50  # the last one was long: measured
    assert len(reads) == 4
    assert [work(100, 30) for _ in range(SOME)] == [50] * SOME
    assert work(100, 10) == 10
    assert len(reads) == 6
    work(10 * QUEUE_LONG_NS, 0)  # suddenly long: it counts as just long
    assert queue.total_ns < 2 * QUEUE_LONG_NS
    assert len(reads) == 6
