"""The plan of a worker process: its assignments, in the order in which they come."""

from __future__ import annotations

from collections import deque

from .order import PlannedBatch, Planning


class AssignedPlan(Planning):
    """Batches, or rows of some, numbered as they come. The engine's lock guards it."""

    def __init__(self) -> None:
        self.stop = 0
        """Number of assignments received."""
        self.oldest = 0
        """Number of the oldest one that is not done."""
        self._waiting: deque[tuple[PlannedBatch, int]] = deque()

    def add(self, planned: PlannedBatch, seed: int) -> None:
        """Plan to make these rows next; `seed` is of their collate_fn's draws."""
        self._waiting.append((planned, seed))
        self.stop += 1

    def planned(self, number: int) -> PlannedBatch:
        """Return an assignment that is not done."""
        return self._waiting[number - self.oldest][0]

    @property
    def seed(self) -> int:
        """Seed of the draws of the collate_fn for the oldest assignment."""
        return self._waiting[0][1]

    def forget(self) -> None:
        """Note that the oldest assignment is done."""
        self._waiting.popleft()
        self.oldest += 1
