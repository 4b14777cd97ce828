"""An epoch: one loop over a face, from `iter()` to its end or to where it was left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .tuned import Slot, TunedRun

if TYPE_CHECKING:
    from .pipeline.feed import Delivery

__all__ = ["Epoch"]


class Epoch(Iterator[Any]):
    """Yields one epoch's batches. Dropped early, it stops the workers.

    Args:
        slot: where the run is held.
        run: what to loop over.
        hand_over: told of each delivery, and by None of the end. A method of the face,
            which so lives for as long as the loop does.
    """

    def __init__(
        self, slot: Slot, run: TunedRun, hand_over: Callable[[Delivery | None], None]
    ) -> None:
        self._slot = slot
        self._run = run
        self._hand_over = hand_over
        self._over = False
        self._abandon = weakref.finalize(self, slot.finalise, run)

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            delivery = self._run.next()
        except Exception:
            raise
        except BaseException:  # Ctrl-C, anywhere in the engine: it cannot go on
            self._abandon()
            raise
        self._hand_over(delivery)
        if delivery is None:
            self._over = True
            self._abandon.detach()
            self._slot.release(self._run)
            raise StopIteration
        return delivery.data
