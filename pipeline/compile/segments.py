"""Fusion of adjacent stages into segments, and their kinds of workers.

Adjacent stages with the same kind of executor form one segment, so a sample passes
through them without a handover. Four things end a segment: a setting of its own
(`num_parallel_workers=` or another `executor=`), another `tune=`, another `timeout=`,
and a folder, whose reads wait while later stages compute. A stage without a limit of
its own counts within that of those beside it: apart, it would stay in the trainer's
process. All stages before a cache form one segment, because samples in the cache need
none of them.

All functions are pure, apart from a line in the log if a segment's workers differ from
what the user may expect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any

from ...cache.cache import Cache
from ...config import MAX_COROUTINES, MAX_WORKERS, Settings
from ...engine.batch.array_rows import ArrayRowReader
from ...engine.batch.buffer import Buffers
from ...engine.in_children import taken_along
from ...engine.observe.observation import Restriction
from ...engine.plan import Order
from ...engine.program.operations import Cached, Collate, Stored, with_fused_maps
from ...engine.program.program import (
    BatchMap,
    Filter,
    Map,
    Operation,
    Program,
    Read,
    ReadOn,
)
from ...engine.recipe import Executor, SegmentRecipe
from ...engine.witness.hazards import Finding, find_unsafe
from ...errors import LOGGER
from ...system.printing import name_of
from ..sources.columnar import Columnar
from ..sources.frames import Frame, HubReader
from ..stages import (
    CacheStage,
    FilterStage,
    MapStage,
    PerSample,
    SourceStage,
    Workers,
    executor_of,
    named,
    wanted_by,
)

# The initial kind of workers of a segment, and whether threads may share its data.


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of workers of a segment."""

    executor: Executor
    thread_safe: bool = True
    """Whether several threads of one process may work on the segment."""
    finding: Finding | None = None
    """The object to report to the user: because of it `auto` chose processes, or the
    requested threads share it.
    """


def kind_of(stages: Sequence[PerSample]) -> Kind:
    """Return the kind of workers for the adjacent stages of one segment."""
    executor = asked_of(stages)
    source = stages[0]
    if _is_read_on(source):  # by one worker
        return Kind(executor)
    declared = not isinstance(source, SourceStage) or source.thread_safe is not False
    if executor in ("inline", "async"):
        return Kind(executor, declared)
    unknown_stages = [stage for stage in stages if declared and not _is_known(stage)]
    finding = next(filter(None, map(_find, unknown_stages)), None)
    safe = declared and finding is None
    if executor != "auto":
        return Kind(executor, safe, finding if executor == "thread" else None)
    return Kind(_automatic(stages, safe=safe), safe, finding)


def asked_of(stages: Sequence[PerSample]) -> Executor:
    """Return the kind of workers that the stages of one segment ask for."""
    return next((e for e in map(executor_of, stages) if e != "auto"), "auto")


def _automatic(stages: Sequence[PerSample], *, safe: bool) -> Executor:
    if any(stage.timeout is not None for stage in stages):
        return "process"  # threads cannot be stopped
    counted = any(stage.num_parallel_workers is not None for stage in stages)
    source = stages[0] if isinstance(stages[0], SourceStage) else None
    if not safe:
        # The user may ask for several workers. Otherwise the data stays in the trainer:
        # a forked worker would share the read position, or repeat the stream.
        is_unsafe = source is not None and source.thread_safe is False
        return "process" if counted or is_unsafe else "inline"
    waits = (
        source is not None and source.waits and not (source.mapped and len(stages) == 1)
    )
    return "thread" if waits or counted else "auto"


def _find(stage: PerSample) -> Finding | None:
    """Return an object with one position or user, unless declared safe for threads."""
    if isinstance(stage, SourceStage):
        return None if stage.thread_safe else find_unsafe(stage.dataset, "dataset")
    return find_unsafe(stage.called, name_of(stage.called))


def _is_known(stage: PerSample) -> bool:
    """Whether threads may share a stage: the user says so, or it is our reader."""
    return isinstance(stage, SourceStage) and bool(stage.waits or stage.thread_safe)


Working = PerSample | CacheStage
# A stage that makes or stores samples, and its number in the pipeline.
Numbered = tuple[int, Working]


def fused(
    work: Sequence[Numbered],
    batch_name: str,
    settings: Settings,
    caches: Mapping[int, Cache],
    pipeline: str,
    order: Order,
) -> tuple[SegmentRecipe, ...]:
    """Return the segments of the stages that work on samples, in order.

    Args:
        work: these stages, with their numbers in the pipeline.
        batch_name: name in the log of the stage that receives their results.
        settings: settings for arguments that the user left out.
        caches: the caches by the number of their stage.
        pipeline: the name of the pipeline in the log.
        order: that of the samples in an epoch.
    """
    groups = _grouped(work)
    source = work[0][1]
    assert isinstance(source, SourceStage)
    samples = None if source.iterable else min(order.epoch_length, len(source.dataset))
    segments = []
    for at, group in enumerate(groups):
        name = batch_name if at == len(groups) - 1 else None
        segment = _segment(group, settings, name, caches, pipeline=pipeline)
        operations = with_fused_maps(segment.program.operations)
        program = replace(segment.program, operations=operations)
        storable = []
        for operation in operations:
            draws = isinstance(operation, Map) and operation.wants_rng
            repeats = isinstance(operation, (Map, Read, Cached)) and not draws
            if segment.executor == "ray" or not repeats:
                samples = None  # a cache belongs to one machine, and keeps no draws
            storable.append(samples)
        segments.append(replace(segment, program=program, storable=tuple(storable)))
    segments = taken_along(segments)
    begins_inline = source.iterable or source.mapped
    if begins_inline and len(segments) > 1 and segments[0].executor == "auto":
        segments[0] = replace(segments[0], executor="thread")  # the others wait for it
    return tuple(segments)


def on_batches(
    work: Sequence[Numbered],
    settings: Settings,
    caches: Mapping[int, Cache],
    rank: int,
    pipeline: str,
) -> tuple[SegmentRecipe, ...]:
    """Return the segments of the stages that work on whole batches.

    Args:
        work: these stages, with their numbers in the pipeline.
        settings: settings for arguments that the user left out.
        caches: the caches by the number of their stage.
        rank: the rank that gets these batches.
        pipeline: the name of the pipeline in the log.
    """
    segments = []
    for group in _grouped(work) if work else ():
        segment = _segment(group, settings, None, caches, pipeline=pipeline)
        operations = tuple(
            BatchMap.of(operation, rank)
            for operation in segment.program.operations
            if isinstance(operation, Map)
        )
        segments.append(
            replace(
                segment,
                program=replace(segment.program, operations=operations),
                storable=(None,) * len(operations),
                per_batch=True,
            )
        )
    return tuple(segments)


def with_batch_work(
    segments: tuple[SegmentRecipe, ...],
    batch_work: tuple[SegmentRecipe, ...],
    buffers: Buffers,
    seed: int,
) -> tuple[SegmentRecipe, ...]:
    """Return all segments; if others follow, a `collate_fn` is one in the trainer."""
    if not batch_work or buffers.collate is None:
        return *segments, *batch_work
    collates = SegmentRecipe(
        f"{buffers.stage} collate",
        buffers.stage,
        Program((Collate(buffers.stage, buffers.collate, seed),)),
        "inline",
        num_parallel_workers=1,
        bounds=(1, 1),
        prefetch_size=1,
        tunable=True,
        stays="",
        storable=(None,),
        per_batch=True,
        in_order=True,
    )
    return *segments, collates, *batch_work


def _grouped(work: Sequence[Numbered]) -> list[list[Numbered]]:
    """Return groups of stages that run together: all up to a cache are one."""
    start = max(until_cache(work), 1)
    groups = [list(work[:start])]
    for numbered_stage in work[start:]:
        assert not isinstance(numbered_stage[1], CacheStage)
        if _border(_samplers(groups[-1]), numbered_stage[1]):
            groups.append([numbered_stage])
        else:
            groups[-1].append(numbered_stage)
    return groups


def until_cache(stages: Sequence[Numbered]) -> int:
    """Return how many of these stages there are up to the last cache; 0: no cache."""
    return max(
        (n for n, (_, s) in enumerate(stages, 1) if isinstance(s, CacheStage)),
        default=0,
    )


def subject_of(stage: PerSample) -> Any:
    """Return the user's object that a stage works with."""
    return stage.dataset if isinstance(stage, SourceStage) else stage.called


def _samplers(group: Sequence[Numbered]) -> list[PerSample]:
    """Return the stages that make samples."""
    return [stage for _, stage in group if not isinstance(stage, CacheStage)]


def _border(group: Sequence[PerSample], after: PerSample) -> bool:
    """Whether a stage runs in another segment than the group before it."""
    before = group[-1]
    if isinstance(before, SourceStage) and (before.waits or before.iterable):
        return True
    own = before.num_parallel_workers, after.num_parallel_workers
    kind = executor_of(before)
    if own != (None, None) or kind != executor_of(after):
        return True
    limits = {stage.timeout for stage in (*group, after)}
    if len(limits if kind == "async" else limits - {None}) > 1:
        return True
    return before.tune != after.tune and not isinstance(before, SourceStage)


def _segment(
    group: Sequence[Numbered],
    settings: Settings,
    batch_name: str | None,
    caches: Mapping[int, Cache],
    pipeline: str,
) -> SegmentRecipe:
    stages = _samplers(group)
    names = [named(number, stage) for number, stage in group]
    # A segment is named after the first stage that runs a user's function.
    lead = next((n for n, (_, s) in enumerate(group) if isinstance(s, MapStage)), 0)
    kind = kind_of(stages)
    _tell(names[lead], kind, pipeline)
    operations = _operations(group, caches)
    workers, bounds = _workers(stages, kind.executor, settings)
    # Threads may be penstock's choice for these, without a word from the user.
    doubtful = tuple(
        subject_of(stage)
        for stage in stages
        if executor_of(stage) in ("auto", "process")
        and not (_is_read_on(stage) or _is_known(stage))
    )
    lone = bounds[1] > 1 and any(s.num_parallel_workers == 1 for s in stages)
    watched = tuple(subject_of(s) for s in stages if lone and not _is_known(s))
    return SegmentRecipe(
        name=names[lead],
        queue_name=batch_name or names[-1],
        program=Program(operations, batch_name or "", doubtful, watched=watched),
        executor=kind.executor,
        num_parallel_workers=workers,
        bounds=bounds,
        prefetch_size=settings.prefetch_size,
        tunable=all(stage.tune for stage in stages),
        thread_safe=kind.thread_safe,
        timeout_s=min((s.timeout for s in stages if s.timeout), default=None),
        stays=_why_stays(stages, kind),
        subjects=tuple(map(subject_of, stages)),
    )


def _why_stays(stages: Sequence[PerSample], kind: Kind) -> str:
    """Return why the workers of these stages may not become another kind, or nothing.

    What only one may use is no reason if the user asked for threads: he was warned.
    """
    if any(map(_is_read_on, stages)):
        return Restriction.ITERABLE
    if (executor := asked_of(stages)) != "auto":
        return Restriction.GIVEN.format(executor)
    return "" if kind.finding is None else Restriction.SHARED.format(kind.finding)


def placed(source: SourceStage, segment: SegmentRecipe, name: str) -> SegmentRecipe:
    """Return the segment of a torch loader where its samples are made at first.

    Without set workers, that is the trainer's process, where the dataset works
    correctly. Data that several workers must not share, or would repeat, stays there.
    """
    if source.executor == "inline":
        return replace(segment, stays="")  # the program said so in words of its own
    if source.executor != "auto" or source.num_parallel_workers is not None:
        return segment
    finding = _find(source)
    _tell(segment.name, Kind("inline", finding=finding), name)
    if finding is None:
        return replace(segment, executor="auto", stays="")
    return replace(segment, executor="inline", stays=Restriction.SHARED.format(finding))


def _tell(name: str, kind: Kind, pipeline: str) -> None:
    """Log the object in a segment's data that its threads would share."""
    if kind.finding is None:
        return
    if kind.executor in ("process", "inline"):
        from ...autotune.log import announce  # loaded where there is something to say

        line = MOVED if kind.executor == "process" else STAYS
        announce(line % (name, kind.finding), pipeline)
    else:
        LOGGER.warning(SHARED, name, kind.finding)


MOVED = (
    "%s: executor auto -> process: %s. Create it on first use, so that every worker "
    "has its own, or pass from_dataset(thread_safe=True) if threads may share it."
)
STAYS = (
    "%s: executor auto -> inline: %s, so several workers would get wrong samples or "
    "the same draws. Create it on first use, so that every worker has its own, and "
    "set num_parallel_workers, or pass from_dataset(thread_safe=True) if threads "
    "may share it."
)
SHARED = (
    '%s: executor="thread", but %s, and threads share it. Use executor="process", keep '
    "it in a threading.local(), or pass from_dataset(thread_safe=True) if they may."
)


def _workers(
    stages: list[PerSample], executor: Executor, settings: Settings
) -> tuple[int, tuple[int, int]]:
    """Return the initial number of workers, and its bounds."""
    if executor == "inline" or _is_read_on(stages[0]):
        return 1, (1, 1)
    setting: Workers = next(
        (s.num_parallel_workers for s in stages if s.num_parallel_workers), None
    )
    if isinstance(setting, tuple):
        return setting[0], setting
    if setting == 1 and any(map(_find, stages)):
        return 1, (1, 1)  # another worker would share its place, or repeat its stream
    # How many coroutines depends on how long they wait, not on cores. 64 reads of 20 ms
    # are 3,200 a second, about what one core of Python can use.
    coroutines, workers = (64, MAX_COROUTINES), (settings.workers, MAX_WORKERS)
    usual, most = coroutines if executor == "async" else workers
    return setting or usual, (1, max(most, setting or usual))


def _is_read_on(stage: PerSample) -> bool:
    """Whether a stage reads an iterable, which has its position in one process."""
    return isinstance(stage, SourceStage) and stage.iterable


def _operations(
    group: Sequence[Numbered], caches: Mapping[int, Cache]
) -> tuple[Operation, ...]:
    """Return the operations on samples; all up to the last cache form one."""
    steps: list[Any] = []
    sized = False
    # What several rows at once take would count as the time of each.
    limited = any(stage.timeout for stage in _samplers(group))
    for number, stage in group:
        if isinstance(stage, CacheStage):
            steps.append(Stored(caches[number], sized))
            continue
        operation = _operation(stage, number, caches, limited=limited)
        sized = sized or (isinstance(operation, Map) and operation.wants_ctx)
        steps.append(operation)
    count = until_cache(group)
    if not count:
        return tuple(steps)
    stages = group[:count]
    dataset = getattr(stages[0][1], "dataset", None)
    if getattr(dataset, "QUICK", False) and isinstance(steps[1], Stored):
        LOGGER.warning(
            "%s keeps each row of %s, which takes longer to find than to read with"
            " others by column; leave the cache out, or put it after a map() that"
            " computes",
            named(*stages[1]),
            named(*stages[0]),
        )
    lead = next((n for n in stages if isinstance(n[1], MapStage)), stages[0])
    waits = executor_of(_samplers(group)[0]) == "async"
    return Cached(named(*lead), tuple(steps[:count]), waits), *steps[count:]


def is_reader(get_many: Any) -> bool:
    """Whether many samples are read by penstock, and not by the dataset itself."""
    return isinstance(get_many, ArrayRowReader | HubReader)


def _operation(
    stage: PerSample, number: int, caches: Collection[int], *, limited: bool
) -> Operation:
    name = named(number, stage)
    match stage:
        case SourceStage(iterable=True):
            return ReadOn(name, stage.dataset)
        case SourceStage():
            data = stage.dataset
            reader = ArrayRowReader.of(data) or HubReader.of(data)
            many = reader or getattr(data, "__getitems__", None)
            by_array = isinstance(reader or data, ArrayRowReader | Columnar | Frame)
            many = None if limited else many
            return Read(name, partial(getitem, data), many, by_array=by_array)
        case FilterStage():
            return Filter(name, stage.function)
    arguments = wanted_by(stage.called)
    draws = number - sum(at < number for at in caches)  # a cache changes none
    return Map(
        name,
        number=draws,
        function=stage.called,
        wants_rng="rng" in arguments,
        wants_ctx="ctx" in arguments,
        one_by_one=limited,
    )
