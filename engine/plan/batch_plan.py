"""The stamp of a batch: what it is, decided before any of it is loaded."""

from __future__ import annotations

from typing import NamedTuple


class Context(NamedTuple):
    """What a function that takes `ctx` receives; the same for a whole batch."""

    epoch: int
    step: int
    """Global: counted over all epochs."""
    image_size: int | None
    """Pixels per side; None if no schedule sets it."""
    strength: float | None = None
    """Strength of augmentation; None if no schedule sets it."""


class BatchPlan(NamedTuple):
    """One rank's view of one global batch."""

    epoch: int
    step: int
    """Global: counted over all epochs."""
    batch: int
    """Its number within its epoch."""
    start: int
    """Its first position within its epoch."""
    last: bool
    """Whether it is the last batch of its epoch."""
    n_global: int
    """Samples that count, over all ranks."""
    n_rows: int
    """Rows that this rank delivers, including padding."""
    n_local: int
    """Samples among them that count: the first `n_local` rows. May be 0."""
    loss_weight: float
    """Factor on this rank's mean loss that makes the mean over ranks exact.

    Data-parallel training averages gradients over `world` ranks as if each had the same
    number of samples. With w_r = n_local_r * world / n_global,
    (1 / world) * sum_r(w_r * mean_r) = sum_r(sum of losses of r) / n_global:
    the mean over the global batch. It is 1.0 if all ranks have equally many.
    """
    image_size: int | None
    """Pixels per side; None if no schedule sets it."""
    lr_mult: float
    """Factor on the learning rate."""
    momentum: float | None
    """None leaves the optimiser's own."""
    substituted: tuple[int, ...] = ()
    """Rows of this rank that hold another sample because their own failed."""
    strength: float | None = None
    """Strength of augmentation; None if no schedule sets it."""

    @property
    def padded(self) -> int:
        """Rows at the end that repeat others and do not count."""
        return self.n_rows - self.n_local

    @property
    def regime(self) -> str:
        """The properties that affect loading, among those a schedule sets."""
        size = "" if self.image_size is None else f" of {self.image_size} px"
        return f"batches of {self.n_global}{size}"

    @property
    def ctx(self) -> Context:
        """The value of `ctx` for functions that take it."""
        return Context(self.epoch, self.step, self.image_size, self.strength)
