"""A rehearsal in a child process: what a dataset holds after it has made samples.

Many datasets open their file at their first sample. Threads must not share that file,
and a worker process must not inherit it. So before the engine starts, a child process
makes the first sample and another one, asks the witness what is held then, and ends;
this process has opened nothing. If the witness finds a file, or anything else that
changed, the segment gets worker processes, each with a file or state of its own.

The child is daemonic, as a worker is: what the dataset starts there ends with it, and
multiprocessing starts nothing. So a sample that fails there would fail in workers, too,
and nothing is found that moves it to them: threads look once more.

There is no rehearsal if the samples that it takes would be missing later: if they come
from an iterable, or if the dataset shares a queue or a counter with other processes;
nor if it would not work in a child. In these cases, and if the child does not answer,
the witness is asked after the threads' first lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, product

from ...system.forking import interrupts_deferred
from ..core.in_flight import Chunk
from ..plan import Plan
from ..program.operations import Cached, Stored
from ..program.program import Work
from ..program.randomness import SampleRandom
from ..recipe import Recipe, SegmentRecipe
from ..witness.hazards import ITERATOR, STREAM, Finding, leads_away
from ..witness.witness import Witness
from .child import Child, Pipe
from .worker import daemonic, set_up_libraries

# How long the child may take to answer: it may wait for a thread that it lacks.
WAIT_S = 5.0
# How long it may take to end after that, in seconds.
END_S = 1.0


def opened_late(recipe: Recipe, step: int) -> Mapping[int, Finding]:
    """Return what threads must not share once samples are made, by segment.

    This only includes what each worker process may own.

    Args:
        recipe: the pipeline's recipe; its workers start by fork.
        step: the first batch wanted.
    """
    doubted_numbers = [
        at for at, segment in enumerate(recipe.segments) if _is_doubted(segment)
    ]
    if not doubted_numbers or recipe.drawn or recipe.iterable:
        return {}
    segments = recipe.segments[: doubted_numbers[-1] + 1]
    if any(s.executor == "async" or leads_away(s.subjects) for s in segments):
        return {}
    chunks = _samples(recipe.planned, step)
    # The process or descriptor limit may be reached, and the child may die.
    with suppress(OSError, EOFError), ExitStack() as stack:
        with interrupts_deferred():
            child = Child.fork(
                partial(_try, segments, doubted_numbers, chunks, recipe.seed)
            )
            stack.callback(child.end, END_S)
        for findings in child.pipe.receive_all(WAIT_S):
            # Each worker process may have a file of its own, as in torch, or a cache.
            # Copies of a generator would all draw the same values.
            return {
                at: finding
                for at, finding in findings.items()
                if finding.why not in (STREAM, ITERATOR)
            }
        child.kill()  # it takes too long
    return {}


def _samples(plan: Plan, step: int) -> Iterator[Chunk]:
    """Yield the first sample wanted, and one from far away.

    A dataset that caches a group of rows may already have all of the first group.
    """
    batches = []
    with suppress(Exception):  # of a schedule's function: raised once a batch is due
        batches.append(plan.batch(step))
        epoch = batches[0].epoch
        middle = plan.first_step(epoch) + plan.steps_in(epoch) // 2
        batches.append(plan.batch(middle))
    for batch in batches:
        rows = plan.rows(batch)
        yield Chunk(batch.step, 0, rows.indices[:1], rows.rounds[:1], context=batch.ctx)


def _is_doubted(segment: SegmentRecipe) -> bool:
    several = segment.num_parallel_workers > 1 and not segment.per_batch
    # A worker process has threads, too, if it carries several leases.
    threads = segment.executor == "thread" or (
        segment.executor == "process" and segment.thread_safe
    )
    return bool(segment.program.doubtful) and threads and several


# In the child


@daemonic()
def _try(
    segments: tuple[SegmentRecipe, ...],
    doubted_numbers: list[int],
    chunks: Iterable[Chunk],
    seed: int,
    pipe: Pipe,
) -> None:
    """Make these samples; report what is held then, or has changed."""
    set_up_libraries()
    works = [Work(chunk, SampleRandom(seed), []) for chunk in chunks]
    findings: dict[int, Finding | None] = {}
    for at, segment in enumerate(segments):
        witness = Witness(segment.program.doubtful)
        steps = chain.from_iterable(
            operation.steps if isinstance(operation, Cached) else (operation,)
            for operation in segment.program.operations
        )
        uncached_steps = [step for step in steps if not isinstance(step, Stored)]
        with witness:
            for operation, work in product(uncached_steps, works):
                operation.run(work)
        if at in doubted_numbers and not any(work.failures for work in works):
            findings[at] = witness.finding()
    pipe.send({at: finding for at, finding in findings.items() if finding is not None})
