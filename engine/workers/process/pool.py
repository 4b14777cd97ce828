"""Processes as workers: for functions that hold the GIL or that threads cannot share.

One selector thread in the trainer serves all children of a segment. It never waits for
a lease or for a child. The engine lock wakes it when there may be work, the pipes when
work is done or a child is gone, and its own timer when samples have a time limit.

A worker holds one lease at a time. A child is a process. If the segment is thread-safe,
a child carries several leases, each in a thread of its own. So no more children than
cores are needed until each carries `MAX_LANES` workers, which mostly wait for storage.
A few more leases wait at the child, so that its threads need not wait for the trainer's
answer.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from ....system.descriptors import descriptors_left, most_descriptors
from ....system.run_queue import threads_of
from ...batch.buffer import FailedBatch, Finished
from ...core.chunk import Lease, Outcome
from ...core.connector import Connector
from ...core.metrics import WorkerMeter
from ...program.cached import Cached
from ...recipe import SegmentRecipe
from ..pool import PoolStatistics, sink_of
from .child import Errand, Watchdog, WorkerChild
from .far import NEVER_BEGUN, FarPool
from .fork_server import LEAVE_S, ForkServer
from .handover import Packed, dumps, recall
from .slabs import Slab, SlabPool
from .worker import SlabPlacement, Task

__all__ = [
    "READ",
    "WRITE",
    "ChildSet",
    "ProcessPool",
]

LOGGER = logging.getLogger("penstock")
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
MAX_LANES = 16
"""Most workers in a child: a GIL takes 20 to 100 us to change hands, and every thread
makes the wait for it that much longer."""
AHEAD_NS = 10_000_000
"""In a child with one worker, leases longer than this do not wait behind one another: a
worker that becomes free elsewhere would start them sooner."""


class ChildSet:
    """The workers of a segment, and the children that carry them.

    Belongs to the selector thread; any thread may read `workers`.

    Args:
        connector: where workers register.
        fork_server: starts the children.
        cores: children that a thread-safe segment starts before several workers share
            one; None: each worker needs a child of its own.
    """

    def __init__(
        self, connector: Connector, fork_server: ForkServer, cores: int | None
    ) -> None:
        self._connector = connector
        self._fork_server = fork_server
        self._cores = cores
        self._asked = 0
        self._most = sys.maxsize
        """Number of children that there are descriptors for."""
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, WorkerChild] = {}
        """By the descriptor of their pipe."""
        self.workers = 0
        self.idle: list[WorkerMeter] = []
        """Workers without a lease; the last one has waited the shortest."""

    def staff(self, asked: int) -> None:
        """Adjust workers and children to the requested numbers."""
        self._asked = asked
        while self.workers < asked:
            self.idle.append(self._connector.enter())
            self.workers += 1
        while self.idle and self.workers > asked:
            self._connector.leave(self.idle.pop(0))
            self.workers -= 1
        for child in list(self.children.values()):
            surplus = len(self.children) > self._wanted
            if not child.errands and (surplus or self.outdated(child)):
                self._stop_child(child)
        while len(self.children) < self._wanted:
            if self.children and not self._has_room():
                self._most = len(self.children)
                LOGGER.warning(NO_MORE, most_descriptors(), self._most)
                break
            self._start_child()

    def beginning(self) -> int:
        """Return how many of the wanted children have not done any work yet."""
        children = list(self.children.values())  # any thread may call this
        missing = max(0, self._wanted - len(children))
        return missing + sum(child.begins for child in children)

    def free(self, meter: WorkerMeter) -> None:
        """Note that a lease of this worker was settled."""
        if not meter.leases:
            self.idle.append(meter)

    def lanes(self) -> int:
        """Return how many leases a child works on at once."""
        if self._cores is None:
            return 1
        return max(1, -(-self._asked // max(1, len(self.children))))

    def ahead(self, lease_ns: float) -> int:
        """Return how many leases of this duration may wait at a child."""
        if len(self.children) != self._wanted:
            return 0  # a child is about to leave, and must be able to
        lanes = self.lanes()
        return int(lease_ns < AHEAD_NS) if lanes == 1 else lanes // 2

    def freest(self, most: int) -> WorkerChild | None:
        """Return the child with the fewest leases, if it has fewer than `most`."""
        children = [c for c in self.children.values() if not self.outdated(c)]
        child = min(children, key=lambda c: len(c.errands), default=None)
        if child is None or child.asked_ns:
            return None
        return child if len(child.errands) < most else None

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
        child.close()

    def end_all(self, wait_s: float) -> None:
        """Stop every child; the fork server waits until they are gone.

        Args:
            wait_s: how long they may take to store what they hold, in seconds.
        """
        for meter in list(self._all()):
            self._connector.leave(meter)
        children = list(self.children.values())
        self.children.clear()
        self.selector.close()
        for child in children:
            child.pipe.close()
        end_s = time.monotonic() + wait_s
        for child in children:
            if not child.ends_within(end_s - time.monotonic()):
                child.kill()
            child.close()

    @property
    def _wanted(self) -> int:
        """Number of children that carry the requested workers."""
        asked, cores = min(self._asked, self._most), self._cores
        if cores is None:
            return asked
        return min(asked, max(cores, -(-asked // MAX_LANES)))

    def _has_room(self) -> bool:
        """Whether there are descriptors for one more child."""
        to_come = sum(child.pid == 0 for child in self.children.values())
        return descriptors_left() - to_come >= CHILD_NEEDS + KEPT_FREE

    def _start_child(self) -> None:
        taken = {child.number for child in self.children.values()}
        number = next(n for n in count() if n not in taken)
        made = self._fork_server.start_worker(self._connector.segment, number)
        child = WorkerChild(*made, number)
        self.children[child.pipe.fileno()] = child
        self.selector.register(child.pipe, READ)

    def _stop_child(self, child: WorkerChild) -> None:
        with contextlib.suppress(EOFError):  # it has ended already
            child.pipe.post(None)
        self.forget(child)

    def _all(self) -> Iterator[WorkerMeter]:
        yield from self.idle
        for child in self.children.values():
            yield from (errand.meter for errand in child.errands.values())


STORE_S = 1.0
"""How long children may take to end if they still write to a cache, in seconds."""


class ProcessPool(FarPool):
    """A number of workers in processes.

    Args:
        connector: where leases come from.
        recipe: the segment's recipe.
        fork_server: starts the processes.
        slabs: the memory of batches.
        cores: as for `ChildSet`, if the segment is thread-safe.
        seed: returns the seed for the draws of a collate_fn now.
    """

    executor = "process"

    def __init__(
        self,
        connector: Connector,
        recipe: SegmentRecipe,
        fork_server: ForkServer,
        slabs: SlabPool,
        cores: int,
        seed: Callable[[], int],
    ) -> None:
        super().__init__(connector, recipe, "worker processes")
        self._seed = seed
        self._slabs = slabs
        self._child_set = ChildSet(
            connector, fork_server, cores if recipe.thread_safe else None
        )
        self._listening = True
        """Whether to wake the selector when there may be work."""
        self._watchdog = Watchdog(recipe.timeout_s)
        self._child_set.selector.register(self._wakeup, READ)
        self._start()

    def statistics(self) -> PoolStatistics:
        """Return the numbers of workers."""
        child_set = self._child_set
        counts = self._asked, child_set.workers, child_set.beginning()
        return PoolStatistics(self.executor, *counts)

    def threads(self) -> list[str]:
        """Return the /proc folders of the children's threads."""
        children = list(self._child_set.children.values())
        return [path for child in children for path in threads_of(child.pid)]

    def _hear_of_work(self) -> None:
        if self._listening or self._engine_lock.closed:
            self._wakeup.notify()

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
            for key, events in child_set.selector.select(0 if lost else wait_s):
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
                self._take_back(child, *message)

    def _hand_out(self) -> None:
        """Give leases to idle workers, then ahead to children, while there are any.

        It starts listening before it looks, so that work arriving later wakes it.
        """
        self._listening = True
        child_set = self._child_set
        for meter in reversed(list(child_set.idle)):
            child = child_set.freest(self._lanes())
            if child is None:
                return
            waited = meter.waiting_for is not None
            lease = self._take(meter)
            if lease is not None:
                child_set.idle.remove(meter)
                self._send(child, lease, meter)
            elif waited:
                return  # and so do the workers before it
        self._listening = bool(child_set.idle) or self._hand_ahead()

    def _hand_ahead(self) -> bool:
        """Give leases to wait at the children; return whether they could hold more."""
        if self._blame:
            return False
        child_set = self._child_set
        most = child_set.lanes() + child_set.ahead(self._lease_ns)
        while (child := child_set.freest(most)) is not None:
            errands = child.errands.values()
            meter = next((e.meter for e in errands if e.meter.leases == 1), None)
            lease = None if meter is None else self._take(meter)
            if meter is None or lease is None:
                return True
            self._send(child, lease, meter)
        return False

    def _lanes(self) -> int:
        """Return how many leases a child may have: one while there are suspects."""
        return 1 if self._blame else self._child_set.lanes()

    def _send(self, child: WorkerChild, lease: Lease, meter: WorkerMeter) -> None:
        chunk, inputs = self._to_send(lease), lease.inputs
        if inputs is not None and len(chunk) < len(lease.chunk):
            inputs = inputs[: len(chunk)]
        slab, placement = self._place(child, lease)
        gone = frozenset(child.slabs and child.slabs - self._slabs.keys())
        number = child.next_task()
        child.errands[number] = Errand(lease, chunk, meter, time.monotonic_ns())
        new = (slab.descriptor,) if slab and placement and placement.sent else ()
        try:
            lanes = min(len(child.errands), self._lanes())
            if child.lanes < lanes:
                child.lanes = lanes
                child.pipe.post(lanes)
            packed = None if inputs is None else dumps(inputs)
            task = Task(number, chunk, packed, placement, gone)
            if self._program.batches is not None:
                task = self._of_batch(child, lease, task)
            child.pipe.post(task, new)
        except EOFError:
            return  # its end of file will arrive, and return the lease
        except Exception as error:  # noqa: BLE001 whatever pickling user data raises
            del child.errands[number]
            child.layout = None  # it has not received it
            self._give_up(lease, meter, self._unsendable(error))
            self._child_set.free(meter)
            return
        child.slabs -= gone
        if slab and new:
            child.slabs.add(slab.key)
        self._child_set.listen(child)

    def _of_batch(self, child: WorkerChild, lease: Lease, task: Task) -> Task:
        """Extend a task that is a whole batch so that the worker collates it."""
        in_flight, returned = lease.in_flight, child.unpacker.returned()
        if lease.whole and len(task.chunk) == len(lease.chunk):
            task = task._replace(batch=(in_flight.plan, self._seed()))
        return task._replace(returned=returned) if any(returned) else task

    def _place(
        self, child: WorkerChild, lease: Lease
    ) -> tuple[Slab | None, SlabPlacement | None]:
        """Return the slab for the rows, once their layout is known."""
        buffer = sink_of(self._program, lease)
        layout = buffer.layout() if buffer is not None else None
        if buffer is None or layout is None or not layout.solid:
            return None, None
        buffer.open(layout)
        slab = buffer.slab
        if not isinstance(slab, Slab) or buffer.layout() != layout:
            return None, None
        new = slab.key not in child.slabs
        known, child.layout = child.layout is layout, layout
        told = None if known else layout
        return slab, SlabPlacement(slab.key, slab.nbytes, new, told, buffer.rows)

    def _take_back(self, child: WorkerChild, number: int, outcome: Outcome) -> None:
        errand = child.errands.pop(number)
        child.settled = True
        if outcome.made is not None:
            errand.lease.in_flight.made = unpacked(child, outcome.made)
        self._settle(errand.lease, errand.chunk, outcome, errand.meter)
        self._child_set.free(errand.meter)

    def _reap(self, child: WorkerChild) -> None:
        """Handle the end of a child: its work returns to the front."""
        if not self._child_set.outdated(child):  # otherwise its fork server ended it
            self._note_death(child)
        for errand in child.errands.values():
            self._connector.settle(errand.lease, Outcome(done=0), errand.meter)
            self._child_set.free(errand.meter)
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


def unpacked(child: WorkerChild, made: Packed | FailedBatch) -> Finished | FailedBatch:
    """Return a batch that a child has collated."""
    if isinstance(made, FailedBatch):
        return FailedBatch(recall(made.error), made.failures)
    try:
        return Finished(child.unpacker.unpack(made, child.pipe.descriptors))
    except Exception as error:  # noqa: BLE001 whatever unpickling user objects raises
        return FailedBatch(error)
