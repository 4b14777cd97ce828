"""Each step of an order applies to the sequence that the steps before it make."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.plan import Order
from penstock.errors import SpecError


def epoch_of(order: Order, epoch: int = 0) -> list[int]:
    return list(map(int, order.rows(epoch, 0, order.epoch_length).indices))


def rounds_of(order: Order, epoch: int = 0) -> list[int]:
    return list(map(int, order.rows(epoch, 0, order.epoch_length).rounds))


def test_without_shuffle_the_samples_come_in_order() -> None:
    assert epoch_of(Order.sequential(4)) == [0, 1, 2, 3]


def test_shuffle_gives_each_epoch_an_order_of_its_own() -> None:
    order = Order.sequential(100).shuffle(seed=0)
    assert sorted(epoch_of(order, 0)) == sorted(epoch_of(order, 1)) == list(range(100))
    assert epoch_of(order, 0) != epoch_of(order, 1)


def test_take_before_shuffle_shuffles_the_first_samples() -> None:
    order = Order.sequential(100).take(10).shuffle(0)
    assert sorted(epoch_of(order, 3)) == list(range(10))


def test_take_after_shuffle_keeps_the_first_of_each_epochs_own_order() -> None:
    shuffled = Order.sequential(100).shuffle(0)
    order = shuffled.take(10)
    assert epoch_of(order, 3) == epoch_of(shuffled, 3)[:10]
    assert set(epoch_of(order, 3)) != set(epoch_of(order, 4))


def test_select_before_shuffle_shuffles_the_selected() -> None:
    order = Order.sequential(100).select([7, 70, 7, 3]).shuffle(0)
    assert sorted(epoch_of(order)) == [3, 7, 7, 70]


def test_select_keeps_the_order_given() -> None:
    assert epoch_of(Order.sequential(9).select([8, 0, 4])) == [8, 0, 4]


def test_select_after_shuffle_chooses_positions_of_the_shuffled() -> None:
    shuffled = Order.sequential(50).shuffle(1)
    assert epoch_of(shuffled.select([4, 2])) == [
        epoch_of(shuffled)[4],
        epoch_of(shuffled)[2],
    ]


def test_each_pass_of_repeat_is_a_round_with_a_shuffle_of_its_own() -> None:
    once = Order.sequential(20).shuffle(0)
    thrice = once.repeat(3)
    assert epoch_of(thrice, 2) == [
        index for round_ in (6, 7, 8) for index in epoch_of(once, round_)
    ]
    assert rounds_of(thrice, 2) == [6] * 20 + [7] * 20 + [8] * 20


def test_shuffle_after_repeat_mixes_the_passes_and_keeps_their_rounds_apart() -> None:
    order = Order.sequential(20).repeat(2).shuffle(0)
    pairs = list(zip(epoch_of(order, 1), rounds_of(order, 1), strict=True))
    assert sorted(pairs) == [(i, r) for i in range(20) for r in (2, 3)]
    assert rounds_of(order, 1) != sorted(rounds_of(order, 1))


def test_take_after_repeat_cuts_the_epoch() -> None:
    assert epoch_of(Order.sequential(3).repeat(3).take(4)) == [0, 1, 2, 0]


def test_steps_that_change_nothing_make_no_difference() -> None:
    order = Order.sequential(5)
    assert order.take(5) == order.take(99) == order.repeat(1) == order


def test_an_order_prints_as_the_chain_that_made_it() -> None:
    order = Order.sequential(9).take(8).shuffle(4).repeat(2)
    assert str(order) == "sequential(9).take(8).shuffle(seed=4).repeat(2)"


def test_orders_are_equal_when_their_selections_are() -> None:
    order = Order.sequential(9)
    assert order.select([1, 2]) == order.select(np.array([1, 2], np.int32))
    assert order.select([1, 2]) != order.select([2, 1])


def test_a_selection_is_not_changed_from_outside() -> None:
    chosen = np.array([1, 2])
    order = Order.sequential(9).select(chosen)
    chosen[0] = 8
    assert epoch_of(order) == [1, 2]


def test_a_trillion_samples_repeated_a_million_times_need_no_memory() -> None:
    order = Order.sequential(10**12).shuffle(0).repeat(10**6)
    rows = order.rows(1, 10**18 - 5, 10**18)
    assert rows.rounds.tolist() == [2 * 10**6 - 1] * 5
    assert len(set(rows.indices.tolist())) == 5
    assert not len(order.rows(0, 7, 7))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 40)),
        st.tuples(st.just("repeat"), st.integers(1, 3)),
        st.tuples(st.just("shuffle"), st.integers(0, 2**64 - 1)),
        st.tuples(st.just("select"), st.integers(1, 12)),
    ),
    max_size=5,
)


@given(st.integers(1, 30), STEPS, st.integers(0, 3), st.data())
def test_any_chain_may_be_read_anywhere_and_no_row_comes_twice(
    length: int, steps: list[tuple[str, int]], epoch: int, data: st.DataObject
) -> None:
    order = Order.sequential(length)
    for name, value in steps:
        if name == "select":  # distinct positions, so that rows stay distinct
            chosen = np.random.default_rng(value).permutation(order.epoch_length)
            order = order.select(chosen[:value])
        else:
            order = getattr(order, name)(value)
    whole = order.rows(epoch, 0, order.epoch_length)
    pairs = list(zip(whole.indices.tolist(), whole.rounds.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == order.epoch_length
    assert all(0 <= index < length for index, _ in pairs)
    bounds = sorted(data.draw(st.tuples(*[st.integers(0, order.epoch_length)] * 2)))
    part = order.rows(epoch, *bounds)
    assert part.indices.tolist() == whole.part(*bounds).indices.tolist()
    assert part.rounds.tolist() == whole.part(*bounds).rounds.tolist()


def test_an_order_over_an_empty_dataset_is_refused() -> None:
    with pytest.raises(SpecError, match="`length` must be an int >= 1, got 0"):
        Order.sequential(0)


@pytest.mark.parametrize("n", [0, -3, 1.5, None])
def test_a_bad_count_is_refused_and_shown(n: object) -> None:
    order = Order.sequential(5)
    for method in (order.take, order.repeat):
        with pytest.raises(SpecError, match=f"`count` must be an int >= 1, got {n}"):
            method(n)  # type: ignore[arg-type]


def test_an_epoch_beyond_64_bits_is_refused() -> None:
    with pytest.raises(SpecError, match=r"`count` must be an int <= 9223372, got"):
        Order.sequential(10**12).repeat(10**8)


@pytest.mark.parametrize("bad", [-1, 5, 10**12])
def test_the_first_index_out_of_range_is_named(bad: int) -> None:
    with pytest.raises(SpecError, match=f">= 0 and < 5.*got {bad} at place 2"):
        Order.sequential(5).select([0, 4, bad, 99])


def test_a_mask_an_empty_list_and_a_table_are_not_selections() -> None:
    order = Order.sequential(2)
    with pytest.raises(SpecError, match=r"numpy\.flatnonzero"):
        order.select(np.array([True, False]))
    with pytest.raises(SpecError, match="must not be empty"):
        order.select([])
    with pytest.raises(SpecError, match=r"integers \[N\], got int64 \[1, 2\]"):
        order.select(np.array([[0, 1]]))


def test_a_seed_that_is_not_a_64_bit_int_is_refused() -> None:
    with pytest.raises(SpecError, match="`seed` must be an int"):
        Order.sequential(2).shuffle(-1)
