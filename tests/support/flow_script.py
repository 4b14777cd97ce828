"""What a flow is tried with: batches by a script, and values for the model's books."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.pipeline.plan import BatchPlan, Rows

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

    def rows(self, plan: BatchPlan, /) -> Rows:
        indices = plan.step * 1000 + np.arange(plan.n_rows, dtype=np.int64)
        return Rows(indices, np.full(plan.n_rows, plan.epoch, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Settling:
    """What a worker makes of a lease."""

    done: int = 1 << 30
    """At most so many rows; the rest were not touched."""
    failing: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    """Offsets within the lease."""
    ns_per_row: int = 1_000_000


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
    peak: int = 0
    delivered: bool = False
