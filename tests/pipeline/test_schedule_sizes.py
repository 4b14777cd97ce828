"""Which sizes a schedule may give, wherever it gives them."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.engine.plan import Place

SIZES = ("batch_size", "image_size")


def setting(**sizes: Any) -> Any:
    settings = {"batch_size": 8, **sizes}
    return ps.schedule.of(**settings).resolve(1).at(Place(0, 0, 0, 100))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [1, 2, 3.0])
def test_a_whole_number_from_one_on_is_a_size(name: str, size: float) -> None:
    sizes = setting(**{name: ps.schedule.function(lambda epoch: size)})
    value = sizes.global_size if name == "batch_size" else sizes.image_size
    assert value == size
    assert type(value) is int


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_nothing_else_is_a_size(name: str, size: float) -> None:
    curve = ps.schedule.function(lambda epoch: size)
    with pytest.raises(ps.SpecError, match=f"`{name}` must be a whole number >= 1"):
        setting(**{name: curve})
