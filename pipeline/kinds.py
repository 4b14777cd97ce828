"""Which kind of workers a segment starts with, and whether threads may share its data.

Pure; `compile.py` logs what is to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .printing import name_of
from .recipe import Executor
from .spec import FilterStage, MapStage, SourceStage, executor_of
from .thread_safety import Finding, find_unsafe

__all__ = ["Kind", "PerSample", "kind_of"]

PerSample = SourceStage | MapStage | FilterStage


@dataclass(frozen=True, slots=True)
class Kind:
    """What a segment is to be worked on by."""

    executor: Executor
    thread_safe: bool = True
    """Whether several threads of one process may work on it."""
    finding: Finding | None = None
    """What the user is to be told of: it made `auto` take processes, or is shared by
    the threads that were asked for."""


def kind_of(stages: Sequence[PerSample]) -> Kind:
    """Return what the neighbours that make one segment are to be worked on by."""
    asked = map(executor_of, stages)
    said: Executor = next((each for each in asked if each != "auto"), "auto")
    source = stages[0] if isinstance(stages[0], SourceStage) else None
    if source is not None and source.iterable:  # read by one worker
        return Kind("thread" if said == "auto" else said)
    declared = source is None or source.thread_safe is not False
    if said in ("inline", "async"):
        return Kind(said, declared)
    finding = _find(stages) if declared else None
    safe = declared and finding is None
    if said == "process":
        return Kind(said, safe)
    if said == "thread":
        return Kind(said, safe, finding)
    return Kind(_automatic(stages, safe=safe), safe, finding)


def _automatic(stages: Sequence[PerSample], *, safe: bool) -> Executor:
    if not safe or any(stage.timeout is not None for stage in stages):
        return "process"  # threads cannot be stopped
    source = stages[0]
    waits = isinstance(source, SourceStage) and source.waits
    counted = any(stage.num_parallel_workers is not None for stage in stages)
    return "thread" if waits or counted else "auto"


def _find(stages: Sequence[PerSample]) -> Finding | None:
    return next((each for each in map(_find_in, stages) if each is not None), None)


def _find_in(stage: PerSample) -> Finding | None:
    match stage:
        case SourceStage():
            known = stage.waits or stage.thread_safe is not None
            return None if known else find_unsafe(stage.dataset, "dataset")
        case MapStage():
            return find_unsafe(stage.function, name_of(stage.function))
        case FilterStage():
            return find_unsafe(stage.predicate, name_of(stage.predicate))
