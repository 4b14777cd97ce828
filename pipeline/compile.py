"""From what the user wrote to what can run: stages in, a recipe out.

Pure, but for a line in the log where a segment is not worked on as one would think.

Neighbouring stages of one executor kind are fused into one segment, so a sample passes
through them without being handed over. Three things are borders: a setting of its own
(`num_parallel_workers=` or another `executor=`), another `tune=`, and a folder, whose
reads wait while what follows computes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .buffers import Buffers
from .device import DeviceStage
from .errors import SpecError
from .kinds import Kind, PerSample, kind_of
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
from .program import Filter, Map, Operation, Program, Read, ReadOn
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
    executor_of,
)
from .staffing import Executor, Workers
from .worker_start import WorkerStart

__all__ = ["Recipe", "SegmentRecipe", "compile_drawn", "compile_recipe"]

MOST_WORKERS = 128
"""Upper bound of a segment's workers where the user gives none."""
PERMITS = 64
"""Coroutines at once where the user gives no number: sized by how long they wait, not
by cores. 64 reads of 20 ms are 3,200 a second, about what one core of Python can use.
"""
MOST_PERMITS = 4096
"""Upper bound of these: reads in flight beyond it are more than stores like."""


@dataclass(frozen=True, slots=True)
class SegmentRecipe:
    """One segment, ready to be built."""

    name: str
    """`Map(ID:2) decode`: what its worker count is logged under."""
    queue_name: str
    """What its prefetch size is logged under: the stage that fills the queue."""
    program: Program
    executor: Executor
    """`auto`: inline until it shows that it costs enough to be worth a thread."""
    num_parallel_workers: int
    bounds: tuple[int, int]
    prefetch_size: int
    tunable: bool
    thread_safe: bool = True
    """Whether several threads of one process may work on it."""
    timeout_s: float | None = None
    """How long one sample may take."""
    movable: bool = False
    """Whether it may be moved to another executor than it starts with: `auto`."""


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

    @property
    def planned(self) -> Plan:
        """The plan of a pipeline, which knows all its batches."""
        assert isinstance(self.plan, Plan)
        return self.plan

    def state(self, cursor: Cursor) -> dict[str, object]:
        """Return `cursor` as O(1) JSON."""
        return write_state(cursor, self.planned.hash, self.planned.facts())

    def restore(self, state: Mapping[str, object], *, override: bool = False) -> Cursor:
        """Return the cursor in `state`; StateError if it does not belong here."""
        plan = self.planned
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
    seeds = [stage.seed for stage in stages if isinstance(stage, ShuffleStage)]
    seed = seeds[-1] if seeds else defaults.seed
    number = next(n for n, stage in enumerate(stages) if stage is batch)
    name = f"Batch(ID:{number})"
    buffers = Buffers(
        name, batch.collate_fn, keep=repack, substitute=batch.on_error == "substitute"
    )
    plan = _plan(order, batch, shard, scheduled, repack=repack)
    segments = _segments(work, name, defaults)
    devices = [stage for stage in stages if isinstance(stage, DeviceStage)]
    return Recipe(
        plan,
        segments,
        buffers,
        batch,
        seed,
        repack,
        source.iterable,
        devices[-1] if devices else None,
        options,
        defaults.cpu_cores,
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


def _work(stages: Sequence[Stage]) -> list[tuple[int, PerSample]]:
    """Return the stages that do something to samples, with their numbers."""
    return [
        (number, stage)
        for number, stage in enumerate(stages)
        if isinstance(stage, (SourceStage, MapStage, FilterStage))
    ]


def _repacks(
    source: SourceStage, work: list[tuple[int, PerSample]], shard: Shard
) -> bool:
    """Whether batches can only be made of what is left over at run time."""
    repack = source.iterable or any(isinstance(s, FilterStage) for _, s in work)
    if repack and shard.size > 1:
        raise SpecError(
            f"filter() and iterable datasets work on one rank, got {shard.size} ranks, "
            "which could end at different steps; use select() with the indices to keep"
        )
    return repack


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


def _segments(
    work: list[tuple[int, PerSample]], batch_name: str, defaults: Defaults
) -> tuple[SegmentRecipe, ...]:
    groups: list[list[tuple[int, PerSample]]] = [[work[0]]]
    for numbered in work[1:]:
        if _border(groups[-1][-1][1], numbered[1]):
            groups.append([numbered])
        else:
            groups[-1].append(numbered)
    last = len(groups) - 1
    return tuple(
        _segment(group, defaults, batch_name if at == last else None)
        for at, group in enumerate(groups)
    )


def _border(before: PerSample, after: PerSample) -> bool:
    """Whether two neighbours run in different segments."""
    if isinstance(before, SourceStage) and (before.waits or before.iterable):
        return True
    own = before.num_parallel_workers, after.num_parallel_workers
    kind = executor_of(before)
    if own != (None, None) or kind != executor_of(after):
        return True
    if kind == "async" and before.timeout != after.timeout:  # each sample's in a stage
        return True
    return _tune(before) != _tune(after) and not isinstance(before, SourceStage)


def _segment(
    group: list[tuple[int, PerSample]], defaults: Defaults, batch_name: str | None
) -> SegmentRecipe:
    names = [f"{stage.kind}(ID:{number}) {stage.label}" for number, stage in group]
    operations = tuple(
        _operation(stage, number, name)
        for (number, stage), name in zip(group, names, strict=True)
    )
    # A segment is called after the first stage that does something of the user's.
    lead = next((n for n, (_, s) in enumerate(group) if isinstance(s, MapStage)), 0)
    kind = kind_of([stage for _, stage in group])
    _tell(names[lead], kind)
    workers, bounds = _workers([stage for _, stage in group], kind.executor, defaults)
    return SegmentRecipe(
        names[lead],
        batch_name or names[-1],
        Program(operations, places=batch_name is not None),
        kind.executor,
        workers,
        bounds,
        defaults.prefetch_size,
        all(_tune(stage) for _, stage in group),
        kind.thread_safe,
        timeout_s=min((s.timeout for _, s in group if s.timeout), default=None),
        movable=all(_movable(stage) for _, stage in group),
    )


def _tell(name: str, kind: Kind) -> None:
    """Log what was found in a segment's data that its threads would share."""
    if kind.finding is None:
        return
    if kind.executor == "process":
        logging.getLogger("penstock.autotune").info(MOVED, name, kind.finding)
    else:
        logging.getLogger("penstock").warning(SHARED, name, kind.finding)


MOVED = (
    "%s: executor auto -> process: %s. Make it when it is first used, so that every "
    "worker has its own; from_dataset(thread_safe=True) says that threads may share it."
)
SHARED = (
    '%s: executor="thread", but %s, and threads share it. Use executor="process", keep '
    "it in a threading.local(), or say from_dataset(thread_safe=True) if they may."
)


def _workers(
    stages: list[PerSample], executor: Executor, defaults: Defaults
) -> tuple[int, tuple[int, int]]:
    """Return where the worker count starts, and its bounds."""
    source = stages[0]
    if executor == "inline" or (isinstance(source, SourceStage) and source.iterable):
        return 1, (1, 1)
    given: Workers = next(
        (s.num_parallel_workers for s in stages if s.num_parallel_workers), None
    )
    if isinstance(given, tuple):
        return given[0], given
    if executor == "async":
        usual, most = PERMITS, MOST_PERMITS
    else:
        usual, most = defaults.num_parallel_workers, MOST_WORKERS
    return given or usual, (1, max(most, given or usual))


def _movable(stage: PerSample) -> bool:
    """Whether its workers may be of any kind: an iterable's place is in one process."""
    iterable = isinstance(stage, SourceStage) and stage.iterable
    return executor_of(stage) == "auto" and not iterable


def _tune(stage: PerSample) -> bool:
    return True if isinstance(stage, SourceStage) else stage.tune


def _operation(stage: PerSample, number: int, name: str) -> Operation:
    match stage:
        case SourceStage(iterable=True):
            return ReadOn(name, stage.dataset)
        case SourceStage():
            many = getattr(stage.dataset, "__getitems__", None)
            return Read(name, stage.dataset.__getitem__, many)
        case MapStage():
            wanted = _parameters(stage.function)
            return Map(name, number, stage.function, "rng" in wanted, "ctx" in wanted)
        case FilterStage():
            return Filter(name, stage.predicate)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return which of `rng` and `ctx` a function asks for, beyond its sample."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins without a signature ask for neither
        return frozenset()
    return frozenset(names[1:]) & {"rng", "ctx"}
