"""Bytes in flight: one purse for all pipelines, the oldest batch always granted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.byte_budget import Account, Purse


def nobody() -> None:
    """Is poked, and does nothing."""


def learned(purse: Purse, nbytes: int, image_size: int | None = None) -> Account:
    """Return an account that has seen a batch of so many bytes."""
    account = Account(purse, nobody)
    account.open(0, image_size, oldest=True)
    account.hold(0, nbytes)
    account.complete(0, image_size)
    account.close(0)
    return account


def test_while_no_batch_is_known_only_the_oldest_is_granted() -> None:
    account = Account(Purse(10**9), nobody)
    assert not account.open(1, None, oldest=False)
    assert account.open(0, None, oldest=True)
    assert not account.open(1, None, oldest=False)


def test_batches_are_granted_while_they_fit() -> None:
    purse = Purse(250)
    account = learned(purse, 100)
    granted = [account.open(step, None, oldest=False) for step in range(3)]
    assert granted == [True, True, False]
    assert purse.held_bytes == 200


def test_a_batch_that_fits_exactly_is_granted() -> None:
    assert learned(Purse(100), 100).open(1, None, oldest=False)


def test_the_oldest_is_granted_whatever_others_hold() -> None:
    purse = Purse(100)
    purse.charge(100, None)
    account = learned(purse, 80)
    assert not account.open(5, None, oldest=False)
    assert account.open(5, None, oldest=True)
    assert purse.held_bytes == 180


def test_what_a_batch_holds_beyond_its_estimate_is_charged_at_once() -> None:
    purse = Purse(1000)
    account = learned(purse, 100)
    account.open(1, None, oldest=True)
    account.hold(1, 60)
    assert purse.held_bytes == 100
    account.hold(1, 60)
    assert purse.held_bytes == 120
    account.hold(1, -30)
    assert purse.held_bytes == 120  # what it has held it may hold again
    account.complete(1, None)
    assert purse.held_bytes == 90


def test_a_complete_batch_is_charged_what_it_holds() -> None:
    purse = Purse(1000)
    account = learned(purse, 100)
    account.open(1, None, oldest=True)
    account.hold(1, 70)
    account.complete(1, None)
    assert purse.held_bytes == 70
    account.close(1)
    assert purse.held_bytes == 0


def test_the_estimate_rises_at_once_and_falls_by_an_eighth() -> None:
    account = learned(Purse(0), 800)
    for step, (held, estimate) in enumerate([(0, 700), (900, 900), (100, 800)]):
        account.open(step, None, oldest=True)
        account.hold(step, held)
        account.complete(step, None)
        account.close(step)
        assert account.expected(None) == estimate


@pytest.mark.parametrize(
    ("size", "expected"), [(64, 4000), (48, 2250), (32, 1000), (16, 1000)]
)
def test_a_larger_image_is_expected_to_hold_more_by_its_area(
    size: int, expected: int
) -> None:
    assert learned(Purse(0), 1000, 32).expected(size) == expected


def test_the_most_a_batch_held_counts_not_what_it_ends_with() -> None:
    account = Account(Purse(0), nobody)
    account.open(0, None, oldest=True)
    account.hold(0, 500)
    account.hold(0, -400)
    account.complete(0, None)
    assert account.statistics().batch_bytes == 500
    assert account.statistics().held_bytes == 100
    assert account.statistics().peak_bytes == 500


def test_who_is_refused_is_poked_once_when_bytes_come_free() -> None:
    poked: list[str] = []
    purse = Purse(100)
    first = learned(purse, 60)
    second = Account(purse, lambda: poked.append("second"))
    second.open(0, None, oldest=True)
    second.hold(0, 60)
    second.complete(0, None)
    second.close(0)
    first.open(1, None, oldest=False)
    assert not second.open(1, None, oldest=False)
    first.close(1)
    for poke in first.take_pokes():
        poke()
    assert poked == ["second"]
    first.open(2, None, oldest=False)
    first.close(2)
    assert first.take_pokes() == []


def test_a_larger_budget_pokes_who_was_refused() -> None:
    poked: list[int] = []
    purse = Purse(0)
    assert not purse.charge(10, lambda: poked.append(1))
    for poke in purse.resize(10):
        poke()
    assert poked == [1]
    assert purse.charge(10, nobody)


def test_who_has_left_is_not_poked() -> None:
    purse = Purse(0)
    account = learned(purse, 10)
    purse.charge(10, None)
    assert not account.open(1, None, oldest=False)
    account.close_all()
    assert purse.release(10) == []


def test_closing_a_batch_that_is_gone_gives_nothing_back_twice() -> None:
    purse = Purse(1000)
    account = learned(purse, 100)
    account.open(1, None, oldest=True)
    account.close(1)
    account.close(1)
    assert purse.held_bytes == 0


@given(
    limit=st.integers(0, 500),
    events=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60),
)
def test_batches_alike_stay_under_the_limit_and_one_batch_of_each_pipeline(
    limit: int, events: list[tuple[int, bool]]
) -> None:
    purse = Purse(limit)
    batch_bytes = (70, 30)
    accounts = [learned(purse, nbytes) for nbytes in batch_bytes]
    flying: list[list[int]] = [[], []]
    following = [1, 1]
    for who, opens in events:
        account, steps = accounts[who], flying[who]
        if opens and account.open(following[who], None, oldest=not steps):
            account.hold(following[who], batch_bytes[who])
            steps.append(following[who])
            following[who] += 1
        elif steps and not opens:
            account.complete(steps[0], None)
            account.close(steps.pop(0))
        held = sum(
            len(steps) * nbytes
            for steps, nbytes in zip(flying, batch_bytes, strict=True)
        )
        assert purse.held_bytes == held <= limit + sum(batch_bytes)


def test_a_short_tail_does_not_let_too_many_whole_batches_in() -> None:
    purse = Purse(16 * 800)
    account = learned(purse, 800)
    account.open(1, None, oldest=True)
    account.hold(1, 8)  # a tail of one row in a hundred
    account.complete(1, None, whole=False)
    account.close(1)
    step = 2
    while account.open(step, None, oldest=step == 2):
        step += 1
    for opened in range(2, step):
        account.hold(opened, 800)
    assert purse.held_bytes <= purse.limit_bytes + 800


def test_who_is_refused_asks_those_that_rest_to_give_back() -> None:
    def park() -> None:
        """Would drop what was prefetched."""

    purse = Purse(150)
    account = learned(purse, 100)
    purse.rest(park)
    assert account.open(1, None, oldest=False)
    assert account.take_pokes() == []
    assert not account.open(2, None, oldest=False)
    assert account.take_pokes() == [park]
    purse.rouse(park)
    assert not account.open(2, None, oldest=False)
    assert account.take_pokes() == []
