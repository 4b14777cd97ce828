"""What is in flight: batches, leases on chunks of their rows, and the bytes they hold.

One byte budget serves a whole process. A batch is charged an estimate when its first
row is handed out, in step order. The charge is corrected as its rows finish, and
released when the trainer takes the batch. The oldest batch of a pipeline is always
granted, so each pipeline can make progress whatever the others hold. The bytes held
therefore stay under the budget plus one batch of each pipeline, and nothing can
deadlock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import config
from ...errors import NOTE, BudgetError, SampleNote, add_note
from ..plan import BatchPlan, Context, PlannedBatch

LOGGER = logging.getLogger("penstock")
BEYOND = (
    "%d samples of one batch need %d bytes, and a quarter of the memory that was free"
    " is %d: batches are loaded one at a time. Make them smaller, or raise the budget"
    " with set_memory_budget()."
)


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
            context=self.context,
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

    def annotated(self, plan: BatchPlan, *, block: bool = False) -> BaseException:
        """Return the exception, with a note that identifies the sample.

        Args:
            plan: of the batch.
            block: whether it is a block of samples of which batches are formed later:
                then nobody knows its step and row.
        """
        place = (
            f"position {plan.start + self.row}"
            if block
            else f"step {plan.step}, row {self.row} of the batch"
        )
        note = SampleNote(
            f"{NOTE}{self.stage}, sample index {self.index!r:.60} "
            f"(epoch {plan.epoch}, {place})"
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


class Wait(Enum):
    """What a worker without a lease is waiting for."""

    INPUT = "input"
    """Rows from the segment before."""
    CREDIT = "credit"
    """Permission to work further ahead of the consumer."""
    MEMORY = "memory"
    """Credit, because the byte budget has no room for another batch."""


# For each of several stages: its wall time (ns), its CPU time (ns), and the bytes of a
# sample it produced.
Parts = tuple[tuple[int, int, int], ...]


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


def runs(offsets: list[int] | None, count: int) -> list[tuple[int, int, int]]:
    """Split `offsets` into consecutive runs: (start, stop, first offset) of each.

    Start and stop are positions in the list; None stands for 0, 1, 2, ... `count`.
    """
    if offsets is None:
        return [(0, count, 0)]
    pieces = []
    for _, group in groupby(enumerate(offsets), lambda pair: pair[1] - pair[0]):
        (start, first), *others = group
        pieces.append((start, start + 1 + len(others), first))
    return pieces


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
            context=self.plan.ctx,
        )


class ByteBudget:
    """A number of bytes that several pipelines share.

    The lock guards `held_bytes`, `limit_bytes`, and the sets of refused and of resting
    pipelines. It is taken inside an engine's lock and never the other way round, and
    nothing is called while it is held.

    Args:
        limit_bytes: how many.
        chosen: whether the user set the limit. The default only bounds what is loaded
            ahead: it refuses no batch, however large.
    """

    def __init__(self, limit_bytes: int, *, chosen: bool = True) -> None:
        self.lock = threading.Lock()
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self._chosen, self._warned = chosen, False
        self._refused_callbacks: set[Callable[[], None]] = set()
        self._resting_callbacks: set[Callable[[], None]] = set()

    def resize(self, limit_bytes: int) -> set[Callable[[], None]]:
        """Change the budget; return the callbacks of refused pipelines.

        Call them without holding a lock.
        """
        with self.lock:
            self.limit_bytes, self._chosen = limit_bytes, True
        return self.release(0)

    def charge(self, nbytes: int, notify: Callable[[], None] | None) -> bool:
        """Charge `nbytes` if they fit, or in any case if `notify` is None.

        If they do not fit, `notify` is called once bytes become free.
        """
        with self.lock:
            if notify is not None and self.held_bytes + nbytes > self.limit_bytes:
                self._refused_callbacks.add(notify)
                return False
            self.held_bytes += nbytes
            return True

    def check_fits(self, nbytes: int, rows: int) -> None:
        """Check that a batch of this many rows and bytes fits; warn once by default.

        Raises:
            BudgetError: it does not, and the user set the limit.
        """
        if nbytes <= self.limit_bytes:
            return
        if self._chosen:
            raise BudgetError(
                f"the memory budget must hold one batch: {rows} samples of this"
                f" pipeline need {nbytes} bytes in flight, got {self.limit_bytes};"
                " raise it with set_memory_budget() or make the batch smaller"
            )
        if not self._warned:
            self._warned = True
            LOGGER.warning(BEYOND, rows, nbytes, self.limit_bytes)

    def rest(self, suspend: Callable[[], None]) -> None:
        """Note a pipeline between epochs; `suspend` drops its prefetched data."""
        with self.lock:
            self._resting_callbacks.add(suspend)

    def resume(self, suspend: Callable[[], None]) -> bool:
        """Note that a pipeline continues, or is gone; return whether it was resting."""
        with self.lock:
            rested = suspend in self._resting_callbacks
            self._resting_callbacks.discard(suspend)
        return rested

    def resting(self) -> list[Callable[[], None]]:
        """Return the callbacks that suspend resting pipelines, to call unlocked."""
        with self.lock:
            return list(self._resting_callbacks)

    def release(self, nbytes: int) -> set[Callable[[], None]]:
        """Release bytes; return the callbacks to call once the caller holds no lock."""
        with self.lock:
            self.held_bytes -= nbytes
            refused, self._refused_callbacks = self._refused_callbacks, set()
        return refused

    def forget(self, notify: Callable[[], None]) -> None:
        """Stop notifying a pipeline that is gone."""
        with self.lock:
            self._refused_callbacks.discard(notify)


_byte_budget: ByteBudget | None = None
# Guards the creation of `_byte_budget`.
_making = threading.Lock()


def process_byte_budget() -> ByteBudget:
    """Return the byte budget that all pipelines of this process share."""
    global _byte_budget  # noqa: PLW0603 one a process, made when first wanted
    with _making:
        if _byte_budget is None:
            _byte_budget = ByteBudget(
                config.memory_bytes(), chosen=config.current.memory_bytes is not None
            )
        return _byte_budget


def _resize(limit_bytes: int) -> None:
    for notify in process_byte_budget().resize(limit_bytes):
        notify()


def _after_fork() -> None:
    """Give a forked child its own budget: it runs none of the parent's pipelines."""
    global _making, _byte_budget
    _making, _byte_budget = threading.Lock(), None


config.memory_watchers.append(_resize)
os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class Reservation:
    """Bytes that one batch is charged, holds, and held at most."""

    charged: int
    held: int = 0
    high: int = 0


class Reservations:
    """One pipeline's share of the byte budget. Guarded by its engine's lock."""

    def __init__(self, byte_budget: ByteBudget, notify: Callable[[], None]) -> None:
        self.byte_budget, self._notify = byte_budget, notify
        self._charges: dict[int, Reservation] = {}
        self._image_size: int | None = None
        self._batch_bytes: int | None = None
        # Charged now, and at most so far.
        self.held_bytes = self.peak_bytes = 0
        # Callbacks to call, once no lock is held, because bytes became free.
        self.notifications: deque[Callable[[], None]] = deque()

    def open(self, step: int, image_size: int | None, *, oldest: bool) -> bool:
        """Charge for a batch about to start; return False if it must wait for credit.

        Until one batch has been completed its size is unknown, so only the oldest is
        granted.
        """
        expected = self.expected(image_size)
        if not oldest and expected is None:
            return False
        nbytes = expected or 0
        if not self.byte_budget.charge(nbytes, None if oldest else self._notify):
            self.notifications += self.byte_budget.resting()
            return False
        self._charges[step] = Reservation(nbytes)
        self._grow(nbytes)
        return True

    def expected(self, image_size: int | None) -> int | None:
        """Return the expected peak bytes of a batch; None until one was completed.

        For a larger image than the last batch's, the bytes grow with the area.
        """
        size, nbytes = self._image_size, self._batch_bytes
        if nbytes and size and image_size and image_size > size:
            return int(nbytes * (image_size / size) ** 2)
        return nbytes

    def use(self, step: int, nbytes: int) -> None:
        """Adjust the charge of a batch that grew (or shrank) by `nbytes`."""
        charge = self._charges[step]
        charge.held += nbytes
        charge.high = max(charge.high, charge.held)
        excess = charge.held - charge.charged
        if excess > 0:
            self.byte_budget.charge(excess, None)
            charge.charged += excess
            self._grow(excess)

    def held(self, step: int) -> int:
        """Return the bytes that a batch in flight holds now."""
        return self._charges[step].held

    def complete(
        self, step: int, image_size: int | None, *, whole: bool = True
    ) -> None:
        """Charge a finished batch only what it holds, and remember its peak.

        What the next ones are expected to hold grows at once, and shrinks by an eighth
        of the difference: otherwise one light batch would let ten heavy ones start. An
        epoch's short last batch (not `whole`) says nothing about them.
        """
        charge, before = self._charges[step], self._batch_bytes
        if whole or before is None:
            high, self._batch_bytes = charge.high, charge.high
            if before is not None and high <= before and image_size == self._image_size:
                self._batch_bytes = before - (before - high) // 8
            self._image_size = image_size
        spare, charge.charged = charge.charged - charge.held, charge.held
        self._let_go(spare)

    def close(self, step: int) -> None:
        """Release a batch that left, or was given up."""
        charge = self._charges.pop(step, None)
        if charge is not None:
            self._let_go(charge.charged)

    def close_all(self) -> None:
        """Release everything."""
        for step in list(self._charges):
            self.close(step)
        self.byte_budget.forget(self._notify)

    @property
    def batch_bytes(self) -> int:
        """Bytes that a batch needs in flight, judged by recent ones; 0 if unknown."""
        return self._batch_bytes or 0

    def _grow(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _let_go(self, nbytes: int) -> None:
        if nbytes:
            self.held_bytes -= nbytes
            self.notifications += self.byte_budget.release(nbytes)
