"""The bytes that batches in flight may hold: one budget for a whole process.

A batch is charged an estimate when its first row is handed out, in step order. The
charge is corrected as its rows finish, and released when the trainer takes the batch.
The oldest batch of a pipeline is always granted, so each pipeline can make progress
whatever the others hold. The bytes held therefore stay under the budget plus one batch
of each pipeline, and nothing can deadlock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ... import config
from ...errors import BudgetError

LOGGER = logging.getLogger("penstock")
BEYOND = (
    "%d samples of one batch need %d bytes, and a quarter of the memory that was free"
    " is %d: batches are loaded one at a time. Make them smaller, or raise the budget"
    " with set_memory_budget()."
)


class ByteBudget:
    """A number of bytes that several pipelines share.

    The lock guards `held_bytes`, `limit_bytes`, and the sets of refused and of resting
    pipelines. It is taken inside an engine's lock and never the other way round, and
    nothing is called while it is held.

    Args:
        limit_bytes: how many.
        chosen: whether the user set the limit. The default only bounds what is loaded
            ahead: it refuses no batch, however large.
    """

    def __init__(self, limit_bytes: int, *, chosen: bool = True) -> None:
        self.lock = threading.Lock()
        self.limit_bytes = limit_bytes
        self._chosen = chosen
        self._warned = False
        self.held_bytes = 0
        self._refused: set[Callable[[], None]] = set()
        self._resting: set[Callable[[], None]] = set()

    def resize(self, limit_bytes: int) -> list[Callable[[], None]]:
        """Change the budget; return the callbacks of refused pipelines.

        Call them without holding a lock.
        """
        with self.lock:
            self.limit_bytes, self._chosen = limit_bytes, True
            return self._take_refused()

    def charge(self, nbytes: int, notify: Callable[[], None] | None) -> bool:
        """Charge `nbytes` if they fit, or in any case if `notify` is None.

        If they do not fit, `notify` is called once bytes become free.
        """
        with self.lock:
            if notify is not None and self.held_bytes + nbytes > self.limit_bytes:
                self._refused.add(notify)
                return False
            self.held_bytes += nbytes
            return True

    def check_fits(self, nbytes: int, rows: int) -> None:
        """Check that a batch of this many rows and bytes fits; warn once by default.

        Raises:
            BudgetError: it does not, and the user set the limit.
        """
        if nbytes <= self.limit_bytes:
            return
        if self._chosen:
            raise BudgetError(
                f"the memory budget must hold one batch: {rows} samples of this"
                f" pipeline need {nbytes} bytes in flight, got {self.limit_bytes};"
                " raise it with set_memory_budget() or make the batch smaller"
            )
        if not self._warned:
            self._warned = True
            LOGGER.warning(BEYOND, rows, nbytes, self.limit_bytes)

    def rest(self, suspend: Callable[[], None]) -> None:
        """Note a pipeline between epochs; `suspend` drops its prefetched data."""
        with self.lock:
            self._resting.add(suspend)

    def resume(self, suspend: Callable[[], None]) -> bool:
        """Note that a pipeline continues, or is gone; return whether it was resting."""
        with self.lock:
            rested = suspend in self._resting
            self._resting.discard(suspend)
        return rested

    def resting(self) -> list[Callable[[], None]]:
        """Return the callbacks that suspend resting pipelines, to call unlocked."""
        with self.lock:
            return list(self._resting)

    def release(self, nbytes: int) -> list[Callable[[], None]]:
        """Release bytes; return the callbacks to call once the caller holds no lock."""
        with self.lock:
            self.held_bytes -= nbytes
            return self._take_refused() if self._refused else []

    def forget(self, notify: Callable[[], None]) -> None:
        """Stop notifying a pipeline that is gone."""
        with self.lock:
            self._refused.discard(notify)

    def _take_refused(self) -> list[Callable[[], None]]:
        refused = list(self._refused)
        self._refused.clear()
        return refused


_byte_budget: ByteBudget | None = None
# Guards the creation of `_byte_budget`.
_making = threading.Lock()


def process_byte_budget() -> ByteBudget:
    """Return the byte budget that all pipelines of this process share."""
    global _byte_budget  # noqa: PLW0603 one a process, made when first wanted
    with _making:
        if _byte_budget is None:
            chosen = config.current.memory_bytes is not None
            _byte_budget = ByteBudget(config.memory_bytes(), chosen=chosen)
        return _byte_budget


def _resize(limit_bytes: int) -> None:
    for notify in process_byte_budget().resize(limit_bytes):
        notify()


def _after_fork() -> None:
    """Give a forked child its own budget: it runs none of the parent's pipelines."""
    global _making, _byte_budget
    _making, _byte_budget = threading.Lock(), None


config.memory_watchers.append(_resize)
os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class Reservation:
    """Bytes that one batch is charged, holds, and held at most."""

    charged: int
    held: int = 0
    high: int = 0


class Reservations:
    """One pipeline's share of the byte budget. Guarded by its engine's lock."""

    def __init__(self, byte_budget: ByteBudget, notify: Callable[[], None]) -> None:
        self.byte_budget = byte_budget
        self._notify = notify
        self._charges: dict[int, Reservation] = {}
        self._image_size: int | None = None
        self._batch_bytes: int | None = None
        self.held_bytes = self.peak_bytes = 0
        """Charged now, and at most so far."""
        self.notifications: deque[Callable[[], None]] = deque()
        """Callbacks to call, once no lock is held, because bytes became free."""

    def open(self, step: int, image_size: int | None, *, oldest: bool) -> bool:
        """Charge for a batch about to start; return False if it must wait for credit.

        Until one batch has been completed its size is unknown, so only the oldest is
        granted.
        """
        expected = self.expected(image_size)
        if not oldest and expected is None:
            return False
        nbytes = expected or 0
        if not self.byte_budget.charge(nbytes, None if oldest else self._notify):
            self.notifications += self.byte_budget.resting()
            return False
        self._charges[step] = Reservation(nbytes)
        self._grow(nbytes)
        return True

    def expected(self, image_size: int | None) -> int | None:
        """Return the expected peak bytes of a batch; None until one was completed.

        For a larger image than the last batch's, the bytes grow with the area.
        """
        known, nbytes = self._image_size, self._batch_bytes
        if nbytes and known and image_size and image_size > known:
            return int(nbytes * (image_size / known) ** 2)
        return nbytes

    def use(self, step: int, nbytes: int) -> None:
        """Adjust the charge of a batch that grew (or shrank) by `nbytes`."""
        charge = self._charges[step]
        charge.held += nbytes
        charge.high = max(charge.high, charge.held)
        excess = charge.held - charge.charged
        if excess > 0:
            self.byte_budget.charge(excess, None)
            charge.charged += excess
            self._grow(excess)

    def held(self, step: int) -> int:
        """Return the bytes that a batch in flight holds now."""
        return self._charges[step].held

    def complete(
        self, step: int, image_size: int | None, *, whole: bool = True
    ) -> None:
        """Charge a finished batch only what it holds, and remember its peak.

        An epoch's short last batch (not `whole`) says nothing about the next ones.
        """
        charge = self._charges[step]
        if whole or self._batch_bytes is None:
            self._learn(charge.high, image_size)
        spare, charge.charged = charge.charged - charge.held, charge.held
        self._let_go(spare)

    def close(self, step: int) -> None:
        """Release a batch that left, or was given up."""
        charge = self._charges.pop(step, None)
        if charge is not None:
            self._let_go(charge.charged)

    def close_all(self) -> None:
        """Release everything."""
        for step in list(self._charges):
            self.close(step)
        self.byte_budget.forget(self._notify)

    @property
    def batch_bytes(self) -> int:
        """Bytes that a batch needs in flight, judged by recent ones; 0 if unknown."""
        return self._batch_bytes or 0

    def _learn(self, high: int, image_size: int | None) -> None:
        """Grow at once, and shrink by an eighth of the difference.

        Otherwise one light batch would let ten heavy ones start.
        """
        known = self._batch_bytes
        if known is None or high > known or image_size != self._image_size:
            self._batch_bytes = high
        else:
            self._batch_bytes = known - (known - high) // 8
        self._image_size = image_size

    def _grow(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _let_go(self, nbytes: int) -> None:
        if nbytes:
            self.held_bytes -= nbytes
            self.notifications += self.byte_budget.release(nbytes)
