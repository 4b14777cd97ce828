"""A pool whose workers are in children: what all kinds of children share.

A child runs the same engine as the trainer, whether it is a process of the fork server
or an actor of Ray. It is assigned whole batches where that is possible, otherwise some
rows of one, and returns what it made. One thread in the trainer serves all children of
a segment, and with worker processes so does the trainer's own, whenever it takes a
batch. Neither waits for a lease or for a child.

A child may die at any time. Its leases then return to the front. The samples that it
may have died of run alone, and one that has killed too many children is given up.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from ...errors import SampleError, WorkerError
from ..batch.buffer import FailedBatch, Finished
from ..core.connector import Connector, WorkerMeter
from ..core.core import LEARNING
from ..core.in_flight import Chunk, Lease, Outcome
from ..plan import PlannedBatch, Rows
from ..recipe import Recipe
from ..workers import ServedPool
from .handover import dumps
from .worker import Assignment, Result, failed_outcome

LOGGER = logging.getLogger("penstock")
# Deaths in a row, with no work done in between, that end the run. It is a large number
# because a killed fork server takes all children with it that it was about to start.
BARREN = 60
# A worker that ends before it is at work counts as this many deaths: the next one would
# do the same.
NEVER_BEGUN = 20
# Workers that a sample may kill before it is given up.
LIMIT = 5


class Blame:
    """Samples being processed when a worker died, by address: `(step, row)`.

    A suspect runs again, alone in its process. A further death then counts against it,
    and not against samples that only happened to be beside it. A suspect that succeeds
    is acquitted.
    """

    def __init__(self) -> None:
        self._deaths: dict[tuple[int, int], list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def add(self, chunk: Chunk, offsets: Iterable[int], death: str) -> None:
        """Blame these rows of a chunk for a death, described in words."""
        for offset in offsets:
            at = chunk.step, chunk.first_row + offset
            self._deaths.setdefault(at, []).append(death)

    def acquit(self, chunk: Chunk) -> None:
        """Clear these rows: they are done."""
        for offset in self._offsets(chunk):
            del self._deaths[chunk.step, chunk.first_row + offset]

    def first(self, chunk: Chunk) -> int | None:
        """Return the offset of the first suspect in a chunk, or None."""
        return min(self._offsets(chunk), default=None)

    def _offsets(self, chunk: Chunk) -> list[int]:
        """Return where a chunk has suspects. They are few, and hardly ever any."""
        return [
            row - chunk.first_row
            for step, row in self._deaths
            if step == chunk.step and 0 <= row - chunk.first_row < len(chunk)
        ]

    def verdict(self, chunk: Chunk) -> str | None:
        """Return the last death of a chunk's first row, if that must be given up."""
        deaths = self._deaths.get((chunk.step, chunk.first_row), [])
        return deaths[-1] if len(deaths) >= LIMIT else None


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """A lease, or its first rows, that a child works on."""

    lease: Lease
    chunk: Chunk
    """The rows that were sent."""
    sent_ns: int
    """When it was sent, on the monotonic clock."""


class FarChild:
    """A child that runs an engine. It belongs to the thread of its pool.

    Args:
        number: its number among the children of its segment, free when it starts.
        generation: children of an earlier one have an outdated copy of the dataset.
        meter: the meter of its workers.
    """

    def __init__(self, number: int, generation: int, meter: WorkerMeter) -> None:
        self.number, self.generation, self.meter = number, generation, meter
        # What it was sent and has not returned, by number; it works on the first.
        self.errands: dict[int, Errand] = {}
        self.numbers = count()
        # Whether it may be sent something.
        self.ready = True

    def packed(self, assignment: Assignment) -> Any:
        """Return an assignment as it is sent.

        Raises:
            Exception: whatever pickling indices of a sampler's own raises.
        """
        return assignment

    def suspects(self, number: int) -> Sequence[int]:
        """Return the rows of an errand that may have caused its end."""
        rows = range(len(self.errands[number].chunk))
        return rows if number == min(self.errands) else ()


AChild = TypeVar("AChild", bound=FarChild)


class FarPool(ServedPool, Generic[AChild]):
    """Workers in children. All its state belongs to the thread that serves them.

    Args:
        connector: where leases come from.
        recipe: the engine's recipe.
        workers: what error messages call the workers, such as `worker processes`.
    """

    ahead_ns: int
    """Leases longer than this do not wait behind one another at a child: another one
    that becomes free would start them sooner."""

    def __init__(self, connector: Connector, recipe: Recipe, workers: str) -> None:
        self._recipe, self._segment = recipe, recipe.segments[connector.segment]
        segment, self._workers = self._segment, workers
        super().__init__(connector, f"{segment.name} {workers.rpartition(' ')[2]}")
        self._program = segment.program
        self._stage = self._program.operations[-1].stage
        self._per_batch = segment.per_batch or segment.unsplit
        self._children: list[AChild] = []
        # How many children it may have.
        self._target = 0
        # Recent duration of a lease, in nanoseconds.
        self._lease_ns = 0.0
        self._blame = Blame()
        self._barren = 0
        # Whether the thread must be woken when there may be work.
        self._listening = True

    def _hear_of_work(self) -> None:
        if self._listening or self._engine_lock.closed:
            self._wakeup.notify()

    # Children

    def _staff(self, target: int) -> None:
        """Adjust the number of children, as far as they are idle."""
        self._target = target
        for child in list(self._children):
            if not child.errands and (
                len(self._children) > target or self._outdated(child)
            ):
                self._forget(child)
        while len(self._children) < target and self._has_room():
            numbers = {child.number for child in self._children}
            self._start_child(next(n for n in count() if n not in numbers))

    @abstractmethod
    def _outdated(self, child: AChild) -> bool:
        """Whether its generation has ended."""

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether one more child may start now."""

    @abstractmethod
    def _start_child(self, number: int) -> None:
        """Start a child."""

    def _forget(self, child: AChild) -> None:
        """Forget a child, which ends it if it still runs; its leases return."""
        self._children.remove(child)
        for errand in child.errands.values():
            self._connector.settle(errand.lease, Outcome(done=0), child.meter)
        child.errands.clear()
        self._connector.leave(child.meter)
        self._end(child)

    @abstractmethod
    def _end(self, child: AChild) -> None:
        """End a child that was forgotten."""

    def _note_death(self, child: AChild, death: str, *, at_work: bool) -> None:
        """Note the samples that a child was working on when it died.

        Args:
            child: the child.
            death: what happened to which child.
            at_work: whether it was at work, or ended for a reason outside it.

        Raises:
            WorkerError: too many children have died with no work done in between.
        """
        rows: list[tuple[Chunk, int]] = []
        for number, errand in child.errands.items():
            suspects = child.suspects(number)
            rows += [(errand.chunk, row) for row in suspects]
            self._blame.add(errand.chunk, suspects, death)
        where = f" while working on {self._named(rows)}" if rows else ""
        LOGGER.warning("%s%s: %s; its work will be repeated", self._stage, where, death)
        self._barren += 1 if at_work else NEVER_BEGUN
        if self._barren >= BARREN:
            text = (
                f"{self._workers} of {self._stage} die one after another, without "
                f"finishing anything in between; the last: {death}\nfind out what ends "
                'processes here, or use executor="thread"'
            )
            raise WorkerError(text)

    # Leases

    def _hand_out(self) -> None:
        """Give leases to children that have room for them, while there are any.

        It starts listening before it looks, so that work arriving later wakes it.
        """
        self._listening = True
        # One that is about to leave must be able to.
        ahead = len(self._children) == self._target and not self._blame
        most = 1 + ahead * self._ahead()
        for depth in range(most):
            for child in self._by_leases():
                if len(child.errands) != depth:
                    continue
                waited = child.meter.waiting_for is not None
                lease = self._next_lease(child.meter)
                if lease is not None:
                    self._send(child, lease)
                elif waited or depth:
                    return  # and so do the others
        free = any(len(child.errands) < most for child in self._by_leases())
        self._listening = free or not self._children

    def _ahead(self) -> int:
        """Return how many leases a child may get while it has one."""
        return int(self._lease_ns < self.ahead_ns)

    def _by_leases(self) -> list[AChild]:
        """Return the children that may get leases, those with the fewest first.

        Of those without any, the ones that wait already are the last.
        """
        there = [c for c in self._children if c.ready and not self._outdated(c)]
        return sorted(
            there, key=lambda c: (len(c.errands), c.meter.waiting_for is not None)
        )

    def _send(self, child: AChild, lease: Lease) -> None:
        try:
            chunk, assignment = self._assignment(lease)
            message = child.packed(assignment)
        except Exception as error:  # noqa: BLE001 whatever pickling user data raises
            what = "batch" if self._per_batch else "sample"
            text = (
                f"a {what} cannot be sent to {self._workers} of {self._stage} "
                f"({type(error).__name__}: {error}); let the stage before it return "
                'arrays, tensors, numbers, text or bytes, or use executor="thread"'
            )
            self._give_up(lease, lease.chunk, child.meter, SampleError(text))
            return
        number = next(child.numbers)
        child.errands[number] = Errand(lease, chunk, time.monotonic_ns())
        self._post(child, message, number)

    @abstractmethod
    def _post(self, child: AChild, message: Any, number: int) -> None:
        """Send a child what it has packed. If it is gone, its end will be noticed."""

    def _next_lease(self, meter: WorkerMeter) -> Lease | None:
        """Take a lease; if its first sample must be given up, do that at once."""
        while (lease := self._connector.try_take(meter)) is not None:
            death = self._blame.verdict(lease.chunk)
            if death is None:
                return lease
            chunk = lease.chunk if self._per_batch else lease.chunk.part(0, 1)
            what = self._named([(chunk, 0)])
            text = (
                f"{self._workers} of {self._stage} died {LIMIT} times on {what}; the"
                f" last: {death}\nlook for a crash in native code, for too little"
                " memory, or for a function that never ends"
            )
            self._give_up(lease, chunk, meter, WorkerError(text))
        return None

    def _give_up(
        self, lease: Lease, chunk: Chunk, meter: WorkerMeter, error: Exception
    ) -> None:
        """Settle a lease, or these first rows of it, with this error."""
        self._blame.acquit(chunk)
        self._connector.settle(lease, failed_outcome(chunk, self._stage, error), meter)

    def _assignment(self, lease: Lease) -> tuple[Chunk, Assignment]:
        """Return the rows of a lease that may be sent, and how they are sent.

        Raises:
            Exception: whatever pickling their inputs raises.
        """
        chunk, samples = lease.chunk, lease.inputs
        suspect = None if self._per_batch else self._blame.first(chunk)
        if suspect is not None:  # it must run alone, after the rows before
            chunk = chunk.part(0, max(1, suspect))
        inputs = None if samples is None else dumps(samples[: len(chunk)])
        whole = lease.whole and len(chunk) == len(lease.chunk)
        rows = Rows(chunk.indices, chunk.rounds)
        if self._per_batch and inputs:
            rows = rows.part(0, 1)  # the batch alone
        batch = PlannedBatch(lease.in_flight.plan, rows, chunk.first_row, whole)
        return chunk, Assignment(batch, self._recipe.collate_seed, inputs)

    def _receive(self, child: AChild, number: int, load: Callable[[], Result]) -> None:
        """Settle an errand with what `load` returns, or with the error that it raises.

        It raises whatever unpickling the user's objects raises.
        """
        errand = child.errands.pop(number)
        lease, chunk = errand.lease, errand.chunk
        try:
            result = load()
        except Exception as error:  # noqa: BLE001 whatever unpickling user objects raises
            failure = failed_outcome(chunk, self._stage, error)
            if lease.whole and len(chunk) == len(lease.chunk):
                failure = Outcome(len(chunk), made=FailedBatch(error))
            result = Result(number, failure)
        in_flight, outcome = lease.in_flight, result.outcome
        data: Any = result.sent
        self._barren = 0
        self._blame.acquit(chunk)
        outcome.done = len(chunk)  # more than one row, if what was sent is a batch
        if result.whole:
            outcome.made = Finished(data, tuple(outcome.failures))
            outcome.failures = []
        if outcome.made is not None:
            in_flight.made, in_flight.elsewhere = outcome.made, True
        elif self._program.places:  # nobody there could write to their batch
            if data:
                offsets = outcome.offsets or range(len(data))
                rows = [chunk.first_row + offset for offset in offsets]
                outcome.nbytes = in_flight.buffer.place(rows, data)
            outcome.offsets = None
        else:
            outcome.outputs = data
        if outcome.changed is not None:
            self._connector.on_look(outcome.changed)
        self._lease_ns += LEARNING * (outcome.run_ns - self._lease_ns)
        self._connector.settle(lease, outcome, child.meter)

    def _named(self, rows: Sequence[tuple[Chunk, int]]) -> str:
        """Return what the user knows rows by: for a whole batch, its step."""
        keys: list[Any] = [chunk.index(row) for chunk, row in rows]
        if self._per_batch:
            keys = list(dict.fromkeys(chunk.step for chunk, _ in rows))
        names = ", ".join(f"{key!r:.60}" for key in keys[:5])
        names += ", ..." if len(keys) > 5 else ""
        return f"{'the batch of step' if self._per_batch else 'sample index'} {names}"
