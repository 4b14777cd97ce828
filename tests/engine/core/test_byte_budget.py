"""All pipelines share one budget of bytes; it always grants the oldest batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.in_flight import ByteBudget, Reservations


def nobody() -> None:
    """Be notified, and do nothing."""


def taken(reservations: Reservations) -> list[Callable[[], None]]:
    """Return the callbacks to notify, and forget them."""
    notifications = list(reservations.notifications)
    reservations.notifications.clear()
    return notifications


def learned(
    byte_budget: ByteBudget, nbytes: int, image_size: int | None = None
) -> Reservations:
    """Return reservations whose pipeline has seen a batch of this many bytes."""
    reservations = Reservations(byte_budget, nobody)
    reservations.open(0, image_size, oldest=True)
    reservations.use(0, nbytes)
    reservations.complete(0, image_size)
    reservations.close(0)
    return reservations


def test_only_the_oldest_is_granted_while_no_size_is_known() -> None:
    reservations = Reservations(ByteBudget(10**9), nobody)
    assert not reservations.open(1, None, oldest=False)
    assert reservations.open(0, None, oldest=True)
    assert not reservations.open(1, None, oldest=False)


def test_batches_are_granted_while_they_fit() -> None:
    byte_budget = ByteBudget(250)
    reservations = learned(byte_budget, 100)
    granted = [reservations.open(step, None, oldest=False) for step in range(3)]
    assert granted == [True, True, False]
    assert byte_budget.held_bytes == 200


def test_a_batch_that_fits_exactly_is_granted() -> None:
    assert learned(ByteBudget(100), 100).open(1, None, oldest=False)


def test_the_oldest_is_granted_whatever_others_hold() -> None:
    byte_budget = ByteBudget(100)
    byte_budget.charge(100, None)
    reservations = learned(byte_budget, 80)
    assert not reservations.open(5, None, oldest=False)
    assert reservations.open(5, None, oldest=True)
    assert byte_budget.held_bytes == 180


def test_bytes_beyond_a_batchs_estimate_are_charged_at_once() -> None:
    byte_budget = ByteBudget(1000)
    reservations = learned(byte_budget, 100)
    reservations.open(1, None, oldest=True)
    reservations.use(1, 60)
    assert byte_budget.held_bytes == 100
    reservations.use(1, 60)
    assert byte_budget.held_bytes == 120
    reservations.use(1, -30)
    assert byte_budget.held_bytes == 120  # it may hold as much again as it held before
    reservations.complete(1, None)
    assert byte_budget.held_bytes == 90


def test_a_complete_batch_is_charged_what_it_holds() -> None:
    byte_budget = ByteBudget(1000)
    reservations = learned(byte_budget, 100)
    reservations.open(1, None, oldest=True)
    reservations.use(1, 70)
    reservations.complete(1, None)
    assert byte_budget.held_bytes == 70
    reservations.close(1)
    assert byte_budget.held_bytes == 0


def test_the_estimate_rises_at_once_and_falls_by_an_eighth() -> None:
    reservations = learned(ByteBudget(0), 800)
    for step, (held_bytes, estimate) in enumerate([(0, 700), (900, 900), (100, 800)]):
        reservations.open(step, None, oldest=True)
        reservations.use(step, held_bytes)
        reservations.complete(step, None)
        reservations.close(step)
        assert reservations.expected(None) == estimate


@pytest.mark.parametrize(
    ("size", "expected"), [(64, 4000), (48, 2250), (32, 1000), (16, 1000)]
)
def test_a_larger_image_is_expected_to_hold_more_by_its_area(
    size: int, expected: int
) -> None:
    assert learned(ByteBudget(0), 1000, 32).expected(size) == expected


def test_the_most_that_a_batch_held_counts_not_what_it_ends_with() -> None:
    reservations = Reservations(ByteBudget(0), nobody)
    reservations.open(0, None, oldest=True)
    reservations.use(0, 500)
    reservations.use(0, -400)
    reservations.complete(0, None)
    assert reservations.batch_bytes == 500
    assert reservations.held_bytes == 100
    assert reservations.peak_bytes == 500


def test_a_refused_pipeline_is_notified_once_when_bytes_come_free() -> None:
    notified: list[str] = []
    byte_budget = ByteBudget(100)
    first = learned(byte_budget, 60)
    second = Reservations(byte_budget, lambda: notified.append("second"))
    second.open(0, None, oldest=True)
    second.use(0, 60)
    second.complete(0, None)
    second.close(0)
    first.open(1, None, oldest=False)
    assert not second.open(1, None, oldest=False)
    first.close(1)
    for notify in taken(first):
        notify()
    assert notified == ["second"]
    first.open(2, None, oldest=False)
    first.close(2)
    assert taken(first) == []


def test_a_larger_budget_notifies_refused_pipelines() -> None:
    notified: list[int] = []
    byte_budget = ByteBudget(0)
    assert not byte_budget.charge(10, lambda: notified.append(1))
    for notify in byte_budget.resize(10):
        notify()
    assert notified == [1]
    assert byte_budget.charge(10, nobody)


def test_a_pipeline_that_has_left_is_not_notified() -> None:
    byte_budget = ByteBudget(0)
    reservations = learned(byte_budget, 10)
    byte_budget.charge(10, None)
    assert not reservations.open(1, None, oldest=False)
    reservations.close_all()
    assert byte_budget.release(10) == set()


def test_closing_a_batch_twice_gives_its_bytes_back_once() -> None:
    byte_budget = ByteBudget(1000)
    reservations = learned(byte_budget, 100)
    reservations.open(1, None, oldest=True)
    reservations.close(1)
    reservations.close(1)
    assert byte_budget.held_bytes == 0


@given(
    limit=st.integers(0, 500),
    events=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60),
)
def test_equal_batches_stay_under_the_limit_plus_one_a_pipeline(
    limit: int, events: list[tuple[int, bool]]
) -> None:
    byte_budget = ByteBudget(limit)
    batch_bytes = (70, 30)
    accounts = [learned(byte_budget, nbytes) for nbytes in batch_bytes]
    flying: list[list[int]] = [[], []]
    following = [1, 1]
    for who, opens in events:
        reservations, steps = accounts[who], flying[who]
        if opens and reservations.open(following[who], None, oldest=not steps):
            reservations.use(following[who], batch_bytes[who])
            steps.append(following[who])
            following[who] += 1
        elif steps and not opens:
            reservations.complete(steps[0], None)
            reservations.close(steps.pop(0))
        held_bytes = sum(
            len(steps) * nbytes
            for steps, nbytes in zip(flying, batch_bytes, strict=True)
        )
        assert byte_budget.held_bytes == held_bytes <= limit + sum(batch_bytes)


def test_a_short_tail_does_not_admit_too_many_whole_batches() -> None:
    byte_budget = ByteBudget(16 * 800)
    reservations = learned(byte_budget, 800)
    reservations.open(1, None, oldest=True)
    reservations.use(1, 8)  # a tail of one row in a hundred
    reservations.complete(1, None, whole=False)
    reservations.close(1)
    step = 2
    while reservations.open(step, None, oldest=step == 2):
        step += 1
    for opened in range(2, step):
        reservations.use(opened, 800)
    assert byte_budget.held_bytes <= byte_budget.limit_bytes + 800


def test_a_refused_pipeline_asks_resting_ones_for_their_bytes() -> None:
    def suspend() -> None:
        """Stand for dropping what was prefetched."""

    byte_budget = ByteBudget(150)
    reservations = learned(byte_budget, 100)
    byte_budget.rest(suspend)
    assert reservations.open(1, None, oldest=False)
    assert taken(reservations) == []
    assert not reservations.open(2, None, oldest=False)
    assert taken(reservations) == [suspend]
    byte_budget.resume(suspend)
    assert not reservations.open(2, None, oldest=False)
    assert taken(reservations) == []
