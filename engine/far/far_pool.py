"""A pool whose workers are in other processes, here or elsewhere: what all share.

Samples travel there and back. A worker may die at any time. Its leases then return to
the front. The samples that it may have died of run alone, and one that has killed too
many workers is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ...errors import SampleError, WorkerError
from ..batch.buffer import FailedBatch, Finished
from ..core.chunk import Chunk, Failure, Lease, Outcome
from ..core.connector import Connector
from ..core.core import LEARNING
from ..core.metrics import WorkerMeter
from ..recipe import SegmentRecipe
from ..workers.pool import ServedPool
from .assigned_engine import failed_outcome
from .assignment import Assignment, Result
from .deaths import LIMIT, Blame
from .handover import dumps, recall

__all__ = [
    "NEVER_BEGUN",
    "FarPool",
]

LOGGER = logging.getLogger("penstock")
BARREN = 60
"""Deaths in a row, with no work done in between, that end the run. It is a large number
because a killed fork server takes all children with it that it was about to start."""
NEVER_BEGUN = 20
"""A worker that ends before it is at work counts as this many deaths: the next one
would do the same."""


def recalled(failures: Iterable[Failure]) -> list[Failure]:
    """Return failures that were received, with the tracebacks of the other process."""
    return [replace(each, error=recall(each.error)) for each in failures]


def with_data(result: Result, data: Any) -> Outcome:
    """Return the outcome in a result, with the data that came with it."""
    outcome = result.outcome
    made: FailedBatch | None = outcome.made
    if made is not None:
        failures = tuple(recalled(made.failures))
        outcome.made = FailedBatch(recall(made.error), failures)
    elif result.whole:
        substituted, outcome.failures = tuple(recalled(outcome.failures)), []
        outcome.made = Finished(data, substituted)
    else:
        outcome.outputs = data
    return outcome


class FarPool(ServedPool):
    """Workers in other processes. All its state belongs to the thread that serves them.

    Args:
        connector: where leases come from.
        recipe: the segment's recipe.
        workers: what error messages call the workers, such as `worker processes`.
        seed: returns the seed for the draws of a collate_fn now.
    """

    def __init__(
        self,
        connector: Connector,
        recipe: SegmentRecipe,
        workers: str,
        seed: Callable[[], int],
    ) -> None:
        super().__init__(connector, f"{recipe.name} {workers.rpartition(' ')[2]}")
        self._program = recipe.program
        self._per_batch = recipe.per_batch or recipe.unsplit
        self._workers, self._seed = workers, seed
        self._lease_ns = 0.0
        """Recent duration of a lease, in nanoseconds."""
        self._blame = Blame()
        self._barren = 0
        self._listening = True
        """Whether the thread must be woken when there may be work."""

    def rest(self, until_ns: int) -> None:
        """Do nothing: workers out of reach take nothing from the trainer."""

    def at_work(self) -> bool:
        """Whether a worker may take something from the trainer."""
        return False

    def _hear_of_work(self) -> None:
        if self._listening or self._engine_lock.closed:
            self._wakeup.notify()

    def _take(self, meter: WorkerMeter) -> Lease | None:
        """Take a lease; if its first sample must be given up, do that at once."""
        while (lease := self._connector.try_take(meter)) is not None:
            death = self._blame.verdict(lease.chunk) if self._blame else None
            if death is None:
                return lease
            what = self._named([self._key(lease.chunk, 0)])
            text = (
                f"{self._workers} of {self._stage} died {LIMIT} times on {what}; the"
                f" last: {death}\nlook for a crash in native code, for too little"
                " memory, or for a function that never ends"
            )
            rows = None if self._per_batch else 1
            self._give_up(lease, meter, WorkerError(text), rows)
        return None

    def _assignment(self, lease: Lease) -> tuple[Chunk, Assignment]:
        """Return the rows of a lease that may be sent, and how they are sent.

        Raises:
            Exception: whatever pickling their inputs raises.
        """
        chunk, given = self._to_send(lease), lease.inputs
        inputs = None if given is None else dumps(given[: len(chunk)])
        whole = lease.whole and len(chunk) == len(lease.chunk)
        rows = chunk.part(0, 1) if self._per_batch and inputs else chunk
        plan, seed = lease.in_flight.plan, self._seed()
        return chunk, Assignment(rows, plan, whole, seed, inputs=inputs)

    def _to_send(self, lease: Lease) -> Chunk:
        """Return the rows to send: a suspect must run alone, after the rows before."""
        chunk = lease.chunk
        suspect = None if self._per_batch else self._blame.first(chunk)
        return chunk if suspect is None else chunk.part(0, max(1, suspect))

    def _settle(
        self, lease: Lease, chunk: Chunk, outcome: Outcome, meter: WorkerMeter
    ) -> None:
        """Settle a lease with an outcome that was received.

        Args:
            lease: the lease.
            chunk: its rows that were sent.
            outcome: what became of them.
            meter: the worker's instrument.
        """
        self._barren = 0
        self._blame.acquit(chunk)
        outcome.failures = recalled(outcome.failures)
        outcome.done = len(chunk)  # more than one row, if what was sent is a batch
        if outcome.made is not None:
            lease.in_flight.made, outcome.made = outcome.made, None
            lease.in_flight.elsewhere = True
        if self._program.places and outcome.outputs is not None:
            self._place_here(lease, outcome)
        if outcome.changed is not None:
            self._connector.on_look(outcome.changed)
        self._lease_ns += LEARNING * (outcome.run_ns - self._lease_ns)
        self._connector.settle(lease, outcome, meter)

    def _place_here(self, lease: Lease, outcome: Outcome) -> None:
        """Place rows that were sent back: nobody there could write to their batch."""
        first, outputs = lease.chunk.first_row, outcome.outputs or []
        if outputs:
            rows = [first + offset for offset in outcome.offsets or range(len(outputs))]
            outcome.nbytes = lease.in_flight.buffer.place(rows, outputs)
        outcome.outputs = outcome.offsets = None

    def _count_death(self, death: str, keys: list[Any], deaths: int) -> None:
        """Report a death, and count it.

        Args:
            death: what happened to which worker.
            keys: identities of the rows that it was working on.
            deaths: how many deaths it counts as.

        Raises:
            WorkerError: too many workers have died with no work done in between.
        """
        where = f" while working on {self._named(keys)}" if keys else ""
        LOGGER.warning("%s%s: %s; its work will be repeated", self._stage, where, death)
        self._barren += deaths
        if self._barren >= BARREN:
            text = (
                f"{self._workers} of {self._stage} die one after another, without "
                f"finishing anything in between; the last: {death}\nfind out what ends "
                'processes here, or use executor="thread"'
            )
            raise WorkerError(text)

    def _give_up(
        self,
        lease: Lease,
        meter: WorkerMeter,
        error: Exception,
        rows: int | None = None,
    ) -> None:
        """Settle the first rows of a lease, or all of them, with this error."""
        chunk = lease.chunk if rows is None else lease.chunk.part(0, rows)
        self._blame.acquit(chunk)
        outcome = failed_outcome(chunk, self._stage, error)
        self._connector.settle(lease, outcome, meter)

    def _unsendable(self, error: Exception) -> SampleError:
        """Return the error of rows whose inputs cannot be sent."""
        what = "batch" if self._per_batch else "sample"
        return SampleError(
            f"a {what} cannot be sent to {self._workers} of {self._stage} "
            f"({type(error).__name__}: {error}); let the stage before it return "
            'arrays, tensors, numbers, text or bytes, or use executor="thread"'
        )

    def _key(self, chunk: Chunk, row: int) -> Any:
        """Return what identifies a row to the user: the step, for a whole batch."""
        return chunk.step if self._per_batch else chunk.index(row)

    def _named(self, keys: list[Any]) -> str:
        shown = ", ".join(f"{key!r:.60}" for key in keys[:5])
        shown += ", ..." if len(keys) > 5 else ""
        return f"{'the batch of step' if self._per_batch else 'sample index'} {shown}"

    @property
    def _stage(self) -> str:
        return self._program.operations[-1].stage
