"""Compilation of the user's stages into a recipe that can run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset

from ...cache.cache import REPEATED, REPEATED_DRAWS, Cache, Opening
from ...cache.fingerprint import fingerprint
from ...config import Settings
from ...engine.batch.buffer import Buffers
from ...engine.batch.device import DeviceStage
from ...engine.batch.tensors import collate_by_default
from ...engine.plan import (
    Buckets,
    ConstantSchedule,
    DrawnPlan,
    Lengths,
    Order,
    Plan,
    Schedule,
    Setting,
    Shard,
)
from ...engine.plan.drawn import AHEAD
from ...engine.program.program import Read
from ...engine.program.seeding import SeededRead, WorkerStart
from ...engine.recipe import (
    AS_SHIPPED,
    BatchRecipe,
    Options,
    Recipe,
    SegmentRecipe,
)
from ...engine.witness.hazards import is_stateless
from ...errors import SpecError, check
from ...system.printing import name_of
from ..schedule import Scheduled
from ..sources.source import identity_of
from ..stages import (
    BatchStage,
    CacheStage,
    FilterStage,
    MapStage,
    PerSample,
    ShuffleStage,
    SourceStage,
    Stage,
    executor_of,
    order_of,
)
from .segments import (
    Numbered,
    found_kind,
    fused,
    is_reader,
    on_batches,
    with_batch_work,
)

LOGGER = logging.getLogger("penstock")
PRIVATE = (
    "%s is private to this run: penstock cannot tell whether %s is the same in a later"
    " run; give the object that holds it a `__penstock_fingerprint__`, or create it on"
    " first use, and later runs will find the cache"
)


def compile_recipe(
    stages: Sequence[Stage],
    settings: Settings,
    shard: Shard,
    options: Options = AS_SHIPPED,
    scheduled: Scheduled | None = None,
    name: str = "",
) -> Recipe:
    """Build the recipe of a pipeline.

    Args:
        stages: the stages.
        settings: settings for arguments that the user left out.
        shard: this rank's share of the global batches.
        options: options of the whole pipeline.
        scheduled: the values that change during training.
        name: the name of the pipeline in the log.

    Raises:
        SpecError: the stages do not make a pipeline.
    """
    stages = read_in_threads(stages)
    source = stages[0]
    assert isinstance(source, SourceStage)
    number, batch = _batch(stages)
    work, behind = _work(stages, number)
    repack = _repacks(source, work, shard)
    buffers = _buffers(number, batch, _device(stages), repack=repack)
    order, caches = order_of(stages), caches_of(stages)
    plan = _plan(order, batch, shard, scheduled, repack=repack)
    seed = _seed(stages, settings)
    batch_work = on_batches(behind, settings, caches, shard.rank, name)
    segments = fused(work, buffers.stage, settings, caches, name, order)
    return Recipe(
        plan,
        segments if repack else with_batch_work(segments, batch_work, buffers, seed),
        buffers,
        BatchRecipe(
            batch.size or batch.global_size,
            batch.drop_last,
            batch.error_budget,
            batch.microbatches,
        ),
        seed,
        repack,
        source.iterable,
        _device(stages),
        options,
        settings.cpu_cores,
        tuple(caches.values()),
        identity_of(source.dataset),
        batch_work,
    )


def compile_drawn(
    source: SourceStage,
    batch: BatchStage,
    settings: Settings,
    options: Options,
    *,
    name: str,
    start: WorkerStart | None,
    pin_memory: bool = False,
    fixed: str = "",
) -> Recipe:
    """Build the recipe of batches that torch's samplers draw.

    Args:
        source: map-style. With `executor="auto"` it is measured inline first, even if
            no two threads may share its data.
        batch: how to collate rows; its size is ignored.
        settings: settings for arguments that the user left out.
        options: options of the whole pipeline.
        name: the name of the loader in the log.
        start: what each worker process does first; the global generators are then
            seeded before each sample. None: neither, because threads share both.
        pin_memory: whether batches are to be in pinned memory, if there is CUDA.
        fixed: what the program says that leaves all of this to the trainer.
    """
    stages = source, batch
    recipe = compile_recipe(stages, settings, Shard.single(), options, name=name)
    (segment,) = recipe.segments
    (read,) = segment.program.operations
    assert isinstance(read, Read)
    whole = reads_batches(source.dataset)
    if whole and batch.collate_fn is None and is_reader(read.get_many):
        whole = False  # the rows are the same, and batches are made of their columns
    elif whole:  # a function of the user's gets what torch would hand it
        read = replace(read, get_many=source.dataset.__getitems__, by_array=False)
    program = replace(segment.program, operations=(replace(read, whole=whole),))
    if start is not None:
        seeded = SeededRead(read.stage, read.get, read.get_many, start, whole)
        program = replace(program, operations=(seeded,), doubtful=())
    buffers = recipe.buffers
    if pin_memory and torch.cuda.is_available():
        from ...engine.to_device.pinning import pinned

        buffers = pinned(buffers, None, slabs=True)
    segment = replace(_placed(source, segment, name), unsplit=whole, fixed=fixed)
    recipe = replace(
        recipe,
        segments=(replace(segment, program=program),),
        buffers=collated(buffers, whole=whole, apart=source.executor == "process"),
    )
    ahead = 0 if recipe.direct else AHEAD
    return replace(recipe, plan=DrawnPlan(ahead, whole=whole))


def _placed(source: SourceStage, segment: SegmentRecipe, name: str) -> SegmentRecipe:
    """Return the segment of a torch loader where its samples are made at first."""
    if source.executor == "inline":
        return replace(segment, stays="")  # the program said so in words of its own
    if source.executor != "auto" or source.num_parallel_workers is not None:
        return segment
    if source.thread_safe:
        return replace(segment, executor="auto")
    executor, stays = found_kind(segment.name, source.dataset, name)
    return replace(segment, executor=executor, stays=stays)


def collated(buffers: Buffers, *, whole: bool, apart: bool) -> Buffers:
    """Return buffers for batches that are collated as in torch.

    Args:
        buffers: with the user's `collate_fn`, if there is one.
        whole: whether it gets what the dataset read for the whole batch.
        apart: whether worker processes are asked for. They call it, unless it may keep
            a state, of which each would have its own.
    """
    collate = buffers.collate or (collate_by_default if whole else None)
    by_workers = apart and collate is not None and is_stateless(collate)
    return replace(buffers, collate=collate, whole=whole, by_workers=by_workers)


def reads_batches(dataset: Any) -> bool:
    """Whether a dataset reads whole batches by itself, as torch's fetcher sees it.

    A `Subset` of one that does not reads sample by sample.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def _work(stages: Sequence[Stage], batch: int) -> tuple[list[Numbered], list[Numbered]]:
    """Return the numbered stages that work on samples, and those on batches.

    Args:
        stages: stages of the pipeline.
        batch: number of the stage that makes batches.
    """
    work: list[Numbered] = [
        (number, stage)
        for number, stage in enumerate(stages)
        if isinstance(stage, (PerSample, CacheStage))
    ]
    before = sum(number < batch for number, _ in work)
    return work[:before], work[before:]


def _batch(stages: Sequence[Stage]) -> tuple[int, BatchStage]:
    """Return the stage that makes batches, and its number in the pipeline."""
    for number, stage in enumerate(stages):
        if isinstance(stage, BatchStage):
            return number, stage
    raise SpecError(
        "the pipeline has no batch size; end it with .batch(n) before iterating"
    )


def _device(stages: Sequence[Stage]) -> DeviceStage | None:
    return next((each for each in stages[::-1] if isinstance(each, DeviceStage)), None)


def _buffers(
    number: int, batch: BatchStage, device: DeviceStage | None, *, repack: bool
) -> Buffers:
    substitute = batch.on_error == "substitute"
    name = f"Batch(ID:{number})"
    buffers = Buffers(name, batch.collate_fn, keep=repack, substitute=substitute)
    if device is None or device.device.type != "cuda":
        return buffers
    from ...engine.to_device.pinning import pinned

    return pinned(buffers, device.device.index, slabs=False)


def _repacks(source: SourceStage, work: Sequence[Numbered], shard: Shard) -> bool:
    """Whether batches can only be formed at run time, from the remaining samples."""
    repack = source.iterable or any(isinstance(s, FilterStage) for _, s in work)
    check(
        not repack or shard.size == 1,
        f"filter() and iterable datasets work on one rank, got {shard.size} ranks, "
        "which could end at different steps; use select() with the indices to keep",
    )
    return repack


def _seed(stages: Sequence[Stage], settings: Settings) -> int:
    """Return the seed of random functions: the shuffle's seed, if there is one."""
    seeds = [stage.seed for stage in stages if isinstance(stage, ShuffleStage)]
    return seeds[-1] if seeds else settings.seed


def _plan(
    order: Order,
    batch: BatchStage,
    shard: Shard,
    scheduled: Scheduled | None,
    *,
    repack: bool,
) -> Plan:
    schedule: Schedule
    if batch.lengths is not None:
        order = _by_length(order, batch, batch.lengths, shard, repack=repack)
    if scheduled is not None:
        check(
            not repack,
            "a schedule needs batches that are planned ahead, which filter() and"
            " iterable datasets rule out; replace filter() by select() with the indices"
            " to keep, and the iterable by a map-style dataset",
        )
        schedule = scheduled.resolve(shard.size)
    else:
        # If tokens limit batches, each batch has its own size.
        per_rank = 1 if batch.size is None else batch.size * shard.size
        size = batch.global_size or per_rank
        schedule = ConstantSchedule(Setting(global_size=size, image_size=None))
    # Batches form after a filter, so no ticket may be dropped here.
    drop_last = batch.drop_last and not repack
    plan = Plan(order, schedule, shard, drop_last=drop_last, tail=batch.tail)
    if batch.microbatches is not None:
        check_microbatches(plan, batch.microbatches)
    return plan


def _by_length(
    order: Order, batch: BatchStage, lengths: Lengths, shard: Shard, *, repack: bool
) -> Order:
    """Return the order with samples of similar length together."""
    check(
        not repack,
        "`lengths` decide which samples make a batch before any is read, which filter()"
        " and iterable datasets do not allow; use select() with the indices to keep, or"
        " group samples in a function of your own",
    )
    per_rank = batch.max_tokens is not None
    size = batch.size and batch.size * shard.size
    buckets = Buckets(
        order,
        lengths,
        size=None if batch.has_budget else batch.global_size or size,
        tokens=batch.max_tokens or batch.global_max_tokens,
        parts=shard.size if per_rank else 1,
        window=batch.window,
    )
    return order.then(buckets)


def check_microbatches(plan: Plan, count: int) -> None:
    """Raise `SpecError` unless each batch has `count` equal parts on every rank."""
    whole = plan.shard.size * count
    for run in plan.timeline.runs:
        check(
            run.size % whole == 0,
            f"{count} microbatches on {plan.shard.size} ranks need a batch size"
            f" divisible by {whole}, got {run.size} (in force from epoch {run.epoch})"
            "; change the batch size or the number of microbatches",
        )
    check(
        plan.shard.size > 1 or plan.drop_last,
        "microbatches have equal sizes, but an epoch's short last batch cannot be"
        " divided so; pass batch(..., drop_last=True)",
    )


# Caches, made from the stages before them.


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
    if found.private_because is not None:
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
    )
    return Cache(opening, found, stage.ram)


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
