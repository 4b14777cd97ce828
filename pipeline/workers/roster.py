"""Who works for a segment in processes: workers, and the children that carry them.

A worker is a lease at a time, told apart by its instrument. A child is a process; where
the segment is thread-safe it carries several workers, each in a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import sys
import time
from collections.abc import Iterator
from itertools import count

from ..connector import Connector
from ..metrics import WorkerMeter
from .child import Child
from .descriptors import descriptors_left, most_descriptors
from .nursery import Post
from .template import Template

__all__ = ["READ", "WRITE", "Roster"]

LOGGER = logging.getLogger("penstock")
NO_MORE = (
    "`ulimit -n` is %d, which leaves room for %d worker processes beside what else is"
    " open; raise it to have more"
)
CHILD_NEEDS = 3
"""Descriptors that a child takes: its pipe, its page, and the process itself."""
KEPT_FREE = 24
"""Descriptors that are left to others."""
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
MOST_LANES = 16
"""Workers a child carries, if they are many: a GIL takes 20 to 100 us to change hands,
and a wait for it is that much longer for each thread."""
AHEAD_NS = 10_000_000
"""Leases that take longer, in a child with one worker, do not wait there for one
another: a worker that becomes free elsewhere would be sooner at them."""


class Roster:
    """Belongs to the selector thread; `workers` may be read by any.

    Args:
        connector: where workers enter and leave.
        template: makes the children.
        cores: children that a thread-safe segment has, if it has as many workers; None:
            each worker needs a child of its own.
    """

    def __init__(
        self, connector: Connector, template: Template, cores: int | None
    ) -> None:
        self._connector = connector
        self._template = template
        self._cores = cores
        self._asked = 0
        self._most = sys.maxsize
        """Children that there are descriptors for."""
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, Child] = {}
        """By the descriptor of their pipe."""
        self.workers = 0
        self.idle: list[WorkerMeter] = []
        """The workers without a lease; the last one waits for the shortest time."""

    def staff(self, asked: int) -> None:
        """Bring workers and children to the numbers asked for."""
        self._asked = asked
        while self.workers < asked:
            self.idle.append(self._connector.enter())
            self.workers += 1
        while self.idle and self.workers > asked:
            self._connector.leave(self.idle.pop(0))
            self.workers -= 1
        for child in list(self.children.values()):
            surplus = len(self.children) > self._wanted
            if not child.errands and (surplus or self.dismissed(child)):
                self._dismiss(child)
        while len(self.children) < self._wanted:
            if self.children and not self._has_room():
                self._most = len(self.children)
                LOGGER.warning(NO_MORE, most_descriptors(), self._most)
                break
            self._hire()

    def free(self, meter: WorkerMeter) -> None:
        """A lease of this worker is settled."""
        if not meter.leases:
            self.idle.append(meter)

    def lanes(self) -> int:
        """Return how many leases a child works on at once."""
        if self._cores is None:
            return 1
        return max(1, -(-self._asked // max(1, len(self.children))))

    def ahead(self, lease_ns: float) -> int:
        """Return how many leases, of so long each, may wait at a child."""
        if len(self.children) != self._wanted:
            return 0  # one is to go, and could not
        lanes = self.lanes()
        return int(lease_ns < AHEAD_NS) if lanes == 1 else lanes // 2

    def freest(self, most: int) -> Child | None:
        """Return the child with the fewest leases, if those are less than `most`."""
        children = [c for c in self.children.values() if not self.dismissed(c)]
        child = min(children, key=lambda c: len(c.errands), default=None)
        if child is None or child.asked_ns:
            return None
        return child if len(child.errands) < most else None

    def dismissed(self, child: Child) -> bool:
        """Whether a child's generation is over: it ends with its template."""
        return child.generation != self._template.generation

    def listen(self, child: Child) -> None:
        """Look for room in a child's pipe for as long as something waits for it."""
        if child.writing != child.mailbox.waiting:
            child.writing = child.mailbox.waiting
            events = READ | WRITE if child.writing else READ
            self.selector.modify(child.mailbox, events)

    def forget(self, child: Child) -> None:
        """Let go of a child, which ends it if it has not ended."""
        self.selector.unregister(child.mailbox)
        del self.children[child.mailbox.fileno()]
        child.close()

    def end_all(self, wait_s: float = 0.0) -> None:
        """Stop every child; the template waits until they are gone.

        Args:
            wait_s: how long they may take to put away what they hold.
        """
        for meter in list(self._all()):
            self._connector.leave(meter)
        children = list(self.children.values())
        self.children.clear()
        self.selector.close()
        if wait_s:
            for child in children:
                child.hang_up()
        end_s = time.monotonic() + wait_s
        for child in children:
            if not wait_s or not child.ends_within(end_s - time.monotonic()):
                child.kill()
            child.close()

    @property
    def _wanted(self) -> int:
        """How many children carry the workers asked for."""
        asked, cores = min(self._asked, self._most), self._cores
        if cores is None:
            return asked
        return min(asked, max(cores, -(-asked // MOST_LANES)))

    def _has_room(self) -> bool:
        """Whether there are descriptors for one more child."""
        to_come = sum(child.pid == 0 for child in self.children.values())
        return descriptors_left() - to_come >= CHILD_NEEDS + KEPT_FREE

    def _hire(self) -> None:
        generation = self._template.generation
        taken = {child.number for child in self.children.values()}
        number = next(n for n in count() if n not in taken)
        post = Post(self._connector.segment, number)
        child = Child(*self._template.hire(post), generation, number)
        self.children[child.mailbox.fileno()] = child
        self.selector.register(child.mailbox, READ)

    def _dismiss(self, child: Child) -> None:
        with contextlib.suppress(EOFError):  # gone already
            child.mailbox.post(None)
        self.forget(child)

    def _all(self) -> Iterator[WorkerMeter]:
        yield from self.idle
        for child in self.children.values():
            yield from (errand.meter for errand in child.errands.values())
