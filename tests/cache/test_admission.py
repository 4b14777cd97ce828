"""Namespaces in use stay; others go, the longest unused first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.folder import RESTING_S, victims

NOW_S = 1e9
HELD = st.dictionaries(
    st.binary(min_size=8, max_size=8),
    st.tuples(st.floats(0, 3 * RESTING_S).map(NOW_S.__sub__), st.integers(1, 99)),
)


@given(held=HELD, wanted=st.integers(-9, 999))
def test_only_as_much_goes_as_is_wanted_and_nothing_that_may_be_in_use(
    held: dict[bytes, tuple[float, int]], wanted: int
) -> None:
    gone = victims(held, NOW_S, wanted)
    assert all(NOW_S - held[name][0] > RESTING_S for name in gone)
    assert sum(held[name][1] for name in gone[:-1]) < max(1, wanted)
    survivors = [held[name][0] for name in held.keys() - set(gone)]
    assert all(held[name][0] <= newer for name in gone for newer in survivors)
