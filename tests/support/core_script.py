"""Scripted batches for a core, and the values that its model keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.engine.core.in_flight import Failure, Lease, Outcome
from penstock.engine.plan import BatchPlan, PlannedBatch, Rows

__all__ = ["DONE", "SOURCE", "Batch", "Place", "Script", "Settling", "Tray"]

SOURCE, DONE = "source", "done"
Place = tuple[str, int]
"""`(source, 0)`, `(ready, segment)`, `(lent, segment)` or `(done, 0)`."""


@dataclass(frozen=True, slots=True)
class Script:
    """Batches of `sizes` rows, over and over; the last of a round ends an epoch."""

    sizes: tuple[int, ...]
    image_sizes: tuple[int | None, ...] = (None,)

    def batch(self, step: int) -> BatchPlan:
        epoch, batch = divmod(step, len(self.sizes))
        n = self.sizes[batch]
        return BatchPlan(
            epoch=epoch,
            step=step,
            batch=batch,
            start=sum(self.sizes[:batch]),
            last=batch == len(self.sizes) - 1,
            n_global=n,
            n_rows=n,
            n_local=n,
            loss_weight=1.0,
            image_size=self.image_sizes[step % len(self.image_sizes)],
            lr_mult=1.0,
            momentum=None,
        )

    def planned(self, step: int) -> PlannedBatch:
        plan = self.batch(step)
        return PlannedBatch(plan, self.rows(plan))

    def rows(self, plan: BatchPlan, /) -> Rows:
        indices = plan.step * 1000 + np.arange(plan.n_rows, dtype=np.int64)
        return Rows(indices, np.full(plan.n_rows, plan.epoch, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Settling:
    """A worker's result for a lease."""

    done: int = 1 << 30
    """Most rows to work on; the rest are not touched."""
    failing: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    """Offsets within the lease."""
    ns_per_row: int = 300_000
    cpu_percent: int = 100

    def kept(self, lease: Lease) -> list[int]:
        """Return the rows of the batch that come through."""
        losses, done = self.failing | self.dropped, min(self.done, len(lease.chunk))
        first = lease.chunk.first_row
        return [first + offset for offset in range(done) if offset not in losses]

    def outcome(self, lease: Lease, row_bytes: int, *, last: bool) -> Outcome:
        """Return the outcome of a program; rows after the `last` segment are placed."""
        chunk, rows = lease.chunk, self.kept(lease)
        done = min(self.done, len(chunk))
        failing = sorted(offset for offset in self.failing if offset < done)
        outcome = Outcome(
            done,
            nbytes=row_bytes * len(rows),
            failures=[
                Failure(ValueError(), "Map", 0, chunk.first_row + offset)
                for offset in failing
            ],
            dropped=done - len(rows) - len(failing),
            run_ns=self.ns_per_row * done,
            cpu_ns=self.ns_per_row * done * self.cpu_percent // 100,
        )
        if not last:
            whole = len(rows) == done
            outcome.offsets = None if whole else [row - chunk.first_row for row in rows]
            outcome.outputs = [(chunk.step, row, lease.segment + 1) for row in rows]
        return outcome

    def outcome_of_batch(self, lease: Lease, nbytes: int) -> Outcome:
        """Return the outcome of a program that works on whole batches."""
        rows = len(lease.chunk)
        run_ns = self.ns_per_row * rows
        if self.done < rows:
            return Outcome(0)
        if self.failing:
            failures = [Failure(ValueError(), "Map", 0, 0)]
            return Outcome(rows, failures=failures, outputs=[], run_ns=run_ns)
        outputs = [("batch", lease.chunk.step)]
        return Outcome(rows, outputs=outputs, nbytes=nbytes, run_ns=run_ns)


@dataclass(slots=True, eq=False)
class Tray:
    """Stands for a batch's buffer: which rows were put into it."""

    placed: list[int] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class Batch:
    """The model of one batch in flight."""

    places: list[Place]
    estimate: int
    """Bytes it was opened with."""
    oldest: bool
    next: int
    """The first segment of whole batches that has not finished it."""
    peak: int = 0
    delivered: bool = False
    nbytes: int | None = None
    """What it holds, once such a segment has worked on it."""
    failed: bool = False
