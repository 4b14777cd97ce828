"""Processes as workers: for functions that hold the GIL, or that no thread may share.

One selector thread in the trainer serves all children of a segment. It never waits for
a lease or for a child: it is rung by the gate when there may be work, by its pipes when
work is done or a child is gone, and by its own clock where there is a time limit.

A worker is a lease at a time. A child is a process; where the segment is thread-safe a
child carries several leases, each in a thread of its own, so there need be no more
children than cores, however many workers wait for a storage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Iterator

from ..buffers import BatchBuffer
from ..chunk import Failure, Lease, Outcome
from ..compile import SegmentRecipe
from ..connector import Connector
from ..errors import SampleError, WorkerError
from ..metrics import WorkerMeter
from .blame import LIMIT, Blame
from .child import Child, Errand
from .crew import CrewStatistics, sink_of
from .slabs import Slab, SlabPool
from .task import Placement, Task, recall
from .template import Template
from .watchdog import Watchdog

__all__ = ["Processes"]

LOGGER = logging.getLogger("penstock")
MOST_LANES = 500
"""Of a child: what its page has room for."""
BARREN = 60
"""Deaths in a row, with nothing done in between, that end the run. So many, as one
killed template takes all those with it that it was about to make."""
NEVER_BEGUN = 20
"""As many deaths one counts for that ended by itself before it was at work: the next
will do the same."""
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Processes:
    """A number of workers in processes.

    `_asked` and `_leaving` are guarded by the gate's lock; everything else belongs to
    the selector thread.

    Args:
        connector: where leases come from.
        recipe: the segment's.
        template: makes the processes.
        slabs: the memory of batches.
        cores: most children that a thread-safe segment has.
    """

    executor = "process"

    def __init__(
        self,
        connector: Connector,
        recipe: SegmentRecipe,
        template: Template,
        slabs: SlabPool,
        cores: int,
    ) -> None:
        self._connector = connector
        self._gate = connector.gate
        self._program = recipe.program
        self._shared = recipe.thread_safe
        self._template = template
        self._slabs = slabs
        self._cores = cores
        self._asked = 0
        self._leaving = False
        self._children: dict[int, Child] = {}
        self._idle: list[WorkerMeter] = []
        """The workers without a lease; the last one waits for the shortest time."""
        self._blame = Blame()
        self._barren = 0
        self._watchdog = Watchdog(recipe.timeout_s)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._gate.lock:
            self._gate.bells[connector.segment].append(self._ring)
        self._thread = threading.Thread(
            target=self._work, name=f"penstock {recipe.name} processes", daemon=True
        )
        self._thread.start()

    def resize(self, count: int) -> None:
        """Ask for `count` workers."""
        with self._gate.lock:
            self._asked = count
            self._ring()

    def retire(self) -> None:
        """Ask all to leave after the lease in hand."""
        with self._gate.lock:
            self._asked, self._leaving = 0, True
            self._ring()

    def close(self) -> None:
        """Wait until the selector thread has ended all children."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def statistics(self) -> CrewStatistics:
        """Return how many there are."""
        alive = len(self._idle) + sum(len(c.errands) for c in self._children.values())
        return CrewStatistics(self.executor, self._asked, alive)

    def _ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    # The selector thread

    def _work(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, READ)
            try:
                self._serve(selector)
            except BaseException as error:  # noqa: BLE001 ours: user code is in children
                self._gate.fail(error)
            finally:
                self._end_all(selector)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        while not self._gate.flow.closed:
            self._staff(selector)
            if self._leaving and not self._children:
                return
            self._hand_out(selector)
            wait_s, lost = self._watchdog.look(self._children.values())
            for child in lost:
                self._bury(selector, child)
            for key, events in selector.select(0 if lost else wait_s):
                self._hear(selector, key.fd, events)

    def _hear(
        self, selector: selectors.BaseSelector, descriptor: int, events: int
    ) -> None:
        if descriptor == self._bell:
            os.eventfd_read(self._bell)
            return
        child = self._children[descriptor]
        try:
            if events & WRITE:
                child.mailbox.flush()
                self._listen(selector, child)
            messages = child.mailbox.collect() if events & READ else []
        except EOFError:
            self._bury(selector, child)
            return
        for message in messages:
            if isinstance(message, int):
                child.hello(message)
            else:
                self._take_back(child, *message)

    def _listen(self, selector: selectors.BaseSelector, child: Child) -> None:
        """Look for room in a child's pipe for as long as something waits for it."""
        if child.writing != child.mailbox.waiting:
            child.writing = child.mailbox.waiting
            selector.modify(child.mailbox, READ | WRITE if child.writing else READ)

    def _staff(self, selector: selectors.BaseSelector) -> None:
        """Bring workers and children to the numbers asked for."""
        with self._gate.lock:
            asked = self._asked
        busy = sum(len(child.errands) for child in self._children.values())
        while len(self._idle) + busy < asked:
            self._idle.append(self._connector.enter())
        while self._idle and len(self._idle) + busy > asked:
            self._connector.leave(self._idle.pop(0))
        wanted = self._wanted(asked)
        for child in list(self._children.values()):
            surplus = len(self._children) > wanted
            old = child.generation != self._template.generation
            if not child.errands and (surplus or old):
                self._dismiss(selector, child)
        while len(self._children) < wanted:
            generation = self._template.generation
            child = Child(*self._template.hire(self._connector.segment), generation)
            self._children[child.mailbox.fileno()] = child
            selector.register(child.mailbox, READ)

    def _wanted(self, workers: int) -> int:
        """Return how many children carry so many workers."""
        if not self._shared:
            return workers
        return min(workers, max(self._cores, -(-workers // MOST_LANES)))

    def _hand_out(self, selector: selectors.BaseSelector) -> None:
        """Give leases to the workers that have none, while there are any."""
        for meter in reversed(list(self._idle)):
            child = self._freest()
            if child is None:
                return
            waited = meter.waiting_for is not None
            lease = self._take(meter)
            if lease is not None:
                self._idle.remove(meter)
                self._send(selector, child, lease, meter)
            elif waited:
                return  # and so do those before it

    def _freest(self) -> Child | None:
        """Return the child with the fewest leases, if it may have one more."""
        template = self._template.generation
        children = [c for c in self._children.values() if c.generation == template]
        child = min(children, key=lambda c: len(c.errands), default=None)
        if child is None or child.asked_ns:
            return None
        most = self._lanes()
        return child if len(child.errands) < most else None

    def _lanes(self) -> int:
        """Return how many leases a child may have: one while there are suspects."""
        if not self._shared or self._blame:
            return 1
        return max(1, -(-self._asked // max(1, len(self._children))))

    def _take(self, meter: WorkerMeter) -> Lease | None:
        """Take a lease; one whose first sample is to be given up is so at once."""
        while (lease := self._connector.try_take(meter)) is not None:
            death = self._blame.verdict(lease.chunk) if self._blame else None
            if death is None:
                return lease
            index = int(lease.chunk.indices[0])
            text = (
                f"worker processes of {self._stage} died {LIMIT} times on sample index "
                f"{index}; the last: {death}\nlook for a crash in native code, for too "
                "little memory, or for a sample that takes for ever"
            )
            self._give_up(lease, meter, WorkerError(text), rows=1)
        return None

    def _send(
        self,
        selector: selectors.BaseSelector,
        child: Child,
        lease: Lease,
        meter: WorkerMeter,
    ) -> None:
        chunk, inputs = lease.chunk, lease.inputs
        suspect = self._blame.first(chunk)
        if suspect is not None:  # it goes alone, after those before it
            chunk = chunk.part(0, max(1, suspect))
            inputs = None if inputs is None else inputs[: len(chunk)]
        slab, placement = self._place(child, lease)
        gone = frozenset(child.slabs and child.slabs - self._slabs.keys())
        number = child.next_task()
        child.errands[number] = Errand(lease, chunk, meter, time.monotonic_ns())
        new = (slab.descriptor,) if slab and placement and placement.sent else ()
        try:
            if child.lanes < len(child.errands):
                child.lanes = len(child.errands)
                child.mailbox.post(child.lanes)
            child.mailbox.post(Task(number, chunk, inputs, placement, gone), new)
        except EOFError:
            return  # its end of file is on the way: the lease goes back then
        except Exception as error:  # noqa: BLE001 whatever pickling the user's raises
            del child.errands[number]
            self._idle.append(meter)
            self._give_up(lease, meter, SampleError(self._unsendable(error)))
            return
        child.slabs -= gone
        if slab and new:
            child.slabs.add(slab.key)
        self._listen(selector, child)

    def _place(
        self, child: Child, lease: Lease
    ) -> tuple[Slab | None, Placement | None]:
        """Find where the rows may be written, once it is known how they lie."""
        buffer = sink_of(self._program, lease)
        layout = buffer.layout() if buffer is not None else None
        if buffer is None or layout is None or not layout.solid:
            return None, None
        buffer.open(layout)
        slab = buffer.slab
        if not isinstance(slab, Slab) or buffer.layout() != layout:
            return None, None
        new = slab.key not in child.slabs
        return slab, Placement(slab.key, slab.nbytes, new, layout, buffer.rows)

    def _take_back(self, child: Child, number: int, outcome: Outcome) -> None:
        errand = child.errands.pop(number)
        self._barren = 0
        self._blame.acquit(errand.chunk)
        outcome.failures = [recall(failure) for failure in outcome.failures]
        if self._program.places and outcome.outputs is not None:
            self._place_here(errand.lease, outcome)
        self._idle.append(errand.meter)
        self._connector.settle(errand.lease, outcome, errand.meter)

    def _place_here(self, lease: Lease, outcome: Outcome) -> None:
        """Rows that came back, as their layout was not known or did not fit."""
        buffer = lease.flight.buffer
        assert isinstance(buffer, BatchBuffer)
        first, outputs = lease.chunk.first_row, outcome.outputs or []
        if outputs:
            rows = [first + offset for offset in outcome.offsets or range(len(outputs))]
            outcome.nbytes = buffer.place(rows, outputs)
        outcome.outputs = outcome.offsets = None

    def _bury(self, selector: selectors.BaseSelector, child: Child) -> None:
        """A child is gone: its work goes back to the front, its samples are noted."""
        death = child.obituary()
        indices = []
        for number, errand in child.errands.items():
            suspects = child.suspects(number)
            indices += [int(errand.chunk.indices[row]) for row in suspects]
            self._blame.add(errand.chunk, suspects, death)
            self._idle.append(errand.meter)
            self._connector.settle(errand.lease, Outcome(done=0), errand.meter)
        self._barren += NEVER_BEGUN if child.failed else 1
        self._forget(selector, child)
        shown = ", ".join(map(str, indices[:5])) + (", ..." if len(indices) > 5 else "")
        where = f" with sample index {shown} in hand" if indices else ""
        LOGGER.warning("%s%s: %s; its work is done anew", self._stage, where, death)
        if self._barren >= BARREN:
            text = (
                f"worker processes of {self._stage} die one after the other, with "
                f"nothing done in between; the last: {death}\nlook for what ends "
                'processes here, or use executor="thread"'
            )
            raise WorkerError(text)

    def _unsendable(self, error: Exception) -> str:
        return (
            f"a sample cannot be sent to a worker process of {self._stage} "
            f"({type(error).__name__}: {error}); let the stage before it return "
            'arrays, tensors, numbers, text or bytes, or use executor="thread"'
        )

    @property
    def _stage(self) -> str:
        return self._program.operations[-1].stage

    def _give_up(
        self,
        lease: Lease,
        meter: WorkerMeter,
        error: Exception,
        rows: int | None = None,
    ) -> None:
        """Settle the first rows of a lease, or all, with this error."""
        chunk = lease.chunk if rows is None else lease.chunk.part(0, rows)
        failures = [
            Failure(error, self._stage, int(index), chunk.first_row + at)
            for at, index in enumerate(chunk.indices)
        ]
        self._blame.acquit(chunk)
        self._connector.settle(lease, Outcome(len(chunk), failures=failures), meter)

    def _dismiss(self, selector: selectors.BaseSelector, child: Child) -> None:
        with contextlib.suppress(EOFError):  # gone already
            child.mailbox.post(None)
        self._forget(selector, child)

    def _forget(self, selector: selectors.BaseSelector, child: Child) -> None:
        selector.unregister(child.mailbox)
        del self._children[child.mailbox.fileno()]
        child.close()

    def _all(self) -> Iterator[WorkerMeter]:
        yield from self._idle
        for child in self._children.values():
            yield from (errand.meter for errand in child.errands.values())

    def _end_all(self, selector: selectors.BaseSelector) -> None:
        """Stop every child; the template waits until they are gone."""
        with self._gate.lock:
            self._gate.bells[self._connector.segment].remove(self._ring)
            bell, self._bell = self._bell, -1
        os.close(bell)
        for meter in list(self._all()):
            self._connector.leave(meter)
        for child in list(self._children.values()):
            child.kill()
            self._forget(selector, child)
