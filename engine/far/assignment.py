"""What the trainer and a worker process tell each other: one small message a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.chunk import Chunk, Outcome
from ..plan import BatchPlan, PlannedBatch, Rows
from ..program.program import Unread
from .handover import Laid, Packed, Returned, loads


class Assignment(NamedTuple):
    """Rows to be made, as sent to a worker process."""

    chunk: Chunk
    plan: BatchPlan
    whole: bool
    """Whether the batch is to be made of them; otherwise their samples come back."""
    seed: int
    """Seed of a collate_fn's draws, together with epoch and batch."""
    returned: Returned | None = None
    """Slabs that may be reused, or must not be."""
    inputs: bytes | None = None
    """A sample for each row, pickled: unpickling runs user code."""

    @property
    def planned(self) -> PlannedBatch:
        """The rows, as an engine needs them."""
        chunk = self.chunk
        rows = Rows(chunk.indices, chunk.rounds)
        inputs = None if self.inputs is None else loads(self.inputs)
        return PlannedBatch(self.plan, rows, chunk.first_row, self.whole, inputs)

    def unread(self, error: Exception) -> PlannedBatch:
        """Return the rows, each of which fails, as they cannot be unpickled."""
        planned = self._replace(inputs=None).planned
        return planned._replace(inputs=[Unread(error)] * len(planned.rows))


class Result(NamedTuple):
    """What became of an assignment."""

    number: int
    outcome: Outcome
    sent: Laid | Packed | Any = None
    """The batch, or the samples of the rows in `outcome.offsets`; from an actor, as
    they are."""
    whole: bool = False
    """Whether it is the batch. Then failures of its rows are those substituted."""
    short: str = ""
    """Why it does not lie in shared memory; empty if it does."""


class Share(NamedTuple):
    """How many of all workers of the segment are in this process."""

    workers: int
    of: int
