"""From what the user wrote to what can run: stages in, a recipe out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..cache.tiers import Cache
from .buffers import Buffers
from .cache_stage import CacheStage
from .caching import caches_of, read_in_threads
from .device import DeviceStage
from .errors import SpecError, StateError
from .fusion import Numbered, SegmentRecipe, fused
from .identity import identity_of
from .options import AS_SHIPPED, Options
from .ordering import order_of
from .plan import (
    Constant,
    Cursor,
    DrawnPlan,
    Order,
    Plan,
    Setting,
    Shard,
    read_state,
    write_state,
)
from .plan.schedule import Schedule
from .program import Program, Read
from .sample_seeding import SeededRead
from .schedule import Scheduled
from .spec import (
    BatchStage,
    Defaults,
    FilterStage,
    MapStage,
    ShuffleStage,
    SourceStage,
    Stage,
)
from .worker_start import WorkerStart

__all__ = ["Recipe", "compile_drawn", "compile_recipe"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A pipeline that can run."""

    plan: Plan | DrawnPlan
    segments: tuple[SegmentRecipe, ...]
    buffers: Buffers
    batch: BatchStage
    seed: int
    repack: bool
    """Batches are made from what a filter or an iterable leaves, at run time."""
    iterable: bool
    device: DeviceStage | None
    options: Options
    cpu_cores: float
    """Cores that its workers may keep busy together."""
    caches: tuple[Cache, ...] = ()
    data: str | None = None
    """Which data set it is, if that is known."""

    def facts(self) -> dict[str, int | str]:
        """Return what must be the same on all ranks."""
        known = {} if self.data is None else {"data set": self.data}
        return {**self.planned.facts(), **known}

    @property
    def planned(self) -> Plan:
        """The plan of a pipeline, which knows all its batches."""
        assert isinstance(self.plan, Plan)
        return self.plan

    def state(self, cursor: Cursor) -> dict[str, object]:
        """Return `cursor` as O(1) JSON."""
        state = write_state(cursor, self.planned.hash, self.planned.facts())
        return state if self.data is None else {**state, "data": self.data}

    def restore(self, state: Mapping[str, object], *, override: bool = False) -> Cursor:
        """Return the cursor in `state`; StateError if it does not belong here."""
        plan = self.planned
        saved = state.get("data") if isinstance(state, Mapping) else None
        if None not in (saved, self.data) and saved != self.data and not override:
            raise StateError(OTHER_DATA)
        if self.repack:  # its batches are not the plan's, so the plan cannot check them
            return read_state(state, plan.hash, plan.facts(), override=override)
        return plan.restore(state, override=override)


def compile_recipe(
    stages: Sequence[Stage],
    defaults: Defaults,
    shard: Shard,
    options: Options = AS_SHIPPED,
    scheduled: Scheduled | None = None,
) -> Recipe:
    """Build the recipe of a pipeline.

    Raises:
        SpecError: the stages do not make a pipeline.
    """
    stages = read_in_threads(stages)
    source = stages[0]
    assert isinstance(source, SourceStage)
    batch = _batch(stages)
    if batch is None:
        raise SpecError(
            "the pipeline has no batch size; end it with .batch(n) before iterating"
        )
    work = _work(stages)
    repack = _repacks(source, work, shard)
    order = order_of(stages)
    number = next(n for n, stage in enumerate(stages) if stage is batch)
    name = f"Batch(ID:{number})"
    buffers = Buffers(
        name, batch.collate_fn, keep=repack, substitute=batch.on_error == "substitute"
    )
    plan = _plan(order, batch, shard, scheduled, repack=repack)
    caches = caches_of(stages)
    return Recipe(
        plan,
        fused(work, name, defaults, caches),
        buffers,
        batch,
        _seed(stages, defaults),
        repack,
        source.iterable,
        next((each for each in stages[::-1] if isinstance(each, DeviceStage)), None),
        options,
        defaults.cpu_cores,
        tuple(caches.values()),
        identity_of(source.dataset),
    )


OTHER_DATA = (
    "the state belongs to another data set (its files, or its fingerprint, are not"
    " those of this one); build the pipeline on the data it was saved with, or go on in"
    " this one from the same position of the epoch with load_state_dict(state,"
    " override=True)"
)


def compile_drawn(
    source: SourceStage,
    batch: BatchStage,
    defaults: Defaults,
    options: Options,
    *,
    start: WorkerStart | None,
) -> Recipe:
    """Build the recipe of batches that torch's samplers draw.

    Args:
        source: map-style; that it is to be measured inline first (`executor="auto"`)
            holds also for data that no two threads may share.
        batch: how rows are collated; its size counts for nothing.
        defaults: what is taken where nothing is said.
        options: of the whole.
        start: what each worker process does first; the global generators are set
            before each sample then. None: neither, as threads share all of it.
    """
    recipe = compile_recipe((source, batch), defaults, Shard.single(), options)
    (segment,) = recipe.segments
    (read,) = segment.program.operations
    assert isinstance(read, Read)
    if start is not None:
        operation = SeededRead(read.stage, read.get, read.get_many, start)
        segment = replace(segment, program=Program((operation,), places=True))
    if source.executor == "auto" and source.num_parallel_workers is None:
        segment = replace(segment, executor="auto")
    return replace(recipe, plan=DrawnPlan(), segments=(segment,))


def _work(stages: Sequence[Stage]) -> list[Numbered]:
    """Return the stages that do something to samples, with their numbers."""
    return [
        (number, stage)
        for number, stage in enumerate(stages)
        if isinstance(stage, (SourceStage, MapStage, FilterStage, CacheStage))
    ]


def _repacks(source: SourceStage, work: Sequence[Numbered], shard: Shard) -> bool:
    """Whether batches can only be made of what is left over at run time."""
    repack = source.iterable or any(isinstance(s, FilterStage) for _, s in work)
    if repack and shard.size > 1:
        raise SpecError(
            f"filter() and iterable datasets work on one rank, got {shard.size} ranks, "
            "which could end at different steps; use select() with the indices to keep"
        )
    return repack


def _seed(stages: Sequence[Stage], defaults: Defaults) -> int:
    """Return the seed of random functions: that of the shuffle, if there is one."""
    seeds = [stage.seed for stage in stages if isinstance(stage, ShuffleStage)]
    return seeds[-1] if seeds else defaults.seed


def _batch(stages: Sequence[Stage]) -> BatchStage | None:
    return next((stage for stage in stages if isinstance(stage, BatchStage)), None)


def _plan(
    order: Order,
    batch: BatchStage,
    shard: Shard,
    scheduled: Scheduled | None,
    *,
    repack: bool,
) -> Plan:
    schedule: Schedule
    if scheduled is not None:
        if repack:
            raise SpecError(
                "a schedule needs batches that are planned, and filter() and iterable"
                " datasets have none; use select() with the indices to keep"
            )
        schedule = scheduled.resolve(shard.size)
    else:
        size = batch.global_size or (batch.size or 0) * shard.size
        schedule = Constant(Setting(global_size=size, image_size=None))
    # What a filter leaves over is batched later, so no ticket may be dropped here.
    drop_last = batch.drop_last and not repack
    plan = Plan(order, schedule, shard, drop_last=drop_last, tail=batch.tail)
    if batch.microbatches is not None:
        check_microbatches(plan, batch.microbatches)
    return plan


def check_microbatches(plan: Plan, count: int) -> None:
    """Raise `SpecError` where some batch is not `count` equal parts on every rank."""
    whole = plan.shard.size * count
    for run in plan.timeline.runs:
        if run.size % whole:
            raise SpecError(
                f"{count} microbatches on {plan.shard.size} ranks need batches that"
                f" {whole} divides, got {run.size} (in force from epoch {run.epoch})"
            )
    if plan.shard.size == 1 and not plan.drop_last:
        raise SpecError(
            "microbatches are of equal sizes, which an epoch's short last batch has"
            " not; say batch(..., drop_last=True)"
        )
