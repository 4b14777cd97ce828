"""What is handed over: a batch in flight, its chunks of rows, and their leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import NOTE, add_note
from ..plan import BatchPlan, Context, Rows


class Signal(Enum):
    """What a worker may be told instead of being given work."""

    RETIRE = "retire"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Chunk:
    """Consecutive rows of one batch of one rank. Never crosses a batch."""

    step: int
    first_row: int
    indices: NDArray[np.int64]
    """`int64 [rows]`: what to ask the dataset for."""
    rounds: NDArray[np.int64]
    """`int64 [rows]`: which pass over the data each row belongs to (keys its random
    stream)."""
    context: Context

    def __len__(self) -> int:
        return len(self.indices)

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self.indices.tobytes(), self.rounds.tobytes()
        return _chunk, (self.step, self.first_row, *rows, tuple(self.context))

    def split(self, rows: int) -> tuple[Chunk, Chunk]:
        """Return the first `rows` rows, and the rest."""
        return self.part(0, rows), self.part(rows, len(self))

    def part(self, start: int, stop: int) -> Chunk:
        """Return the rows from `start` up to `stop`, counted within this chunk."""
        return Chunk(
            self.step,
            self.first_row + start,
            self.indices[start:stop],
            self.rounds[start:stop],
            self.context,
        )


class Piece(NamedTuple):
    """Rows that wait before a segment; ordered by address."""

    step: int
    first_row: int
    chunk: Chunk
    inputs: list[Any] | None
    nbytes: int
    """Of the inputs."""

    def split(self, rows: int) -> tuple[Piece, Piece]:
        """Return the first `rows` rows, and the rest."""
        chunk, rest = self.chunk.split(rows)
        nbytes = self.nbytes * rows // len(self.chunk)
        inputs = self.inputs or []
        taken, left = inputs[:rows] or None, inputs[rows:] or None
        return (
            Piece(self.step, self.first_row, chunk, taken, nbytes),
            Piece(self.step, rest.first_row, rest, left, self.nbytes - nbytes),
        )


def _chunk(
    step: int,
    first_row: int,
    indices: bytes,
    rounds: bytes,
    context: tuple[int, int, int | None, float | None],
) -> Chunk:
    """Return a chunk from what `Chunk.__reduce__` tells of it."""
    rows = np.frombuffer(indices, np.int64), np.frombuffer(rounds, np.int64)
    return Chunk(step, first_row, *rows, Context(*context))


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a stage's function, and where it happened."""

    error: BaseException
    stage: str
    index: int
    """Index into the dataset of the sample in hand."""
    row: int
    """Its row of the batch."""
    cut_short: bool = False
    """Whether an iterable gave nothing more after it: nothing can replace the rest."""

    def annotated(self, epoch: int, step: int) -> BaseException:
        """Return the exception, with a note that says which sample it was."""
        note = (
            f"{NOTE}{self.stage}, sample index {self.index} "
            f"(epoch {epoch}, step {step}, row {self.row} of the batch)"
        )
        if note not in getattr(self.error, "__notes__", ()):
            add_note(self.error, note)
        return self.error


@dataclass(slots=True, eq=False)
class Lease:
    """A chunk in a worker's hands: to be settled once, and idempotently."""

    segment: int
    chunk: Chunk
    inputs: list[Any] | None
    """One sample a row, as the segment before left it; None for a source. The batch
    alone, where the segment works on whole batches."""
    in_flight: InFlightBatch
    """The batch it is part of."""
    input_bytes: int = 0
    whole: bool = False
    """Whether it is a batch that its worker is to collate."""


Parts = tuple[tuple[int, int, int], ...]
"""Of several stages each: the nanoseconds it took, those on a CPU, and the bytes of a
sample that it made."""


@dataclass(slots=True)
class Outcome:
    """What became of the first `done` rows of a lease; the rest were not touched."""

    done: int
    offsets: list[int] | None = None
    """Rows of the chunk that `outputs` are for; None: all of the first `done`."""
    outputs: list[Any] | None = None
    """Samples for the next segment; None where they were placed in the batch."""
    nbytes: int = 0
    """Bytes of the outputs, or of the rows placed."""
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
    """Rows that a filter turned down."""
    ended: bool = False
    """The source has no more samples (iterables alone)."""
    run_ns: int = 0
    cpu_ns: int = 0
    made: Any = None
    """The batch, where the lease was all of it and the worker has collated it."""
    parts: Parts = ()
    """What each stage took of it; empty where there is one."""
    changed: str | None = None
    """What changed of the data in its worker's process, if that has one worker by the
    user's word: a path, empty where nothing did; None where nobody has looked."""


def runs(offsets: list[int] | None, count: int) -> list[tuple[int, int, int]]:
    """Cut `offsets` where they jump: (start, stop, first offset) of each run.

    Start and stop count within the list; None stands for 0, 1, 2, ... `count`.
    """
    if offsets is None:
        return [(0, count, 0)]
    found = []
    for _, group in groupby(enumerate(offsets), lambda pair: pair[1] - pair[0]):
        members = list(group)
        start = members[0][0]
        found.append((start, start + len(members), members[0][1]))
    return found


class RowBuffer(Protocol):
    """Where a batch's rows go; the core only carries it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, if that is open."""


@dataclass(slots=True)
class Onward:
    """A batch whose rows are all there, for a segment that works on whole batches."""

    segment: int
    data: Any


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch on its way."""

    plan: BatchPlan
    rows: Rows
    buffer: RowBuffer
    remaining: list[int]
    """Rows still to be finished, by segment."""
    next_row: int = 0
    """First row the source has not handed out."""
    called: int = 0
    """Workers woken for those rows that have not come yet."""
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
    made: Any = None
    """The batch, finished by the worker that made all its rows; None: it is not.

    Between two segments that work on whole batches: what the first one put out."""
    substituted: tuple[Failure, ...] = ()
    """Rows that carry another sample's data, since their own failed."""
    ended: bool = False
    """The source ran dry within this batch (iterables alone)."""

    def chunk(self, start: int, stop: int) -> Chunk:
        """Return rows `start` to `stop` as work for the first segment."""
        rows = self.rows
        return Chunk(
            self.plan.step,
            start,
            rows.indices[start:stop],
            rows.rounds[start:stop],
            self.plan.ctx,
        )
