"""A cache that penstock places itself, between two epochs: `options(cache="auto")`.

`autotune/caching.py` decides where a cache pays off. This module puts it among the
stages, if the samples that it would store are the same each time as far as penstock can
tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SpecError
from .compile.segments import named
from .stages import CacheStage, PerSample, Stage, numbered

if TYPE_CHECKING:
    from ..autotune.caching import CachePoint
    from ..cache.cache import Cache
    from ..engine.observe.observation import Observation
    from ..engine.recipe import Recipe
    from ..system.resources import Budget

SHARE = 2
"""The largest share of the memory budget that a cache may take."""


IDLE = (
    "removed the cache: it saves no time, because samples are made as fast as they are"
    " read from it; penstock will not place it again."
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A recipe with a cache, and the line in the log about it."""

    recipe: Recipe
    line: str


def place(
    stages: Sequence[Stage],
    seen: Observation,
    budget: Budget,
    compile_recipe: Callable[[Sequence[Stage]], Recipe],
) -> Placed | None:
    """Return the recipe with a cache where it pays off most; None if it never does.

    No cache comes after a function that draws at random, or that penstock cannot tell
    from another: a cached sample is made once and has to be the same each time.

    Args:
        stages: the stages without a cache.
        seen: observation of the last seconds of the previous epoch.
        budget: the budget; a cache takes at most half of its memory.
        compile_recipe: makes the recipe of stages.
    """
    from ..autotune.caching import worthwhile

    room = budget.memory_bytes // SHARE
    for point in worthwhile(seen, room):
        ram = min(room, point.room_bytes)
        try:
            recipe = compile_recipe(with_cache(stages, point.part, ram))
        except SpecError:  # what would run together then has settings of its own
            continue
        (cache,) = recipe.caches
        found = cache.fingerprint
        if not found.draws and found.private_because is None:
            return Placed(recipe, line_of(point, ram))
    return None


def line_of(point: CachePoint, ram: int) -> str:
    """Return the line for the log."""
    from ..autotune import phrases

    return f"placed a cache of {phrases.size(ram)} in RAM: {point.line}."


def with_cache(stages: Sequence[Stage], part: str, ram: int) -> tuple[Stage, ...]:
    """Return the stages with a cache after the stage that the log calls `part`."""
    found: list[Stage] = []
    for number, stage in numbered(stages):
        found.append(stage)
        if isinstance(stage, PerSample) and named(number, stage) == part:
            found.append(CacheStage(ram=ram, placed=True))
    return tuple(found)


def is_idle(cache: Cache) -> bool:
    """Whether a placed cache has found samples but saved no work."""
    statistics = cache.statistics()
    if not cache.opening.optional or statistics is None or not statistics.hits:
        return False
    return not any(tier.seconds_saved for tier in statistics.tiers)
