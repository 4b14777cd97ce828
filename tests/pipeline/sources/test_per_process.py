"""Values made once per process: the last used are kept, up to a number and a size."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.sources.source import PerProcess


@given(
    st.lists(st.integers(0, 9), max_size=60),
    st.integers(1, 5),
    st.integers(0, 25),
)
def test_the_values_used_last_are_kept_while_there_is_room(
    asked: list[int], kept: int, limit: int
) -> None:
    """Value n has n bytes; the newest stays, whatever its size."""
    made_keys: list[int] = []

    def make(key: int) -> int:
        made_keys.append(key)
        return key

    values = PerProcess(make, kept, int, lambda: limit)
    model: OrderedDict[int, None] = OrderedDict()
    for key in asked:
        is_new = key not in model
        before = len(made_keys)
        assert values(key) == key
        assert len(made_keys) == before + is_new
        model[key] = None
        model.move_to_end(key)
        while is_new and (len(model) > kept or (sum(model) > limit and len(model) > 1)):
            model.popitem(last=False)
        kept_bytes = [nbytes or 0 for _, nbytes in values._values.values()]  # noqa: SLF001
        assert sum(kept_bytes) == sum(model)
