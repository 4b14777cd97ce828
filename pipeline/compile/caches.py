"""The caches of a pipeline, made from the stages before them.

Users place them, or penstock does between two epochs, with `options(cache="auto")`:
`autotune/caching.py` decides where one pays off. It is put among the stages here, if
the samples that it would store are the same each time as far as penstock can tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...cache.cache import REPEATED, REPEATED_DRAWS, Cache
from ...cache.fingerprint.key import fingerprint
from ...cache.tiers import Opening
from ...errors import SpecError, check
from ...system.printing import name_of
from ..stages import (
    CacheStage,
    MapStage,
    PerSample,
    SourceStage,
    Stage,
    executor_of,
    named,
    numbered,
)

if TYPE_CHECKING:
    from ...engine.observe.observation import Observation
    from ...engine.recipe import Recipe
    from ...system.resources import Budget

LOGGER = logging.getLogger("penstock")
PRIVATE = (
    "%s is private to this run: penstock cannot tell whether %s is the same in a later"
    " run; give the object that holds it a `__penstock_fingerprint__`, or create it on"
    " first use, and later runs will find the cache"
)


def caches_of(stages: Sequence[Stage]) -> dict[int, Cache]:
    """Return the caches among the stages by number, none of them open yet."""
    return {
        number: _cache(stages[:place], stage, f"Cache(ID:{number})")
        for place, (number, stage) in enumerate(numbered(stages))
        if isinstance(stage, CacheStage)
    }


def read_in_threads(stages: Sequence[Stage]) -> Sequence[Stage]:
    """Let threads read files if plain functions come between the source and a cache.

    The stages before a cache run together, and a plain function would block an event
    loop.
    """
    cached = [at for at, stage in enumerate(stages) if isinstance(stage, CacheStage)]
    source = stages[0]
    if not cached or not isinstance(source, SourceStage):
        return stages
    plain = [
        stage
        for stage in stages[: cached[-1]]
        if isinstance(stage, MapStage) and executor_of(stage) != "async"
    ]
    if not plain or executor_of(source) != "async":
        return stages
    check(
        hasattr(source.dataset, "in_threads"),
        f"{name_of(plain[0].function)} is a plain function between a dataset that"
        " is awaited and a cache; write it with async def, or put the cache before"
        " it",
    )
    threaded = source.dataset.in_threads()
    executor = "auto" if source.executor == "async" else source.executor
    return replace(source, dataset=threaded, executor=executor), *stages[1:]


def _cache(before: Sequence[Stage], stage: CacheStage, name: str) -> Cache:
    source = before[0]
    assert isinstance(source, SourceStage)
    maps = [each for each in before if isinstance(each, MapStage)]
    _check_mixture(source, maps, name)
    functions = [(name_of(each.function), each.function) for each in maps]
    found = fingerprint(source.dataset, functions, stage.version)
    if found.private_because is not None and not stage.placed:
        LOGGER.warning(PRIVATE, name, found.private_because)
    read = f"{type(source.dataset).__name__}({len(source.dataset)})"
    opening = Opening(
        name,
        about=" > ".join([read, *(each.label for each in maps)]),
        codec=stage.codec,
        samples=len(source.dataset),
        repeated=REPEATED_DRAWS if found.draws else REPEATED,
        disk=stage.disk,
        disk_limit=stage.disk_limit,
        optional=stage.placed,
    )
    return Cache(opening, found, found.digest.hex(), stage.ram)


def _check_mixture(source: Any, maps: Sequence[MapStage], name: str) -> None:
    """Raise `SpecError` unless all stages before a cache can run together."""
    stages = (source, *maps)
    for setting, left_out in (("num_parallel_workers", None), ("executor", "auto")):
        said = [getattr(stage, setting) for stage in stages]
        asked = sorted({repr(value) for value in said if value != left_out})
        check(
            len(asked) <= 1,
            f"all stages before {name} run together, so they share one `{setting}`, got"
            f" {' and '.join(asked)}; give it to one stage, or the same to all",
        )
    kinds = {executor_of(each) == "async" for each in (source, *maps)}
    check(
        len(kinds) == 1,
        f"before {name} some functions are coroutine functions and others are not, but"
        " all stages before a cache run together; make them all of one kind",
    )


# A cache that penstock places.

SHARE = 2
"""The largest share of the memory budget that a cache may take."""
IDLE = (
    "removed the cache: it saves no time, because samples are made as fast as they are"
    " read from it; penstock will not place it again."
)


def place(
    stages: Sequence[Stage],
    seen: Observation,
    budget: Budget,
    compile_recipe: Callable[[Sequence[Stage]], Recipe],
) -> tuple[Recipe, str] | None:
    """Return the recipe with a cache where it pays off most, and a line for the log.

    None if it never does.

    No cache comes after a function that draws at random, or that penstock cannot tell
    from another: a cached sample is made once and has to be the same each time.

    Args:
        stages: the stages without a cache.
        seen: observation of the last seconds of the previous epoch.
        budget: the budget; a cache takes at most half of its memory.
        compile_recipe: makes the recipe of stages.
    """
    from ...autotune import phrases
    from ...autotune.caching import worthwhile

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
            size = phrases.size(ram)
            return recipe, f"placed a cache of {size} in RAM: {point.line}."
    return None


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
