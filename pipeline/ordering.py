"""The order that a pipeline's stages make, wherever among them they stand."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import Order
from .spec import (
    RepeatStage,
    SelectStage,
    ShuffleStage,
    SourceStage,
    Stage,
    TakeStage,
)

__all__ = ["order_of"]

ENDLESS = 1 << 62
"""Length an iterable is planned with; it says itself when it ends."""


def order_of(stages: Sequence[Stage]) -> Order:
    """Return which sample stands where.

    Raises:
        SpecError: a count below 1, no indices, or one that the dataset does not have.
    """
    source = stages[0]
    assert isinstance(source, SourceStage)
    order = Order.sequential(ENDLESS if source.iterable else len(source.dataset))
    for stage in stages[1:]:
        match stage:
            case SelectStage():
                order = order.select(stage.indices)
            case TakeStage():
                order = order.take(stage.count)
            case RepeatStage():
                order = order.repeat(stage.count)
            case ShuffleStage():
                order = order.shuffle(stage.seed)
    return order
