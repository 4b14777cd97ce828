"""Caches, made from the stages before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...cache.cache import REPEATED, REPEATED_DRAWS, Cache, Opening
from ...cache.fingerprint import fingerprint
from ...errors import LOGGER, check
from ...system.printing import name_of
from ..stages import CacheStage, MapStage, SourceStage, Stage, executor_of


def caches_of(stages: Sequence[Stage]) -> dict[int, Cache]:
    """Return the caches among the stages by number, none of them open yet."""
    return {
        number: _cache(stages[:number], stage, f"Cache(ID:{number})")
        for number, stage in enumerate(stages)
        if isinstance(stage, CacheStage)
    }


def read_in_threads(stages: Sequence[Stage]) -> Sequence[Stage]:
    """Let threads read files if plain functions come between the source and a cache.

    The stages before a cache run together, and a plain function would block an event
    loop.
    """
    numbers = [at for at, stage in enumerate(stages) if isinstance(stage, CacheStage)]
    source = stages[0]
    plain = [
        stage
        for stage in stages[: max(numbers, default=0)]
        if isinstance(stage, MapStage) and executor_of(stage) != "async"
    ]
    assert isinstance(source, SourceStage)
    if not plain or executor_of(source) != "async":
        return stages
    check(
        hasattr(source.dataset, "in_threads"),
        f"{name_of(plain[0].function)} is a plain function between a dataset that"
        " is awaited and a cache; write it with async def, or put the cache before"
        " it",
    )
    executor = "auto" if source.executor == "async" else source.executor
    reader = replace(source, dataset=source.dataset.in_threads(), executor=executor)
    return reader, *stages[1:]


def _cache(before: Sequence[Stage], stage: CacheStage, name: str) -> Cache:
    source = before[0]
    assert isinstance(source, SourceStage)
    maps = [map_stage for map_stage in before if isinstance(map_stage, MapStage)]
    _check_mixture(source, maps, name)
    functions = [
        (name_of(map_stage.function), map_stage.function) for map_stage in maps
    ]
    cache_fingerprint = fingerprint(source.dataset, functions, stage.version)
    if cache_fingerprint.private_because is not None:
        LOGGER.warning(
            "%s is private to this run: penstock cannot tell whether %s is the same in"
            " a later run; give the object that holds it a `__penstock_fingerprint__`,"
            " or create it on first use, and later runs will find the cache",
            name,
            cache_fingerprint.private_because,
        )
    source_name = f"{type(source.dataset).__name__}({len(source.dataset)})"
    opening = Opening(
        name,
        about=" > ".join([source_name, *(map_stage.label for map_stage in maps)]),
        codec=stage.codec,
        samples=len(source.dataset),
        repeated=REPEATED_DRAWS if cache_fingerprint.draws else REPEATED,
        disk=stage.disk,
        disk_limit=stage.disk_limit,
    )
    return Cache(opening, cache_fingerprint, stage.ram)


def _check_mixture(source: Any, maps: Sequence[MapStage], name: str) -> None:
    """Raise `SpecError` unless all stages before a cache can run together."""
    stages = (source, *maps)
    for setting in ("num_parallel_workers", "executor", "timeout"):
        values = {getattr(stage, setting) for stage in stages} - {None, "auto"}
        check(
            len(values) <= 1,
            f"all stages before {name} run together, so they share one `{setting}`, got"
            f" {' and '.join(sorted(map(repr, values)))}; give it to one stage, or the"
            " same to all",
        )
    check(
        len({executor_of(stage) == "async" for stage in stages}) == 1,
        f"before {name} some functions are coroutine functions and others are not, but"
        " all stages before a cache run together; make them all of one kind",
    )
