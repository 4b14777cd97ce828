"""A flight: one batch on its way from the plan to the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .chunk import Chunk, Failure
from .plan import BatchPlan, Rows

__all__ = ["Buffer", "Flight"]


class Buffer(Protocol):
    """Where a batch's rows go; the flow only carries it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, if that is open."""
        ...


@dataclass(slots=True, eq=False)
class Flight:
    """A batch on its way."""

    plan: BatchPlan
    rows: Rows
    buffer: Buffer
    remaining: list[int]
    """Rows still to be finished, by segment."""
    next_row: int = 0
    """First row the source has not handed out."""
    called: int = 0
    """Workers woken for those rows that have not come yet."""
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
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
