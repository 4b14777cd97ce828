"""Records of what happened during some time, which add and subtract.

Each field of such a record says what it is: a total, a mean, or (unmarked) the state at
the end. So one rule joins two windows that follow each other, and takes a window out of
two readings of what has happened since the start.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, Self

TOTAL = {"combines": "total"}
"""Marks a field that grows: windows add up."""
MEAN = {"combines": "mean"}
"""Marks a mean, over the record's time or over its rows."""
SHARE = {"combines": "share"}
"""Marks a mean that never exceeds 1."""
PARTS = {"combines": "parts"}
"""Marks a record, or a tuple of records, of the same time; None stays None."""


class Totals:
    """A frozen dataclass whose fields are marked.

    `earlier + later` joins two windows that follow each other. `later - earlier`, of
    two records that began at the same time, is what happened in between.
    """

    __slots__ = ()

    weight: ClassVar[str] = ""
    """The field by which means are weighted; by default, that of the record around."""

    def __add__(self, later: Self) -> Self:
        joined: Self = _combined(self, later, 1, (0.0, 0.0))
        return joined

    def __sub__(self, earlier: Self) -> Self:
        between: Self = _combined(earlier, self, -1, (0.0, 0.0))
        return between


def _combined(
    first: Any, second: Any, sign: Literal[1, -1], weights: tuple[float, float]
) -> Any:
    """Return the second record with the first one added, or taken away.

    Args:
        first: a record of the same class.
        second: the later record.
        sign: 1 adds the first one, -1 takes it away.
        weights: those of the record around; the first one is negative if taken away.
    """
    if by := second.weight:
        weights = sign * getattr(first, by), getattr(second, by)
    kind: type = type(second)
    changed = {}
    for name, how in _marked(kind):
        a, b = getattr(first, name), getattr(second, name)
        if how == "total":
            changed[name] = b + sign * a
        elif how == "parts":
            changed[name] = _combined_parts(a, b, sign, weights)
        else:
            whole = sum(weights)
            total = a * weights[0] + b * weights[1]
            mean = max(0.0, total / whole) if whole > 0 else 0.0
            changed[name] = min(1.0, mean) if how == "share" else mean
    return replace(second, **changed)


def _combined_parts(
    first: Any, second: Any, sign: Literal[1, -1], weights: tuple[float, float]
) -> Any:
    if isinstance(second, tuple):
        pairs = zip(first, second, strict=True)
        return tuple(_combined(a, b, sign, weights) for a, b in pairs)
    absent = first is None or second is None
    return second if absent else _combined(first, second, sign, weights)


@cache
def _marked(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the marked fields of a class, and what each one is."""
    return tuple(
        (field.name, field.metadata["combines"])
        for field in fields(kind)
        if field.metadata
    )
