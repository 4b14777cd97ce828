"""The time limit of a sample: who takes longer shows its stacks and is replaced."""

from __future__ import annotations

import time
from collections.abc import Iterable

from .child import Child
from .hands import ALL_ROWS

__all__ = ["Watchdog"]

STACKS_NS = 300_000_000
"""How long a stuck worker is given to show its stacks."""
GONE_NS = 2_000_000_000
"""How long a killed one may take to be gone, before it is counted as such."""


class Watchdog:
    """Watches the children of one segment.

    Args:
        timeout_s: how long a sample may take; None: for ever.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._limit_ns = None if timeout_s is None else int(timeout_s * 1e9)
        self.timeout_s = timeout_s

    def look(self, children: Iterable[Child]) -> tuple[float | None, list[Child]]:
        """Do what is due now.

        Returns:
            Seconds until the next look, None if there is nothing to wait for; and the
            children that were killed and do not end as they should.
        """
        if self._limit_ns is None:
            return None, []
        now_ns = time.monotonic_ns()
        due = [(self._look_at(child, now_ns), child) for child in children]
        times = [at_ns for at_ns, _ in due if at_ns is not None]
        lost = [child for _, child in due if gone(child, now_ns)]
        if not times:
            return None, lost
        return max(0.0, (min(times) - now_ns) / 1e9), lost

    def _look_at(self, child: Child, now_ns: int) -> int | None:
        """Return when to look at a child again."""
        if child.killed_ns:
            return child.killed_ns + GONE_NS
        if child.asked_ns:
            return self._after_asking(child, now_ns)
        first = self._first_due(child)
        if first is None:
            return None
        due_ns, number, row = first
        if now_ns < due_ns:
            return due_ns
        child.stuck, child.asked_ns = (number, row), now_ns
        child.ask_for_stacks()
        return now_ns + STACKS_NS

    def _after_asking(self, child: Child, now_ns: int) -> int:
        if now_ns < child.asked_ns + STACKS_NS:
            return child.asked_ns + STACKS_NS
        child.killed_ns = now_ns
        child.kill()
        return now_ns + GONE_NS

    def _first_due(self, child: Child) -> tuple[int, int, int] | None:
        """Return the deadline that comes first: when, and of which task and row."""
        assert self._limit_ns is not None
        if not child.errands or not child.pid:  # it is starting
            return None
        limit_ns = self._limit_ns
        # A lane may stop with a task in hand that it has told the outcome of.
        held = {
            number: at for number, at in child.held().items() if number in child.errands
        }
        due = [(at.since_ns + limit_ns, number, at.row) for number, at in held.items()]
        if len(held) < child.lanes:  # one is free for those that wait, yet they do
            moved_ns = child.hands.moved_ns()
            due += [
                (max(errand.sent_ns, moved_ns) + limit_ns, number, ALL_ROWS)
                for number, errand in child.errands.items()
                if number not in held
            ]
        return min(due, default=None)


def gone(child: Child, now_ns: int) -> bool:
    """Whether a child was killed so long ago that it is not waited for any more."""
    return bool(child.killed_ns) and now_ns >= child.killed_ns + GONE_NS
