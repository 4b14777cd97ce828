"""Adjacent maps that are one operation, as their functions have a faster way together.

`decode`, for one, need not make the pixels that the operator after it leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from .program import Map, Operation, Rows, Work, of_stage, offered

FUSES = "__penstock_fused__"
"""The attribute of a function that may have a way together with those after it. Called
with these, it returns how many it takes along and a function for several samples, or
None. That one gets for each sample a function which returns the generator of the first,
the second, ... of them, valid until it is called again."""


@dataclass(frozen=True, slots=True)
class Fused(Map):
    """Adjacent maps that have a way together for several samples, with equal results.

    Samples that it leaves go through one after another.
    """

    rows: Rows = field(kw_only=True)
    maps: tuple[Map, ...] = field(kw_only=True)

    @classmethod
    def of(cls, maps: tuple[Map, ...], rows: Rows) -> Fused:
        """Return the operation of these maps, which have this way together."""
        first, *others = maps
        added = (each.stage.partition(" ")[2] for each in others)
        return cls(
            " + ".join((first.stage, *added)),
            first.number,
            first.function,
            any(each.wants_rng for each in maps),
            any(each.wants_ctx for each in maps),
            rows=rows,
            maps=maps,
        )

    def together(self) -> Rows | None:
        """Return what makes several samples at once."""
        return self.rows

    def _stream(self, work: Work, round_: int, index: int) -> Any:
        return lambda at: work.random.at(round_, index, self.maps[at].number)

    def call(self, sample: Any, work: Work, round_: int, index: int) -> Any:
        """Return what the maps make of one sample, one after another."""
        for each in self.maps:
            try:
                sample = each.call(sample, work, round_, index)
            except BaseException as error:
                of_stage(error, each.stage)
                raise
        return sample


def with_fused_maps(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return these operations, with maps that have a way together made one."""
    done: list[Operation] = []
    rest = list(operations)
    while rest:
        first, *rest = rest
        fuses = offered(first.function, FUSES) if isinstance(first, Map) else None
        followed = takewhile(lambda each: isinstance(each, Map), rest)
        maps = [each for each in (first, *followed) if isinstance(each, Map)]
        if fuses is None or any(each.one_by_one for each in maps):
            done.append(first)
            continue
        found = fuses([each.function for each in maps[1:]])
        if found is not None:
            count, rows = found
            first, rest = Fused.of(tuple(maps[: count + 1]), rows), rest[count:]
        done.append(first)
    return tuple(done)
