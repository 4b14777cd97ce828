"""Where in a pipeline a stage may stand."""

from __future__ import annotations

from collections.abc import Sequence

from .cache_stage import CacheStage
from .device import DeviceStage
from .errors import check
from .spec import (
    BatchStage,
    FilterStage,
    MapStage,
    RepeatStage,
    SelectStage,
    ShuffleStage,
    SourceStage,
    Stage,
)
from .staffing import wanted_by

__all__ = ["check_place", "check_sized"]


def check_place(stages: Sequence[Stage], stage: Stage) -> None:
    """Raise `SpecError` if `stage` cannot come after `stages`."""
    batched = any(isinstance(before, BatchStage) for before in stages)
    shown = repr(stage).lstrip(".")
    if isinstance(stage, DeviceStage):
        check(batched, f"{shown} copies batches: put it after .batch(n)")
        return
    check(
        not batched,
        f"{shown} cannot come after .batch(): what changes samples stands before it",
    )
    if isinstance(stage, CacheStage):
        check_cacheable(stages, shown)
    source = stages[0]
    check(
        not (
            isinstance(source, SourceStage)
            and source.iterable
            and isinstance(stage, (SelectStage, ShuffleStage, RepeatStage))
        ),
        f"{shown} needs samples with an index, which an iterable dataset does not "
        "have; let the dataset do it, or use a map-style one",
    )


def check_cacheable(stages: Sequence[Stage], shown: str) -> None:
    """Raise `SpecError` unless all `stages` make of an index is always the same."""
    for stage in stages:
        check(
            not (isinstance(stage, SourceStage) and stage.iterable),
            f"{shown} needs samples with an index to be found by, which an iterable"
            " dataset does not have; use a map-style one",
        )
        check(
            not isinstance(stage, FilterStage),
            f"{shown} cannot come after filter(); put it before that, or use select()"
            " with the indices to keep",
        )
        check(
            not (isinstance(stage, MapStage) and "rng" in wanted_by(stage.function)),
            f"{shown} would store one draw of a random function for ever: a map()"
            " before it takes `rng`; put the cache before that",
        )


def check_sized(batch: BatchStage, *, scheduled: bool) -> None:
    """Raise `SpecError` unless the batch size is said once."""
    said = [size for size in (batch.size, batch.global_size) if size is not None]
    if scheduled:
        check(
            not said,
            f"this pipeline has a schedule, which says the batch size; write .batch()"
            f" without one, got {said}",
        )
        return
    check(
        len(said) == 1,
        "batch() needs a size: either batch(n), per rank, or batch(global_size=n), "
        f"over all ranks, got {batch.size!r} and {batch.global_size!r}",
    )
