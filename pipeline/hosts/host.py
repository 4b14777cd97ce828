"""What a run asks of wherever its engine lives."""

from __future__ import annotations

from typing import Protocol

from ..feed import Delivery
from ..knob import Knob
from ..monitor import Reading
from ..plan import Cursor

__all__ = ["Host"]


class Host(Protocol):
    """An engine with its feed, here or elsewhere.

    `next`, `begin`, `glance` and `cursor` belong to the trainer's thread; `read` and
    `knobs` may be called from any, at the same time.
    """

    @property
    def era(self) -> int:
        """Changes when all counters begin anew, as the engine is another one."""
        ...

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        ...

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, not yet stamped; None at its end."""
        ...

    def begin(self, cursor: Cursor) -> None:
        """Go on at `cursor`; what is in flight for elsewhere is dropped."""
        ...

    def read(self) -> Reading:
        """Return all totals as of now, or as of lately where the engine is silent."""
        ...

    def glance(self) -> Reading | None:
        """Return totals once a second or so, where they cost the trainer nothing."""
        ...

    def knobs(self) -> tuple[Knob, ...]:
        """Return everything that may be turned."""
        ...

    def is_free(self) -> bool:
        """Whether no thread is stuck in a lock of ours; if so, it may be this one."""
        ...

    def close(self) -> None:
        """Stop everything. Idempotent in each of its steps."""
        ...
