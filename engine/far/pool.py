"""Processes as workers: for functions that hold the GIL or that threads cannot share.

Each child (worker.py) returns what it made in shared memory that the trainer maps. The
engine lock wakes the selector thread when there may be work, the pipes when work is
done or a child is gone, and its own timer when samples have a time limit.

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

from ...system.descriptors import descriptors_left, most_descriptors
from ...system.run_queue import threads_of
from ..batch.buffer import FailedBatch
from ..core.chunk import Outcome
from ..core.connector import Connector, ReaderLost
from ..core.core import FAR_LEASE_NS
from ..program.cached import Cached
from ..recipe import Recipe
from ..workers.pool import Holding, PoolStatistics
from .assigned_engine import Result, Share, failed_outcome
from .child import Watchdog, WorkerChild
from .far_pool import FarPool
from .fork_server import LEAVE_S, ForkServer
from .handover import dumps

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


def children_for(workers: int, cores: int | None) -> int:
    """Return how many children carry so many workers.

    Args:
        workers: their number.
        cores: as for `ProcessPool`; None: each worker needs a child of its own.
    """
    if cores is None:
        return workers
    return min(workers, max(cores, -(-workers // MAX_TOGETHER)))


STORE_S = 1.0
"""How long children may take to end if they still write to a cache, in seconds."""


class ProcessPool(FarPool[WorkerChild]):
    """A number of workers in processes.

    Args:
        connector: where leases come from.
        recipe: the engine's recipe.
        fork_server: starts the processes.
        cores: children that a thread-safe segment starts before several workers share
            one.
    """

    executor = "process"
    ahead_ns = 10_000_000

    def __init__(
        self,
        connector: Connector,
        recipe: Recipe,
        fork_server: ForkServer,
        cores: int,
    ) -> None:
        super().__init__(connector, recipe, "worker processes")
        segment, self._fork_server = self._segment, fork_server
        self._cores = cores if segment.thread_safe else None
        self._most = 1 if segment.iterable else sys.maxsize
        self._staffed: tuple[int, int, int] | None = None
        """The request, children and generation for which nothing is left to adjust."""
        self._expired = False
        """Whether the fork server had expired when children were last adjusted."""
        self._shared = self._begun = 0
        """The request that was shared out last, and the last one for which all workers
        have begun."""
        self._short = False
        """Whether there was no shared memory for a batch."""
        self._watchdog = Watchdog(segment.timeout_s)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, READ)
        self._start()

    def statistics(self) -> PoolStatistics:
        """Return the numbers of workers.

        Once all that were asked for have begun, those that replace them, as for each
        epoch, do not count as beginning: their start is part of what they cost.
        """
        asked, children = self._shared, list(self._children)  # any thread may call this
        workers = sum(child.share.workers for child in children)
        beginning = 0
        if asked != self._begun:
            begun = sum(child.share.workers for child in children if not child.begins)
            beginning = max(0, min(asked, workers or asked) - begun)
            self._begun = self._begun if beginning else asked
        return PoolStatistics(workers, beginning)

    def leases(self, workers: int) -> Holding:
        children = children_for(workers, self._cores)  # some wait at them
        each = -(-workers // children)
        return Holding(children + -(-children // 2), FAR_LEASE_NS * each, children)

    def rest(self, until_ns: int) -> None:
        """Let all children rest before their next sample; 0: no more."""
        for child in list(self._children):
            with contextlib.suppress(ValueError):  # its page was closed: it has ended
                child.status_page.rest(until_ns)

    def at_work(self) -> bool:
        """Whether a child is at a sample."""
        with contextlib.suppress(ValueError):
            return any(child.status_page.at_work for child in list(self._children))
        return True

    def threads(self) -> list[str]:
        """Return the /proc folders of the children's threads."""
        return [
            path for child in list(self._children) for path in threads_of(child.pid)
        ]

    # The selector thread

    def _serve(self) -> None:
        while not self._engine_lock.closed:
            self._adjust()
            if self._leaving and not self._children:
                return
            self._hand_out()
            wait_s, lost = self._watchdog.look(self._children)
            for child in lost:
                self._reap(child)
            # Looked at once it listens: it may have missed the wake after a renewal.
            renewed = self._expired and not self._fork_server.expired
            for key, events in self._selector.select(0 if lost or renewed else wait_s):
                if key.data is None:
                    self._wakeup.clear()
                else:
                    self._hear(key.data, events)

    def _adjust(self) -> None:
        """Adjust the children, and what each has of the workers, to the request."""
        with self._engine_lock.lock:
            asked = self._asked
        self._expired = self._fork_server.expired
        if self._expired:
            asked = 0
        generation = self._fork_server.generation
        if (asked, len(self._children), generation) == self._staffed:
            return
        self._staff(min(children_for(asked, self._cores), self._most))
        if not self._children:
            self._fork_server.reap()
        self._share_out(asked)
        self._shared = asked
        now = asked, len(self._children), generation
        current = not any(map(self._outdated, self._children))
        settled = current and len(self._children) == self._wanted
        self._staffed = now if settled else None

    def _share_out(self, asked: int) -> None:
        """Tell each child how many of the workers it has."""
        children = len(self._children)
        workers = children if self._cores is None else max(asked, children)
        each, more = divmod(workers, max(1, children))
        for at, child in enumerate(self._children):
            share = Share(each + (at < more), workers)
            if share != child.share:
                child.share = share
                self._connector.resize_meter(child.meter, share.workers)
                self._post(child, dumps(share))

    def _outdated(self, child: WorkerChild) -> bool:
        """Whether a child's generation has ended: it ends with its fork server."""
        return child.generation != self._fork_server.generation

    def _has_room(self) -> bool:
        """Whether there are descriptors for one more child; there must be one."""
        to_come = sum(child.pid == 0 for child in self._children)
        enough = descriptors_left() - to_come >= CHILD_NEEDS + KEPT_FREE
        if enough or not self._children:
            return True
        self._most = self._wanted = len(self._children)
        LOGGER.warning(NO_MORE, most_descriptors(), self._most)
        return False

    def _start_child(self, number: int) -> None:
        made = self._fork_server.start_worker(self._connector.segment, number)
        child = WorkerChild(*made, number, self._connector.enter())
        self._children.append(child)
        self._selector.register(child.pipe, READ, child)

    def _end(self, child: WorkerChild) -> None:
        self._selector.unregister(child.pipe)
        child.close()

    def _post(
        self,
        child: WorkerChild,
        packed: bytes,
        number: int = 0,  # noqa: ARG002 it counts, too
    ) -> None:
        with contextlib.suppress(EOFError):  # its end of file will arrive
            child.pipe.post(packed)
        self._listen(child)

    def _listen(self, child: WorkerChild) -> None:
        """Watch a child's pipe for room for as long as something waits for it."""
        if child.writing != child.pipe.waiting:
            child.writing = child.pipe.waiting
            events = READ | WRITE if child.writing else READ
            self._selector.modify(child.pipe, events, child)

    def _hear(self, child: WorkerChild, events: int) -> None:
        try:
            if events & WRITE:
                child.pipe.flush()
                self._listen(child)
            messages = child.pipe.collect() if events & READ else []
        except EOFError:
            self._reap(child)
            return
        for message in messages:
            if isinstance(message, int):
                child.hello(message)
            else:
                self._take_back(child, message)

    def _take_back(self, child: WorkerChild, result: Result) -> None:
        if result.short and not self._short:
            self._short = True
            LOGGER.warning(NO_SLAB, result.short)
        try:
            if result.sent is not None:
                data = child.unpacker.receive(result.sent, child.pipe.descriptors)
                result = result._replace(sent=data)
        except Exception as error:  # noqa: BLE001 whatever unpickling user objects raises
            chunk = child.errands[result.number].chunk
            failed = failed_outcome(chunk, self._stage, error)
            if result.whole:
                failed = Outcome(len(chunk), made=FailedBatch(error))
            result = Result(result.number, failed)
        self._settle(child, result)

    def _reap(self, child: WorkerChild) -> None:
        """Handle the end of a child: its work returns to the front."""
        if not self._outdated(child):  # otherwise its fork server ended it
            death = f"worker process {child.pid or '(starting)'} {child.how_it_ended()}"
            self._note_death(child, death, begun=not child.failed)
            if self._segment.iterable:
                self._engine_lock.fail(ReaderLost())
        self._forget(child)

    def _end_all(self) -> None:
        """Stop every child; the fork server waits until they are gone."""
        stores = any(isinstance(each, Cached) for each in self._program.operations)
        end_s = time.monotonic() + (STORE_S if stores else LEAVE_S)
        children, self._children = self._children, []
        self._selector.close()
        for child in children:
            self._connector.leave(child.meter)
            child.pipe.close()
        for child in children:
            if not child.ends_within(end_s - time.monotonic()):
                child.kill()
            child.close()
