"""An epoch: one loop over a face, from `iter()` to its end or to where it was left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function

from .tuned import Slot, TunedRun

if TYPE_CHECKING:
    from .pipeline.feed import Delivery

__all__ = ["Epoch", "Loop"]


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
        if delivery is None or delivery.plan.last:  # frameworks ask no further
            self._abandon.detach()
            self._slot.release(self._run)
        if delivery is None:
            self._over = True
            raise StopIteration
        return delivery.data

    def withdraw(self) -> None:
        """Leave the run to another epoch, which begins in place of this one."""
        self._over = True
        self._abandon.detach()
        self._slot.release(self._run)


class Loop(Iterator[Any]):
    """One epoch of penstock's engine, as torch's iterators look from outside.

    Args:
        begin: begins the epoch: at once, and again at the first batch wanted if
            somebody called `set_epoch` in between, as Lightning does after a resume.
        order: what the samplers draw their order from.
        length: batches of the epoch.
        pinned: whether batches are copied to pinned memory.
    """

    def __init__(
        self,
        begin: Callable[[], Epoch],
        order: Callable[[], list[Any]],
        length: Callable[[], int],
        *,
        pinned: bool,
    ) -> None:
        self._begin: Callable[[], Epoch] | None = begin
        self._order = order
        self._epoch = begin()
        self._drawn_from = order()  # after it: some samplers go on by themselves
        self._length = length
        self._pinned = pinned

    def __next__(self) -> Any:
        # Torch's profilers know loading by the beginning and the end of this name.
        with record_function("enumerate(DataLoader)#_PenstockIter.__next__"):
            begin, self._begin = self._begin, None
            if begin is not None and self._order() != self._drawn_from:
                self._epoch.withdraw()
                self._epoch = begin()
            data = next(self._epoch)
            if self._pinned:
                from torch.utils.data._utils.pin_memory import pin_memory

                data = pin_memory(data)  # type: ignore[no-untyped-call]
            return data

    def __len__(self) -> int:
        return self._length()
