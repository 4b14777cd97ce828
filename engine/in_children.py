"""Work that runs in worker processes as a whole: several segments become one.

A worker process makes batches from the start, so nothing but indices and batches passes
between it and the trainer. Whether work may move there, at all and now, is asked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from typing import Any

from .. import config
from ..errors import SampleNote, SpecError
from ..system.forking import FORKS
from ..system.printing import figures
from .far.handover import RemoteTraceback, dumps
from .far.pools import start_method
from .observe.observation import Restriction
from .program.program import Program
from .recipe import Recipe, SegmentRecipe
from .segment import Segment
from .witness.witness import Witness

# From so many cores on, processes load rather than threads: there is room for them, and
# threads take the GIL from the trainer, and from one another.
MANY_CORES = 4
# Work in a batch that justifies worker processes at once. With less, threads load, as
# they start at no cost, until the tuner moves them.
WORTH_PROCESSES_S = 0.02


def in_children(recipe: Recipe, children: int | None = None) -> Recipe:
    """Return the recipe with all work that may leave the trainer in worker processes.

    Work on whole batches goes along; with several children, only if no segment of it
    was placed by the user. A collate_fn stays in the trainer until it has proved to
    keep no state. The trainer also does the rest for a batch that several have made.

    Args:
        recipe: what to run.
        children: how many processes share the workers, unless the user asked for
            processes; None: one for each core, or as many as there are workers.
    """
    samples = [segment for segment in recipe.segments if not segment.per_batch]
    behind = recipe.segments[len(samples) :]
    wants_processes = any(segment.executor == "process" for segment in samples)
    lone = samples[0].iterable  # only one process can read it
    on_ray = any(segment.executor == "ray" for segment in samples)
    if on_ray or (lone and wants_processes) or not alike(samples):
        return recipe
    many = None if wants_processes else children
    far = replace(as_one(samples), children=1 if lone else many)
    placed_segments = (segment for segment in behind if segment.executor != "process")
    if children is not None or not any(segment.stays for segment in placed_segments):
        inner = (replace(segment.within, per_batch=True) for segment in behind)
        far = replace(far, inner=(*far.within_all, *inner))
        behind = ()
    return replace(recipe, segments=(far, *behind))


def alike(segments: Sequence[SegmentRecipe]) -> bool:
    """Whether one limit of time holds for all samples there, if any does.

    Coroutines keep their own, and cannot be seen by whoever enforces that of others.
    """
    limits = _limits(segments)
    awaits = any(segment.executor == "async" for segment in segments)
    return len(limits) < 2 and (limits <= {None} or not awaits)


def taken_along(segments: Sequence[SegmentRecipe]) -> list[SegmentRecipe]:
    """Return the segments, with those before one in processes going along with it.

    One that the user placed in the trainer or on other machines stays, and so does the
    reader of an iterable, as its place is in one process.
    """
    kinds = [segment.executor for segment in segments]
    if "process" not in kinds:
        return list(segments)
    stop = len(kinds) - kinds[::-1].index("process")
    start = stop - 1
    for first in reversed(segments[:start]):
        stays = first.executor in ("inline", "ray") or first.iterable
        if stays or not alike(segments[start - 1 : stop]):
            break
        start -= 1
    return [*segments[:start], as_one(segments[start:stop]), *segments[stop:]]


def as_one(segments: Sequence[SegmentRecipe]) -> SegmentRecipe:
    """Return one segment of processes that do the work of several."""
    requested_segments = [
        segment for segment in segments if segment.executor == "process"
    ] or segments
    workers = max(segment.num_parallel_workers for segment in requested_segments)
    inner = [
        replace(together(list(group)), wide=wide)
        for (_, _, wide), group in groupby(segments, partial(_apart, workers))
    ]
    limits = _limits(segments)
    return replace(
        together(segments),
        name=requested_segments[-1].name,
        executor="process",
        num_parallel_workers=workers,
        bounds=requested_segments[-1].bounds,
        timeout_s=limits.pop() if len(limits) == 1 else None,
        inner=tuple(segment.within for segment in inner) if len(inner) > 1 else (),
    )


def _limits(segments: Sequence[SegmentRecipe]) -> set[float | None]:
    """Return the limits of time that hold for samples there, but for coroutines'."""
    return {segment.timeout_s for segment in segments if segment.executor != "async"}


def _apart(workers: int, segment: SegmentRecipe) -> tuple[bool, bool, bool]:
    """Return what makes work another segment in its worker processes, too.

    Before so many workers in processes, more threads stay more, if they may share what
    they work with.
    """
    wide = (
        segment.executor == "thread"
        and segment.thread_safe
        and segment.num_parallel_workers > workers
    )
    return segment.executor == "async", segment.iterable, wide


def together(segments: Sequence[SegmentRecipe]) -> SegmentRecipe:
    """Return one segment that does the work of several, like the last of them."""
    *_, last = segments
    if len(segments) == 1:
        return last
    programs = [segment.program for segment in segments]
    s_per_row = [segment.alone_s_per_row for segment in segments]
    program = Program(
        tuple(chain.from_iterable(program.operations for program in programs)),
        last.program.places,
        tuple(chain.from_iterable(program.doubtful for program in programs)),
        watched=tuple(chain.from_iterable(program.watched for program in programs)),
    )
    return replace(
        last,
        program=program,
        num_parallel_workers=max(segment.num_parallel_workers for segment in segments),
        tunable=all(segment.tunable for segment in segments),
        thread_safe=all(segment.thread_safe for segment in segments),
        stays="it is in worker processes, with others",
        subjects=tuple(chain.from_iterable(segment.subjects for segment in segments)),
        storable=tuple(chain.from_iterable(segment.storable for segment in segments)),
        alone_s_per_row=sum(s_per_row) if all(s_per_row) else 0.0,
    )


def why_stays(recipe: Recipe) -> str:
    """Return why this pipeline's engine may not run in either process; empty if it may.

    Every segment's workers may then be anywhere, as with `executor="auto"`: functions
    and dataset hold nothing that only the trainer's process has, and no place in a
    stream, which fresh worker processes would read from the start.
    """
    for segment in recipe.segments:
        free = segment.executor == "process" and segment.thread_safe
        if segment.stays and not free:
            return segment.stays
    host, forks = recipe.options.host, FORKS and start_method(recipe) == "fork"
    if host != "auto":
        return Restriction.HOSTED.format(host)
    return "" if forks else Restriction.FORKLESS


def has_cores_to_spare(recipe: Recipe) -> bool:
    """Whether there are cores for worker processes, which need not pay at once.

    Several ranks may share the cores of a host: their tuners divide them. Without a
    tuner, work stays in the trainer's process, where all that it does can be seen.
    """
    return (
        config.get_enable_autotune()
        and recipe.planned.shard.size == 1
        and recipe.options.persistent_workers
        and recipe.cpu_cores >= MANY_CORES
    )


def crowded(recipe: Recipe, batch_s: float) -> str:
    """Return why a batch of so much work goes to processes at once; empty if not."""
    if batch_s < WORTH_PROCESSES_S:
        return ""
    return (
        f"a batch takes {figures(1e3 * batch_s)} ms of work, and threads would take the"
        f" GIL from the trainer; with {figures(recipe.cpu_cores)} cores, worker"
        " processes load instead"
    )


def check_may_leave(data: Any, segments: Iterable[Segment], collate: Witness) -> None:
    """Check that a batch can come from another process, and that its makers may go.

    Raises:
        SpecError: it cannot, or one of the user's objects has changed in this process.
    """
    try:
        dumps(data)
    except Exception as error:
        raise SpecError(
            f"batches cannot be handed over ({type(error).__name__}: {error}); use"
            ' host="trainer", or let collate_fn return arrays, tensors, numbers, text'
            " or bytes"
        ) from error
    reasons = [segment.witness.verdict("process") for segment in segments]
    if (path := collate.changed()) is not None:
        reasons.append(f"`collate_fn{path}` changes while batches are made")
    for why in filter(None, reasons):
        raise SpecError(why)


def is_of_worker(error: Exception) -> bool:
    """Whether workers have raised it: in another process, or while making a sample.

    What a collate_fn raises in the trainer is final: it may keep state. Torch's default
    keeps none, and samples made ahead may be of two kinds.
    """
    return isinstance(error.__cause__, RemoteTraceback) or any(
        isinstance(note, SampleNote) for note in getattr(error, "__notes__", ())
    )
