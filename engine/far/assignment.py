"""What the trainer and a worker process tell each other: one small message a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.chunk import Outcome
from ..plan import PlannedBatch
from .handover import Laid, Packed, Returned


class Assignment(NamedTuple):
    """Rows to be made, as sent to a child."""

    planned: PlannedBatch
    """The rows, without inputs. If they do not make the batch, their samples return."""
    seed: int
    """Seed of a collate_fn's draws, together with epoch and batch."""
    inputs: bytes | None = None
    """A sample for each row, pickled apart: unpickling runs user code."""
    returned: Returned | None = None
    """Slabs that may be reused, or must not be."""


class Result(NamedTuple):
    """What became of an assignment."""

    number: int
    outcome: Outcome
    sent: Laid | Packed | Any = None
    """The batch, or the samples of the rows in `outcome.offsets`; as they are, before
    a worker process sends them, and from an actor."""
    whole: bool = False
    """Whether it is the batch. Then failures of its rows are those substituted."""
    short: str = ""
    """Why it does not lie in shared memory; empty if it does."""


class Share(NamedTuple):
    """How many of all workers of the segment are in this process."""

    workers: int
    of: int
