"""The core, one behaviour at a time; test_core_machine.py tries all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.engine.core.core import (
    FAR_LEASE_NS,
    FEED,
    LEASE_NS,
    Gauge,
    SegmentState,
    State,
)
from penstock.engine.core.in_flight import (
    ByteBudget,
    InFlightBatch,
    Lease,
    Onward,
    Outcome,
    Wait,
)
from support.core_model import Course
from support.core_script import Script, Settling

WIDE = 1 << 40


def course(
    sizes: Sequence[int], widths: Sequence[int] = (3, 7), limit_bytes: int = WIDE
) -> Course:
    return Course(Script(tuple(sizes)), tuple(widths), ByteBudget(limit_bytes))


def lease(course: Course, at: int) -> Lease:
    answer = course.core.take(at, 0)
    assert isinstance(answer, Lease)
    return answer


def drive(course: Course, until: int) -> None:
    """Work on everything until the trainer has taken `until` batches."""
    while course.head < until:
        assert course.move(), f"stuck: {course.core}"


def test_a_segments_first_lease_is_one_row_and_the_next_as_long_as_pays() -> None:
    state = SegmentState(0, 1, 2, Gauge(1, 0))
    assert state.lease_rows(64) == 1
    state.learn(LEASE_NS // 10 * 4, LEASE_NS // 10 * 4, 4)
    assert state.lease_rows(64) == 10
    assert state.lease_rows(4) == 4


@pytest.mark.parametrize(("inline", "rows"), [(False, 64), (True, 10)])
def test_a_lone_worker_gets_all_rows_of_a_batch(
    inline: bool,  # noqa: FBT001
    rows: int,
) -> None:
    state = SegmentState(0, 1, 1, Gauge(1, 0), inline=inline)
    state.learn(LEASE_NS // 10 * 4, LEASE_NS // 10 * 4, 4)
    assert state.lease_rows(64) == rows


def test_a_lease_has_at_least_one_row() -> None:
    state = SegmentState(0, 1, 1, Gauge(1, 0))
    state.learn(LEASE_NS * 100, LEASE_NS * 100, 1)
    assert state.lease_rows(64) == 1


@pytest.mark.parametrize("handed_out", [0, 1])
def test_a_worker_does_not_collate_a_batch_it_has_only_in_part(
    handed_out: int,
) -> None:
    """Workers may begin to collate when some rows of a batch are already handed out."""
    one = course([4], widths=[2])
    for _ in range(handed_out):
        assert len(lease(one, 0).chunk) == 1
    one.core.segments[0].collates = True
    one.core.set_workers(0, 2, FAR_LEASE_NS)
    rest = lease(one, 0)
    assert len(rest.chunk) == 4 - handed_out
    assert rest.whole == (not handed_out)


@pytest.mark.parametrize(
    ("wait_ms", "cpu_ms", "workers", "rows"),
    [
        (19, 0.05, 1, 10),  # a fifth of a second
        (20, 0.05, 16, 4),  # the worker's share of two batches of 32
        (20, 0.05, 128, 1),
        (20, 0.5, 2, 3),  # as many as pay for a handover
        (0, 20, 1, 1),
        (0, 0.1, 2, 15),
    ],
)
def test_waiting_rows_make_longer_leases_if_every_worker_gets_one(
    wait_ms: float, cpu_ms: float, workers: int, rows: int
) -> None:
    state = SegmentState(0, 2, workers, Gauge(1, 0))
    cpu_ns = round(cpu_ms * 1e6)
    state.learn(round(wait_ms * 1e6) + cpu_ns, cpu_ns, 1)
    assert state.lease_rows(32) == rows


def test_one_lease_alone_fast_or_slow_is_no_evidence() -> None:
    state = SegmentState(0, 1, 1, Gauge(1, 0))
    state.learn(8000, 8000, 1)
    state.learn(1, 1, 1)
    assert state.ns_per_row == pytest.approx(8000 - 0.3 * 7999)
    for _ in range(30):
        state.learn(1, 1, 1)
    assert state.ns_per_row == pytest.approx(1, abs=0.3)
    state.learn(8000, 8000, 1)
    assert state.ns_per_row == pytest.approx(2400, abs=3)


def test_work_that_takes_no_time_is_leased_by_the_batch() -> None:
    state = SegmentState(0, 1, 1, Gauge(1, 0))
    state.learn(0, 0, 5)
    assert state.lease_rows(64) == 64


@pytest.mark.parametrize(
    ("prefetch", "workers", "window"),
    [(1, 1, 1), (3, 1, 3), (1, 16, 2), (1, 17, 3), (3, 16, 4)],
)
def test_a_window_holds_work_for_every_worker(
    prefetch: int, workers: int, window: int
) -> None:
    state = SegmentState(0, prefetch, workers, Gauge(1, 0))
    assert state.window(8) == window


def test_leases_never_cross_a_batch() -> None:
    one = course([3, 2], [1])
    one.set_prefetch(0, 4)
    one.core.segments[0].learn(1, 1, 1)  # a lease could hold thousands of rows
    one.reservations.open(99, None, oldest=True)
    one.reservations.complete(
        99, None
    )  # the size of a batch is known, so many may open
    chunks = [lease(one, 0).chunk for _ in range(4)]
    assert [(chunk.step, len(chunk)) for chunk in chunks] == [
        (0, 3),
        (1, 2),
        (2, 3),
        (3, 2),
    ]


def test_adjacent_pieces_are_joined_into_one_lease() -> None:
    one = course([4])
    for at, row in enumerate([2, 0, 1, 3]):
        del row
        one.take(0)
        one.set_workers(0, at + 2)
    for number in (2, 0, 1, 0):  # rows 2, 0, 3, 1 come back
        one.settle(number, Settling(ns_per_row=1))
    one.core.segments[1].learn(1, 1, 1)
    joined = lease(one, 1)
    assert joined.inputs == [(0, row, 1) for row in range(4)]
    assert joined.chunk.indices.tolist() == [0, 1, 2, 3]
    assert joined.input_bytes == 4 * 3
    assert one.core.segments[1].waiting == 0


def test_a_gap_ends_a_joined_lease() -> None:
    one = course([4])
    one.take(0)
    one.settle(0, Settling(ns_per_row=1))
    one.take(0)
    one.settle(0, Settling(dropped=frozenset({0}), ns_per_row=1))
    one.core.segments[1].learn(1, 1, 1)
    assert lease(one, 1).inputs == [(0, 0, 1)]
    assert lease(one, 1).inputs == [(0, 2, 1), (0, 3, 1)]


def test_a_long_piece_is_split_and_its_rest_comes_next() -> None:
    one = course([6])
    one.set_workers(1, 2)
    one.core.segments[0].learn(1, 1, 1)
    one.take(0)
    one.settle(0, Settling(ns_per_row=1))
    one.core.segments[1].learn(LEASE_NS // 4, LEASE_NS // 4, 1)
    assert lease(one, 1).inputs == [(0, row, 1) for row in range(4)]
    rest = lease(one, 1)
    assert rest.inputs == [(0, row, 1) for row in (4, 5)]
    assert rest.input_bytes == 2 * 3


def test_rows_left_over_after_a_split_wake_another_worker() -> None:
    one = course([6])
    one.set_workers(1, 2)
    one.take(1)
    one.take(1)
    assert one.asleep == [0, 2]
    one.core.segments[0].learn(1, 1, 1)
    one.take(0)
    one.settle(0, Settling(ns_per_row=1))
    one.take(1)  # one row of six: the cost of a row is not known yet
    assert one.core.segments[1].waiting == 5
    assert one.asleep == [0, 0]


def test_the_worker_that_takes_a_batchs_last_rows_wakes_one_for_the_next() -> None:
    one = course([1], [1])
    one.set_workers(0, 2)
    one.set_prefetch(0, 4)
    one.take(0)
    one.take(0)
    one.settle(0, Settling())
    one.take(0)
    assert one.asleep == [2]  # the size of a batch is not known yet
    one.deliver(0)
    assert one.asleep == [1]
    one.take(0)
    assert one.asleep == [0]


@pytest.mark.parametrize("rows_wait", [False, True])
def test_a_wider_limit_wakes_the_segments_whose_limits_depend_on_it(
    rows_wait: bool,  # noqa: FBT001
) -> None:
    """These are the source, the segment before it, and all with rows to work on."""
    one = course([6], [1, 1, 1, 1])
    if rows_wait:
        one.take(0)
        one.settle(0, Settling())
    one.core.wakes.clear()
    one.core.set_prefetch(3, 5)
    assert set(one.core.wakes) == ({0, 1, 2, 3} if rows_wait else {0, 2, 3})


def test_unfinished_rows_go_back_to_the_front() -> None:
    one = course([6], [1])
    one.set_workers(0, 2)
    one.core.segments[0].learn(LEASE_NS // 3, LEASE_NS // 3, 1)
    one.take(0)
    one.settle(0, Settling(done=1, ns_per_row=LEASE_NS // 3))
    again = lease(one, 0)
    assert (again.chunk.first_row, len(again.chunk)) == (1, 2)


def test_giving_back_a_whole_lease_only_changes_where_its_rows_wait() -> None:
    one = course([3], [1])
    one.take(0)
    cost = one.core.segments[0].ns_per_row
    one.settle(0, Settling(done=0))
    one.check()
    assert one.core.segments[0].ns_per_row is cost is None
    assert one.core.batches_in_flight[0].remaining == [3]


def test_a_batch_is_finished_at_once_if_all_its_rows_failed_or_were_dropped() -> None:
    one = course([2])
    one.core.segments[0].learn(1, 1, 1)
    one.take(0)
    one.settle(0, Settling(failing=frozenset({0}), dropped=frozenset({1})))
    one.deliver(0)
    popped = one.core.pop(0)
    assert popped is not None
    in_flight, _ = popped
    assert [failure.row for failure in in_flight.failures] == [0]
    assert in_flight.dropped == 1


def test_batches_leave_in_order_whatever_the_order_they_finish_in() -> None:
    one = course([1], [1])
    drive(one, 1)
    one.set_workers(0, 3)
    while one.awake(0):
        one.take(0)
    assert len(one.in_hand) == 3
    for ready in (False, False, True):
        one.settle(len(one.in_hand) - 1, Settling())  # the last first
        one.deliver(0)
        assert one.pop() is ready
    assert [one.pop() for _ in range(3)] == [True, True, False]


@pytest.fixture
def out_of_order() -> tuple[Course, Lease, Lease]:
    """A core with a second segment that works on whole batches, in order.

    Of the next two batches, the second waits for it; the first is being worked on.
    """
    one = Course(Script((1,)), (1, 1), ByteBudget(WIDE), per_batch=1)
    drive(one, 1)
    one.set_workers(0, 3)
    one.core.set_prefetch(1, 3)
    (first,) = one.in_hand
    second = lease(one, 0)
    one.core.deliver(finished(one, second), Onward(1, "second"), 0)
    return one, first, second


def finished(course: Course, lease: Lease) -> InFlightBatch:
    in_flight = course.core.settle(lease, Outcome(done=1, nbytes=1), 0)
    assert in_flight is not None
    return in_flight


def test_an_ordered_segment_gets_no_batch_before_the_one_that_is_due(
    out_of_order: tuple[Course, Lease, Lease],
) -> None:
    course, first, second = out_of_order
    core = course.core
    assert core.take(1, 0) is Wait.CREDIT
    core.deliver(finished(course, first), Onward(1, "first"), 0)
    due_lease = lease(course, 1)
    assert due_lease.chunk.step == first.chunk.step
    assert core.take(1, 0) is Wait.CREDIT
    core.deliver(finished(course, due_lease), "first", 0)
    assert lease(course, 1).chunk.step == second.chunk.step


def test_an_ordered_segment_is_woken_after_a_batch_that_skips_it(
    out_of_order: tuple[Course, Lease, Lease],
) -> None:
    """A batch skips it if a worker has collated it already, or if it failed."""
    course, first, second = out_of_order
    core = course.core
    assert core.take(1, 0) is Wait.CREDIT
    in_flight = finished(course, first)
    core.wakes.clear()
    core.deliver(in_flight, "first", 0)
    assert core.wakes[1] == 1
    assert lease(course, 1).chunk.step == second.chunk.step


@pytest.mark.parametrize(("sizes", "after"), [([4, 2], 4), ([2, 4], 4)])
def test_a_longer_batch_raises_the_batch_size_and_a_short_tail_keeps_it(
    sizes: list[int], after: int
) -> None:
    one = course(sizes)
    drive(one, 1)
    for _ in range(100):
        if one.core.next_step == 2:  # the last batch of an epoch is open
            break
        assert one.move()
    assert one.core.batch_rows == after


def test_only_the_oldest_batch_is_open_until_one_has_been_seen_whole() -> None:
    one = course([1], [1])
    one.set_workers(0, 2)
    one.take(0)
    assert one.core.take(0, 0) is Wait.CREDIT


def test_a_reader_waits_for_input_and_a_source_for_credit() -> None:
    one = course([1])
    assert one.core.take(1, 0) is Wait.INPUT
    one.take(0)
    assert one.core.take(0, 0) is Wait.CREDIT


def test_a_segment_too_far_ahead_of_the_next_one_waits_for_credit() -> None:
    one = course([1])
    drive(one, 1)
    one.set_prefetch(0, 3)
    while one.grantable(0) is not None or one.in_hand:
        if not one.in_hand:
            one.take(0)
        one.settle(0, Settling())
    next_lease = lease(one, 1)
    assert next_lease.chunk.step == one.head
    assert one.core.segments[1].waiting == 3
    assert one.core.take(1, 0) is Wait.CREDIT  # it may be one batch ahead


def test_an_empty_budget_still_admits_one_batch_at_a_time() -> None:
    one = course([4, 4, 1], limit_bytes=0)
    most = 0
    while one.head < 9:
        one.move()
        most = max(most, len(one.core.batches_in_flight))
    assert most == 1


def test_a_wide_budget_admits_batches_up_to_the_prefetch() -> None:
    one = course([4], [1])
    drive(one, 2)
    one.set_prefetch(0, 5)
    while one.grantable(0) is not None:
        one.take(0)
        one.settle(0, Settling())
    assert sorted(one.core.batches_in_flight) == [2, 3, 4, 5, 6]


def test_dropped_batches_let_nobody_run_ahead_of_the_trainer() -> None:
    one = course([2], [1, 1, 1])
    nothing_left = Settling(dropped=frozenset({0, 1}))
    while one.move(nothing_left, idle=frozenset({FEED})):
        pass
    rows = one.core.batch_rows
    windows = [segment.window(rows) for segment in one.core.segments]
    spans = [segment.span(rows) for segment in one.core.segments[1:]]
    assert 1 <= one.core.next_step <= sum(windows) + sum(spans)


@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_an_inline_segment_gives_the_next_one_work_for_the_trainers_absence(
    prefetch: int,
) -> None:
    one = course([2])
    one.set_workers(0, 1, inline=True)
    one.set_prefetch(1, prefetch)
    drive(one, 1)  # the size of a batch is known, so many may open
    while one.move(idle=frozenset({1, FEED})):
        pass
    one.pop()
    while one.move(idle=frozenset({0, FEED})):
        pass
    assert len(one.core.outbox) == prefetch


def test_one_pipeline_notifies_another_when_it_gives_bytes_back() -> None:
    byte_budget = ByteBudget(8)
    first = Course(Script((1,)), (4,), byte_budget)
    second = Course(Script((1,)), (4,), byte_budget)
    drive(first, 1)
    drive(second, 1)
    for one in (first, second):
        one.set_prefetch(0, 2)
    first.take(0)
    second.take(0)  # both have their oldest batch, and the budget is full
    second.settle(0, Settling())
    second.deliver(0)
    second.take(0)
    assert second.asleep == [1]
    first.close()
    assert second.asleep == [0]


def test_a_restart_forgets_batches_in_flight_and_goes_on_elsewhere() -> None:
    one = course([3, 2])
    drive(one, 2)
    one.restart(7)
    assert one.reservations.held_bytes == 0
    assert lease(one, 0).chunk.step == 7


def test_after_a_restart_the_same_step_is_another_batch() -> None:
    one = course([1], [1])
    one.take(0)
    one.settle(0, Settling())
    before = one.complete[0]
    one.restart(0)
    one.take(0)
    one.settle(0, Settling())
    one.core.deliver(before, "before", 0)
    assert one.core.outbox == {}
    one.core.deliver(one.complete[1], "after", 0)
    popped = one.core.pop(0)
    assert popped is not None
    assert popped[1] == "after"


def test_closing_gives_all_bytes_back_and_wakes_everyone() -> None:
    one = course([3, 2])
    drive(one, 2)
    one.core.close(0)
    assert one.core.state is State.CLOSED
    assert set(one.core.wakes) == {FEED, 0, 1}
    assert one.reservations.byte_budget.held_bytes == 0
    one.core.wakes.clear()
    one.batches.clear()
    one.complete.clear()
    if one.in_hand:
        assert one.core.settle(one.in_hand[0], Outcome(1), 0) is None


FOLLOWING = {
    "RUNNING": {"pause": "PAUSED"},
    "PAUSED": {"unpause": "RUNNING"},
    "CLOSED": {},
}
"""The table of the module's docstring, but for `close`."""


def in_state(state: State) -> Course:
    """Return a course with rows to lease in both segments, and one row leased."""
    one = course([2])
    one.take(0)
    one.settle(0, Settling())
    one.take(0)
    bring(one, state)
    return one


def bring(one: Course, state: State) -> None:
    """Bring a core that is running into a state."""
    if state is State.PAUSED:
        one.core.pause()
    elif state is State.CLOSED:
        one.core.close(0)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", ["pause", "unpause", "restart"])
def test_each_event_leads_to_the_state_in_the_table(state: State, event: str) -> None:
    core = in_state(state).core
    if event == "restart":
        core.restart(core.head, 0)
    else:
        getattr(core, event)()
    assert core.state.name == FOLLOWING[state.name].get(event, state.name)
    core.close(0)
    assert core.state is State.CLOSED


@pytest.mark.parametrize(
    ("state", "gives_work", "delivers"),
    [
        (State.RUNNING, True, True),
        (State.PAUSED, False, True),
        (State.CLOSED, False, False),
    ],
)
def test_each_state_allows_what_the_table_says(
    state: State, *, gives_work: bool, delivers: bool
) -> None:
    assert isinstance(in_state(state).core.take(1, 0), Lease) is gives_work
    fresh = course([1], [1])
    bring(fresh, state)
    assert isinstance(fresh.core.take(0, 0), Lease) is gives_work
    one = course([1], [1])
    one.take(0)
    one.settle(0, Settling())
    bring(one, state)
    one.core.deliver(one.complete[0], "batch", 0)
    assert bool(one.core.outbox) is delivers


def test_work_that_comes_back_wakes_whoever_paused() -> None:
    one = course([2])
    one.take(0)
    one.take(0)
    one.core.pause()
    one.core.wakes.clear()
    one.core.settle(one.in_hand[0], Outcome(0), 0)
    assert one.core.wakes[FEED]


def test_no_batch_beyond_the_bound_is_opened_until_it_is_extended() -> None:
    one = course([1], [1])
    drive(one, 2)
    one.core.extend(2)
    assert one.core.take(0, 0) is Wait.CREDIT
    one.core.wakes.clear()
    one.core.extend(3)
    assert one.core.wakes[0]
    assert lease(one, 0).chunk.step == 2


def test_a_short_tail_does_not_narrow_the_queues() -> None:
    one = course([4, 4, 1])
    one.set_prefetch(0, 3)
    drive(one, 6)
    assert one.core.batch_rows == 4
    assert one.core.segments[0].gauge.capacity == 12


def test_batches_of_another_size_resize_the_queues() -> None:
    one = course([2, 8, 8, 8])
    drive(one, 4)
    assert one.core.batch_rows == 8
    assert one.core.segments[1].gauge.capacity == 8


def test_the_bytes_of_a_waiting_row_are_measured() -> None:
    one = course([4], [30, 7])
    one.core.segments[0].learn(1, 1, 1)
    one.take(0)
    assert one.core.segments[1].row_bytes == 0.0
    one.settle(0, Settling(ns_per_row=1))
    assert one.core.segments[1].row_bytes == 30.0
