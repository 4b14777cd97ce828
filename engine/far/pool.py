"""Processes as workers: for functions that hold the GIL or that threads cannot share.

Each child runs an engine of its own (worker.py). It is assigned whole batches where
that is possible, otherwise some rows of one, and returns what it made in shared memory
that the trainer maps. One selector thread in the trainer serves all children. It never
waits for a lease or for a child. The engine lock wakes it when there may be work, the
pipes when work is done or a child is gone, and its own timer when samples have a time
limit.

The workers of a segment are shared among its children: if it is thread-safe, a child
has several once there is one for each core. A child may be assigned one more batch
while it makes one, so that it need not wait for the trainer's answer.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from ...system.descriptors import descriptors_left, most_descriptors
from ...system.run_queue import threads_of
from ..batch.buffer import FailedBatch
from ..core.chunk import Chunk, Lease, Outcome
from ..core.connector import Connector, ReaderLost
from ..core.core import FAR_LEASE_NS
from ..program.cached import Cached
from ..recipe import SegmentRecipe
from ..workers.pool import Holding, PoolStatistics
from .assigned_engine import failed_outcome
from .assignment import Result, Share
from .child import Errand, Watchdog, WorkerChild
from .far_pool import NEVER_BEGUN, FarPool, with_data
from .fork_server import LEAVE_S, ForkServer
from .handover import Laid, dumps

__all__ = [
    "READ",
    "WRITE",
    "ChildSet",
    "ProcessPool",
]

LOGGER = logging.getLogger("penstock")
NO_SLAB = (
    "no shared memory for a batch (%s): batches come from worker processes through"
    " pipes, which takes longer; free some memory, or raise the container's limit"
)
NO_MORE = (
    "`ulimit -n` is %d, which leaves room for %d worker processes beside the other open"
    " files; training goes on with these. Raise it to get more"
)
CHILD_NEEDS = 3
"""Descriptors that a child takes: its pipe, its page, and the process itself."""
KEPT_FREE = 24
"""Descriptors that are left for other uses."""
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
MAX_TOGETHER = 16
"""Most workers in one child: a GIL takes 20 to 100 us to change hands, and every thread
makes the wait for it that much longer."""
AHEAD_NS = 10_000_000
"""Leases longer than this do not wait behind one another at a child: another one that
becomes free would start them sooner."""


class ChildSet:
    """The children that carry the workers of a segment.

    Belongs to the selector thread; any thread may read `workers`.

    Args:
        connector: where workers register.
        fork_server: starts the children.
        cores: children that a thread-safe segment starts before several workers share
            one; None: each worker needs a child of its own.
        most: largest number of children.
    """

    def __init__(
        self,
        connector: Connector,
        fork_server: ForkServer,
        cores: int | None,
        most: int = sys.maxsize,
    ) -> None:
        self._connector = connector
        self._fork_server = fork_server
        self._cores = cores
        self._asked = self._begun = 0
        self._most = most
        self._staffed: tuple[int, int, int] | None = None
        """The request, children and generation for which nothing is left to adjust."""
        self._expired = False
        """Whether the fork server had expired when `staff` was called."""
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, WorkerChild] = {}
        """By the descriptor of their pipe."""

    def staff(self, asked: int) -> None:
        """Adjust the children, and what each has of the workers, to the request."""
        self._expired = self._fork_server.expired
        if self._expired:
            asked = 0
        now = asked, len(self.children), self._fork_server.generation
        if now == self._staffed:
            return
        self._asked = asked
        for child in list(self.children.values()):
            surplus = len(self.children) > self._wanted
            if not child.errands and (surplus or self.outdated(child)):
                self._stop_child(child)
        if not self.children:
            self._fork_server.reap()
        while len(self.children) < self._wanted:
            if self.children and not self._has_room():
                self._most = len(self.children)
                LOGGER.warning(NO_MORE, most_descriptors(), self._most)
                break
            self._start_child()
        self._share_out()
        settled = len(self.children) == self._wanted and not any(
            map(self.outdated, self.children.values())
        )
        self._staffed = (asked, len(self.children), now[2]) if settled else None

    @property
    def renewed(self) -> bool:
        """Whether the fork server can start children, and could not before."""
        return self._expired and not self._fork_server.expired

    @property
    def workers(self) -> int:
        """Workers that the children have together."""
        children = list(self.children.values())  # any thread may call this
        return sum(child.share.workers for child in children if child.share)

    def beginning(self) -> int:
        """Return how many workers have not done any work yet.

        Once all that were asked for have, those that replace them, as for each epoch,
        do not count: their start is part of what so many workers cost.
        """
        asked, children = self._asked, list(self.children.values())
        if asked == self._begun:
            return 0
        begun = [c.share.workers for c in children if c.share and not c.begins]
        found = max(0, min(asked, self.workers or asked) - sum(begun))
        self._begun = self._begun if found else asked
        return found

    def ahead(self, lease_ns: float) -> int:
        """Return how many leases of this duration may wait at a child."""
        if len(self.children) != self._wanted:
            return 0  # a child is about to leave, and must be able to
        return int(lease_ns < AHEAD_NS)

    def by_leases(self) -> list[WorkerChild]:
        """Return the children that may get leases, those with the fewest first."""
        there = [
            child
            for child in self.children.values()
            if not (self.outdated(child) or child.asked_ns)
        ]
        return sorted(there, key=lambda child: len(child.errands))

    def outdated(self, child: WorkerChild) -> bool:
        """Whether a child's generation has ended: it ends with its fork server."""
        return child.generation != self._fork_server.generation

    def listen(self, child: WorkerChild) -> None:
        """Watch a child's pipe for room for as long as something waits for it."""
        if child.writing != child.pipe.waiting:
            child.writing = child.pipe.waiting
            events = READ | WRITE if child.writing else READ
            self.selector.modify(child.pipe, events)

    def forget(self, child: WorkerChild) -> None:
        """Forget a child, which ends it if it still runs."""
        self.selector.unregister(child.pipe)
        del self.children[child.pipe.fileno()]
        self._connector.leave(child.meter)
        child.close()

    def end_all(self, wait_s: float) -> None:
        """Stop every child; the fork server waits until they are gone.

        Args:
            wait_s: how long they may take to store what they hold, in seconds.
        """
        children = list(self.children.values())
        self.children.clear()
        self.selector.close()
        for child in children:
            self._connector.leave(child.meter)
            child.pipe.close()
        end_s = time.monotonic() + wait_s
        for child in children:
            if not child.ends_within(end_s - time.monotonic()):
                child.kill()
            child.close()

    @property
    def _wanted(self) -> int:
        """Number of children that carry the requested workers."""
        return min(children_for(self._asked, self._cores), self._most)

    def _has_room(self) -> bool:
        """Whether there are descriptors for one more child."""
        to_come = sum(child.pid == 0 for child in self.children.values())
        return descriptors_left() - to_come >= CHILD_NEEDS + KEPT_FREE

    def _start_child(self) -> None:
        taken = {child.number for child in self.children.values()}
        number = next(n for n in count() if n not in taken)
        made = self._fork_server.start_worker(self._connector.segment, number)
        child = WorkerChild(*made, number, self._connector.enter())
        self.children[child.pipe.fileno()] = child
        self.selector.register(child.pipe, READ)

    def _share_out(self) -> None:
        """Tell each child how many of the workers it has."""
        if not self.children:
            return
        asked = max(self._asked, len(self.children))
        each, more = divmod(asked, len(self.children))
        if self._cores is None:
            each, more, asked = 1, 0, len(self.children)
        for at, child in enumerate(self.children.values()):
            share = Share(each + (at < more), asked)
            if share == child.share:
                continue
            child.share = share
            self._connector.resize_meter(child.meter, share.workers)
            with contextlib.suppress(EOFError):  # its end will be noticed
                child.pipe.post(dumps(share))
            self.listen(child)

    def _stop_child(self, child: WorkerChild) -> None:
        with contextlib.suppress(EOFError):  # it has ended already
            child.pipe.post(dumps(None))
        self.forget(child)


def children_for(workers: int, cores: int | None) -> int:
    """Return how many children carry so many workers.

    Args:
        workers: their number.
        cores: as for `ChildSet`.
    """
    if cores is None:
        return workers
    return min(workers, max(cores, -(-workers // MAX_TOGETHER)))


STORE_S = 1.0
"""How long children may take to end if they still write to a cache, in seconds."""


class ProcessPool(FarPool):
    """A number of workers in processes.

    Args:
        connector: where leases come from.
        recipe: the segment's recipe.
        fork_server: starts the processes.
        cores: as for `ChildSet`, if the segment is thread-safe.
        seed: as for `FarPool`.
    """

    executor = "process"

    def __init__(
        self,
        connector: Connector,
        recipe: SegmentRecipe,
        fork_server: ForkServer,
        cores: int,
        seed: Callable[[], int],
    ) -> None:
        super().__init__(connector, recipe, "worker processes", seed)
        self._reads_on = recipe.iterable
        self._cores = cores if recipe.thread_safe else None
        most = 1 if recipe.iterable else sys.maxsize
        self._child_set = ChildSet(connector, fork_server, self._cores, most)
        self._short = False
        """Whether there was no shared memory for a batch."""
        self._watchdog = Watchdog(recipe.timeout_s)
        self._child_set.selector.register(self._wakeup, READ)
        self._start()

    def statistics(self) -> PoolStatistics:
        child_set = self._child_set
        return PoolStatistics(child_set.workers, child_set.beginning())

    def leases(self, workers: int) -> Holding:
        children = children_for(workers, self._cores)  # some wait at them
        each = -(-workers // children)
        return Holding(children + -(-children // 2), FAR_LEASE_NS * each, children)

    def rest(self, until_ns: int) -> None:
        for child in list(self._child_set.children.values()):
            with contextlib.suppress(ValueError):  # its page was closed: it has ended
                child.status_page.rest(until_ns)

    def at_work(self) -> bool:
        children = list(self._child_set.children.values())
        with contextlib.suppress(ValueError):
            return any(child.status_page.at_work for child in children)
        return True

    def threads(self) -> list[str]:
        children = list(self._child_set.children.values())
        return [path for child in children for path in threads_of(child.pid)]

    # The selector thread

    def _serve(self) -> None:
        child_set = self._child_set
        while not self._engine_lock.closed:
            with self._engine_lock.lock:
                asked = self._asked
            child_set.staff(asked)
            if self._leaving and not child_set.children:
                return
            self._hand_out()
            wait_s, lost = self._watchdog.look(child_set.children.values())
            for child in lost:
                self._reap(child)
            # Looked at once it listens: it may have missed the wake after a renewal.
            at_once = bool(lost) or child_set.renewed
            for key, events in child_set.selector.select(0 if at_once else wait_s):
                self._hear(key.fd, events)

    def _hear(self, descriptor: int, events: int) -> None:
        if descriptor == self._wakeup.fileno():
            self._wakeup.clear()
            return
        child = self._child_set.children[descriptor]
        try:
            if events & WRITE:
                child.pipe.flush()
                self._child_set.listen(child)
            messages = child.pipe.collect() if events & READ else []
        except EOFError:
            self._reap(child)
            return
        for message in messages:
            if isinstance(message, int):
                child.hello(message)
            else:
                self._take_back(child, message)

    def _hand_out(self) -> None:
        """Give leases to children that have room for them, while there are any.

        It starts listening before it looks, so that work arriving later wakes it.
        """
        self._listening = True
        child_set = self._child_set
        most = 1 if self._blame else 1 + child_set.ahead(self._lease_ns)
        for having in range(most):
            for child in child_set.by_leases():
                if len(child.errands) != having:
                    continue
                waited = child.meter.waiting_for is not None
                lease = self._take(child.meter)
                if lease is not None:
                    self._send(child, lease)
                elif waited or having:
                    return  # and so do the others
        free = any(len(c.errands) < most for c in child_set.by_leases())
        self._listening = free or not child_set.children

    def _send(self, child: WorkerChild, lease: Lease) -> None:
        try:
            chunk, assignment = self._assignment(lease)
            child.assign(Errand(lease, chunk, time.monotonic_ns()), assignment)
        except EOFError:
            return  # its end of file will arrive, and return the lease
        except Exception as error:  # noqa: BLE001 whatever pickling user data raises
            self._give_up(lease, child.meter, self._unsendable(error))
            return
        self._child_set.listen(child)

    def _take_back(self, child: WorkerChild, result: Result) -> None:
        errand = child.errands.pop(result.number)
        child.settled = True
        if result.short and not self._short:
            self._short = True
            LOGGER.warning(NO_SLAB, result.short)
        outcome = received(child, result, errand.chunk, self._stage)
        self._settle(errand.lease, errand.chunk, outcome, child.meter)

    def _reap(self, child: WorkerChild) -> None:
        """Handle the end of a child: its work returns to the front."""
        if not self._child_set.outdated(child):  # otherwise its fork server ended it
            self._note_death(child)
            if self._reads_on:
                self._engine_lock.fail(ReaderLost())
        for errand in child.errands.values():
            self._connector.settle(errand.lease, Outcome(done=0), child.meter)
        self._child_set.forget(child)

    def _note_death(self, child: WorkerChild) -> None:
        """Note the samples that a child was working on.

        Raises:
            WorkerError: too many children have died with no work done in between.
        """
        death = f"worker process {child.pid or '(starting)'} {child.how_it_ended()}"
        keys: list[Any] = []
        for number, errand in child.errands.items():
            suspects = child.suspects(number)
            keys += [self._key(errand.chunk, row) for row in suspects]
            self._blame.add(errand.chunk, suspects, death)
        self._count_death(death, keys, NEVER_BEGUN if child.failed else 1)

    def _end_all(self) -> None:
        stores = any(isinstance(each, Cached) for each in self._program.operations)
        self._child_set.end_all(STORE_S if stores else LEAVE_S)


def received(child: WorkerChild, result: Result, chunk: Chunk, stage: str) -> Outcome:
    """Return the outcome in a child's result, with what the child has made."""
    sent, descriptors = result.sent, child.pipe.descriptors
    if sent is None:
        return with_data(result, None)
    try:
        if isinstance(sent, Laid):
            data = child.unpacker.lay_out(sent, descriptors)
        else:
            data = child.unpacker.unpack(sent, descriptors)
    except Exception as error:  # noqa: BLE001 whatever unpickling user objects raises
        if result.whole:
            return Outcome(len(chunk), made=FailedBatch(error))
        return failed_outcome(chunk, stage, error)
    return with_data(result, data)
