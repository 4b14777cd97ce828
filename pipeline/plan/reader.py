"""Looks up the rows of several batches at once, as orders cost least in bulk."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .order import Order, Rows

__all__ = ["RowReader"]

Positions = NDArray[np.int64]


class Window(NamedTuple):
    """The rows of a few consecutive batches of one epoch."""

    epoch: int
    first_batch: int
    bounds: tuple[int, ...]
    """Batch `first_batch + i` has rows `bounds[i]` to `bounds[i + 1]`."""
    rows: Rows

    def find(self, epoch: int, batch: int) -> Rows | None:
        """Return the rows of a batch, or None where it is not in the window."""
        place = batch - self.first_batch
        if epoch != self.epoch or not 0 <= place < len(self.bounds) - 1:
            return None
        return self.rows.part(self.bounds[place], self.bounds[place + 1])


class RowReader:
    """Reads an order window by window and keeps the last window.

    Any thread may call `rows`: a window is never changed, only replaced by another in
    one assignment, so the worst that a race costs is a window computed twice.
    """

    __slots__ = ("_order", "_window")

    def __init__(self, order: Order) -> None:
        self._order = order
        self._window: Window | None = None

    def rows(
        self, epoch: int, batch: int, ahead: Callable[[], tuple[Positions, list[int]]]
    ) -> Rows:
        """Return the rows of `batch`, as read-only views.

        Args:
            epoch: the epoch of the batch.
            batch: its number within the epoch.
            ahead: called on a miss: positions, `int64 [N]`, of this batch and of those
                that will be asked for next, and where each of these batches ends.
        """
        window = self._window
        found = window.find(epoch, batch) if window else None
        if found is None:
            window = self._read(epoch, batch, *ahead())
            self._window = window
            found = window.rows.part(0, window.bounds[1])
        return found

    def _read(
        self, epoch: int, batch: int, positions: Positions, ends: list[int]
    ) -> Window:
        rows = self._order.at(epoch, positions)
        rows.indices.flags.writeable = False
        rows.rounds.flags.writeable = False
        return Window(epoch, batch, (0, *ends), rows)
