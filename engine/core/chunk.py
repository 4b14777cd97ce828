"""What is handed over: a batch in flight, its chunks of rows, and their leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import NOTE, SampleNote, add_note
from ..plan import Context, PlannedBatch


@dataclass(slots=True, eq=False)
class Chunk:
    """Consecutive rows of one batch on one rank. Never spans two batches."""

    step: int
    first_row: int
    indices: NDArray[Any]
    """`[rows]`: indices into the dataset, or whatever a sampler yielded in their
    place."""
    rounds: NDArray[np.int64]
    """`int64 [rows]`: the pass over the data that each row belongs to; it seeds the
    row's random stream."""
    context: Context

    def __len__(self) -> int:
        return len(self.indices)

    def index(self, offset: int) -> Any:
        """Return what the dataset is asked for in this row."""
        return self.indices[offset : offset + 1].tolist()[0]

    def part(self, start: int, stop: int) -> Chunk:
        """Return the rows from `start` up to `stop`, counted within this chunk."""
        return Chunk(
            self.step,
            self.first_row + start,
            self.indices[start:stop],
            self.rounds[start:stop],
            self.context,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception from a stage's function, and where it happened."""

    error: BaseException
    stage: str
    index: Any
    """Index into the dataset of the sample being processed."""
    row: int
    """The sample's row in the batch."""
    cut_short: bool = False
    """Whether an iterable ended with it, so that nothing can replace the rest."""

    def annotated(self, epoch: int, step: int) -> BaseException:
        """Return the exception, with a note that identifies the sample."""
        note = SampleNote(
            f"{NOTE}{self.stage}, sample index {self.index!r:.60} "
            f"(epoch {epoch}, step {step}, row {self.row} of the batch)"
        )
        if note not in getattr(self.error, "__notes__", ()):
            add_note(self.error, note)
        return self.error


@dataclass(slots=True, eq=False)
class Lease:
    """A chunk that waits for a worker, or is being worked on.

    Settling it a second time has no effect.
    """

    segment: int
    chunk: Chunk
    inputs: Sequence[Any] | None
    """One sample per row, from the segment before; None for a source. If the segment
    works on whole batches: the batch alone."""
    in_flight: InFlightBatch
    """The batch it belongs to."""
    input_bytes: int = 0
    whole: bool = False
    """Whether it is a batch that the worker must collate."""

    def part(self, start: int, stop: int) -> Lease:
        """Return the rows from `start` up to `stop`, with their share of the bytes."""
        rows, nbytes, inputs = len(self.chunk), self.input_bytes, self.inputs
        nbytes = nbytes * stop // rows - nbytes * start // rows
        chunk, inputs = self.chunk.part(start, stop), inputs and inputs[start:stop]
        return Lease(self.segment, chunk, inputs, self.in_flight, nbytes)


Parts = tuple[tuple[int, int, int], ...]
"""For each of several stages: its wall time (ns), its CPU time (ns), and the bytes of a
sample it produced."""


@dataclass(slots=True)
class Outcome:
    """The result of the first `done` rows of a lease; the rest were not touched."""

    done: int
    offsets: list[int] | None = None
    """Rows of the chunk that `outputs` belong to; None: all of the first `done`."""
    outputs: Sequence[Any] | None = None
    """Samples for the next segment; None if they were placed in the batch."""
    nbytes: int = 0
    """Bytes of the outputs, or of the rows placed."""
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
    """Rows that a filter removed."""
    ended: bool = False
    """Whether the source has no more samples (iterables only)."""
    run_ns: int = 0
    cpu_ns: int = 0
    made: Any = None
    """The batch, if the lease was all of it and the worker has collated it."""
    parts: Parts = ()
    """Costs of each stage; empty if unknown."""
    changed: str | None = None
    """Which data changed in a worker process, if the user asked for one worker: a path,
    or an empty string if nothing changed. None if nobody has looked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Outcome, _values(self)


_values = attrgetter(*(each.name for each in fields(Outcome)))


def runs(offsets: list[int] | None, count: int) -> list[tuple[int, int, int]]:
    """Split `offsets` into consecutive runs: (start, stop, first offset) of each.

    Start and stop are positions in the list; None stands for 0, 1, 2, ... `count`.
    """
    if offsets is None:
        return [(0, count, 0)]
    found = []
    for _, group in groupby(enumerate(offsets), lambda pair: pair[1] - pair[0]):
        members = list(group)
        start = members[0][0]
        found.append((start, start + len(members), members[0][1]))
    return found


@dataclass(slots=True)
class Onward:
    """A batch with all its rows, for a segment that works on whole batches."""

    segment: int
    data: Any


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightBatch(PlannedBatch):
    """A batch that is being loaded."""

    buffer: Any
    """The `BatchBuffer` of its rows; the core only passes it on."""
    remaining: list[int]
    """Rows still to be finished, by segment."""
    next_row: int = 0
    """First row that the source has not handed out."""
    called: int = 0
    """Workers woken for rows that they have not taken yet."""
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
    made: Any = None
    """The batch, if one worker has made all of it elsewhere; None if not.

    Between two segments that work on whole batches: the output of the first."""
    substituted: tuple[Failure, ...] = ()
    """Failures whose rows carry another sample's data instead."""
    ended: bool = False
    """Whether the source ran out within this batch (iterables only)."""
    number: int = 0
    """Its number among the batches of its core, which is the plan's step if the core
    makes all batches of a plan."""
    elsewhere: bool = False
    """Whether one worker in another process has made all of it."""

    def chunk(self, start: int, stop: int) -> Chunk:
        """Return rows `start` to `stop` as work for the first segment."""
        rows = self.rows
        return Chunk(
            self.plan.step,
            self.first_row + start,
            rows.indices[start:stop],
            rows.rounds[start:stop],
            self.plan.ctx,
        )
