"""Compilation of the user's stages into a recipe that can run.

segments.py  which stages run together, and by which workers
caches.py    the caches, made from the stages before them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset

from ...config import Settings
from ...engine.batch.buffer import Buffers, collate_by_default
from ...engine.batch.device import DeviceStage
from ...engine.plan import (
    AHEAD,
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
from ...engine.program.operations import SeededRead, WorkerStart
from ...engine.program.program import Read
from ...engine.recipe import (
    AS_SHIPPED,
    Options,
    Recipe,
)
from ...engine.witness.hazards import is_stateless
from ...errors import SpecError, check
from ..schedule import Scheduled
from ..sources.source import identity_of
from ..stages import (
    BatchStage,
    ShuffleStage,
    SourceStage,
    Stage,
    order_of,
    repacks,
)
from .caches import caches_of, read_in_threads
from .segments import (
    Numbered,
    Working,
    fused,
    is_reader,
    on_batches,
    placed,
    with_batch_work,
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
    source, (number, batch), work, behind = _parts(stages)
    repack = repacks(stages)
    device = next((s for s in stages[::-1] if isinstance(s, DeviceStage)), None)
    buffers = _buffers(number, batch, device, repack=repack)
    order, caches = order_of(stages), caches_of(stages)
    plan = _plan(order, batch, shard, scheduled, repack=repack)
    seed = [settings.seed, *(s.seed for s in stages if isinstance(s, ShuffleStage))][-1]
    batch_work = on_batches(behind, settings, caches, shard.rank, pipeline=name)
    segments = fused(work, buffers.stage, settings, caches, pipeline=name, order=order)
    return Recipe(
        plan=plan,
        segments=segments
        if repack
        else with_batch_work(segments, batch_work, buffers, seed),
        buffers=buffers,
        batch_size=batch.size or batch.global_size,
        drop_last=batch.drop_last,
        error_budget=batch.error_budget,
        microbatches=batch.microbatches,
        seed=seed,
        repack=repack,
        iterable=source.iterable,
        device=device,
        options=options,
        cpu_cores=settings.cpu_cores,
        caches=tuple(caches.values()),
        data=identity_of(source.dataset),
        batch_work=batch_work,
    )


def compile_drawn(
    source: SourceStage,
    collate: Callable[[list[Any]], Any] | None,
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
        collate: the user's `collate_fn`; None: torch's default.
        settings: settings for arguments that the user left out.
        options: options of the whole pipeline.
        name: the name of the loader in the log.
        start: what each worker process does first; the global generators are then
            seeded before each sample. None: neither, because threads share both.
        pin_memory: whether batches are to be in pinned memory, if there is CUDA.
        fixed: what the program says that leaves all of this to the trainer.
    """
    stages = source, BatchStage(1, collate_fn=collate)  # samplers decide its size
    recipe = compile_recipe(stages, settings, Shard.single(), options, name=name)
    (segment,) = recipe.segments
    (read,) = segment.program.operations
    assert isinstance(read, Read)
    whole = reads_batches(source.dataset)
    if whole and collate is None and is_reader(read.get_many):
        whole = False  # the rows are the same, and batches are made of their columns
    elif whole:  # a function of the user's gets what torch would hand it
        read = replace(read, get_many=source.dataset.__getitems__, by_array=False)
    program = replace(segment.program, operations=(replace(read, whole=whole),))
    if start is not None:
        seeded_read = SeededRead(read.stage, read.get, read.get_many, start, whole)
        program = replace(program, operations=(seeded_read,), doubtful=())
    buffers = recipe.buffers
    if pin_memory and torch.cuda.is_available():
        from ...engine.to_device.lane import pinned

        buffers = pinned(buffers, None, slabs=True)
    collate = collate or (collate_by_default if whole else None)
    # Where worker processes are asked for, they call it, unless it may keep a state, of
    # which each would have its own.
    apart = source.executor == "process" and collate is not None
    by_workers = apart and is_stateless(collate)
    segment = replace(placed(source, segment, name), unsplit=whole, fixed=fixed)
    recipe = replace(
        recipe,
        segments=(replace(segment, program=program),),
        buffers=replace(buffers, collate=collate, whole=whole, by_workers=by_workers),
    )
    plan = DrawnPlan(0 if recipe.direct else AHEAD, whole=whole)
    return replace(recipe, plan=plan)


def reads_batches(dataset: Any) -> bool:
    """Whether a dataset reads whole batches by itself, as torch's fetcher sees it.

    A `Subset` of one that does not reads sample by sample.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def _parts(
    stages: Sequence[Stage],
) -> tuple[SourceStage, tuple[int, BatchStage], Sequence[Numbered], Sequence[Numbered]]:
    """Return the source, the stage that makes batches, and what works before and after.

    All but the source have their numbers in the pipeline.
    """
    source = stages[0]
    assert isinstance(source, SourceStage)
    numbered_stages = list(enumerate(stages))
    for number, batch in numbered_stages:
        if isinstance(batch, BatchStage):
            works = [(n, s) for n, s in numbered_stages if isinstance(s, Working)]
            before = sum(n < number for n, _ in works)
            return source, (number, batch), works[:before], works[before:]
    raise SpecError(
        "the pipeline has no batch size; end it with .batch(n) before iterating"
    )


def _buffers(
    number: int, batch: BatchStage, device: DeviceStage | None, *, repack: bool
) -> Buffers:
    buffers = Buffers(
        f"Batch(ID:{number})",
        batch.collate_fn,
        keep=repack,
        substitute=batch.on_error == "substitute",
    )
    if device is None or device.device.type != "cuda":
        return buffers
    from ...engine.to_device.lane import pinned

    return pinned(buffers, device.device.index, slabs=False)


def _plan(
    order: Order,
    batch: BatchStage,
    shard: Shard,
    scheduled: Scheduled | None,
    *,
    repack: bool,
) -> Plan:
    check(
        not repack or shard.size == 1,
        f"filter() and iterable datasets work on one rank, got {shard.size} ranks, "
        "which could end at different steps; use select() with the indices to keep",
    )
    schedule: Schedule
    size = batch.global_size or (batch.size and batch.size * shard.size)
    if batch.lengths is not None:
        order = _by_length(order, batch, batch.lengths, size, shard, repack=repack)
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
        schedule = ConstantSchedule(Setting(global_size=size or 1, image_size=None))
    plan = Plan(
        order,
        schedule,
        shard,
        # Batches form after a filter, so no ticket may be dropped here.
        drop_last=batch.drop_last and not repack,
        tail=batch.tail,
    )
    if batch.microbatches is not None:
        check_microbatches(plan, batch.microbatches, drop_last=batch.drop_last)
    return plan


def _by_length(
    order: Order,
    batch: BatchStage,
    lengths: Lengths,
    size: int | None,
    shard: Shard,
    *,
    repack: bool,
) -> Order:
    """Return the order with samples of similar length together."""
    check(
        not repack,
        "`lengths` decide which samples make a batch before any is read, which filter()"
        " and iterable datasets do not allow; use select() with the indices to keep, or"
        " group samples in a function of your own",
    )
    return order.then(
        Buckets(
            order,
            lengths,
            size=size,
            tokens=batch.max_tokens or batch.global_max_tokens,
            parts=1 if batch.max_tokens is None else shard.size,
            window=batch.window,
        )
    )


def check_microbatches(plan: Plan, count: int, *, drop_last: bool) -> None:
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
        plan.shard.size > 1 or drop_last,
        "microbatches have equal sizes, but an epoch's short last batch cannot be"
        " divided so; pass batch(..., drop_last=True)",
    )
