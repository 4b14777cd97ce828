"""Processes as workers: for functions that hold the GIL, or that no thread may share.

One selector thread in the trainer serves all children of a segment. It never waits for
a lease: it is rung by the gate when there may be work, and by its pipes when work is
done.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..buffers import BatchBuffer
from ..chunk import Failure, Lease, Outcome
from ..connector import Connector
from ..errors import SampleError, WorkerError
from ..metrics import WorkerMeter
from ..program import Program
from .crew import CrewStatistics, sink_of
from .pipe import Pipe
from .slabs import Slab, SlabPool
from .task import Placement, Task, recall
from .template import Template

__all__ = ["Processes"]

DEATHS = 3
"""How often the same rows may take a worker with them before they are given up."""


@dataclass(slots=True, eq=False)
class Child:
    """One worker process, as the trainer knows it."""

    pipe: Pipe
    meter: WorkerMeter
    pid: int = 0
    """0 until it has said so."""
    lease: Lease | None = None
    slabs: set[int] = field(default_factory=set)
    """Keys of the slabs it has mapped."""


class Processes:
    """A number of worker processes.

    `_asked` is guarded by the gate's lock; everything else belongs to the selector
    thread.
    """

    executor = "process"

    def __init__(
        self,
        connector: Connector,
        program: Program,
        template: Template,
        slabs: SlabPool,
        name: str,
    ) -> None:
        self._connector = connector
        self._gate = connector.gate
        self._program = program
        self._template = template
        self._slabs = slabs
        self._asked = 0
        self._children: dict[int, Child] = {}
        self._deaths: Counter[tuple[int, int]] = Counter()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._gate.lock:
            self._gate.bells[connector.segment].append(self._ring)
        self._thread = threading.Thread(
            target=self._work, name=f"penstock {name} processes", daemon=True
        )
        self._thread.start()

    def resize(self, count: int) -> None:
        """Ask for `count` processes."""
        with self._gate.lock:
            self._asked = count
        self._ring()

    def close(self) -> None:
        """Wait until the selector thread has ended all children."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def statistics(self) -> CrewStatistics:
        """Return how many there are."""
        return CrewStatistics(self.executor, self._asked, len(self._children))

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    # The selector thread

    def _work(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            try:
                self._serve(selector)
            except BaseException as error:  # noqa: BLE001 ours: user code is in children
                self._gate.fail(error)
            finally:
                self._end_all(selector)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        while not self._gate.flow.closed:
            self._staff(selector)
            self._hand_out()
            for key, _ in selector.select():
                self._hear(selector, key.fd)

    def _hear(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        if descriptor == self._bell:
            os.eventfd_read(self._bell)
            return
        child = self._children[descriptor]
        try:
            message = child.pipe.receive()
        except EOFError:
            self._bury(selector, child)
            return
        if isinstance(message, int):
            child.pid = message
        else:
            self._take_back(child, message)

    def _staff(self, selector: selectors.BaseSelector) -> None:
        """Bring the number of children to the number asked for."""
        while len(self._children) < self._asked:
            end = self._template.hire(self._connector.segment)
            child = Child(end, self._connector.enter())
            self._children[end.fileno()] = child
            selector.register(end.fileno(), selectors.EVENT_READ)
        for child in list(self._idle()):
            if len(self._children) <= self._asked:
                return
            self._dismiss(selector, child)

    def _idle(self) -> Iterator[Child]:
        return (child for child in self._children.values() if child.lease is None)

    def _hand_out(self) -> None:
        for child in list(self._idle()):
            lease = self._connector.try_take(child.meter)
            if lease is not None:
                child.lease = lease
                self._send(child, lease)

    def _send(self, child: Child, lease: Lease) -> None:
        slab, placement = self._place(child, lease)
        try:
            gone = frozenset(child.slabs - self._slabs.keys()) if child.slabs else None
            task = Task(lease.chunk, lease.inputs, placement, gone or frozenset())
            child.pipe.send(task)
            child.slabs -= task.forget
            if placement is not None and placement.sent and slab is not None:
                child.pipe.send_descriptor(slab.descriptor)
                child.slabs.add(slab.key)
        except EOFError:
            return  # its end of file is on the way: the lease goes back then
        except Exception as error:  # noqa: BLE001 whatever pickling the user's raises
            text = (
                f"a sample cannot be sent to a worker process of {self._stage} "
                f"({type(error).__name__}: {error}); let the stage before it return "
                'arrays, tensors, numbers, text or bytes, or use executor="thread"'
            )
            self._give_up(child, lease, SampleError(text))

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

    def _take_back(self, child: Child, outcome: Outcome) -> None:
        lease, child.lease = child.lease, None
        assert lease is not None
        outcome.failures = [recall(failure) for failure in outcome.failures]
        if self._program.places and outcome.outputs is not None:
            self._place_here(lease, outcome)
        self._connector.settle(lease, outcome, child.meter)

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
        """A child died: its rows go back to the front, or are given up."""
        lease = child.lease
        self._forget(selector, child)
        if lease is None:
            return
        chunk = lease.chunk
        at = chunk.step, chunk.first_row
        self._deaths[at] += 1
        if self._deaths[at] < DEATHS:
            self._connector.settle(lease, Outcome(done=0), child.meter)
            return
        shown = ", ".join(map(str, chunk.indices[:5].tolist()))
        shown += ", ..." if len(chunk) > 5 else ""
        text = (
            f"worker processes of {self._stage} died {DEATHS} times on the same "
            f"samples (last: pid {child.pid}; indices {shown}); look for a crash in "
            "native code, or for the system's out-of-memory killer"
        )
        self._give_up(child, lease, WorkerError(text))

    @property
    def _stage(self) -> str:
        return self._program.operations[-1].stage

    def _give_up(self, child: Child, lease: Lease, error: Exception) -> None:
        """Settle a lease with this error for all its rows."""
        chunk = lease.chunk
        failures = [
            Failure(error, self._stage, int(index), chunk.first_row + at)
            for at, index in enumerate(chunk.indices)
        ]
        child.lease = None
        outcome = Outcome(len(chunk), failures=failures)
        self._connector.settle(lease, outcome, child.meter)

    def _dismiss(self, selector: selectors.BaseSelector, child: Child) -> None:
        with contextlib.suppress(EOFError):  # gone already
            child.pipe.send(None)
        self._forget(selector, child)

    def _forget(self, selector: selectors.BaseSelector, child: Child) -> None:
        descriptor = child.pipe.fileno()
        selector.unregister(descriptor)
        del self._children[descriptor]
        child.pipe.close()
        self._connector.leave(child.meter)

    def _end_all(self, selector: selectors.BaseSelector) -> None:
        """Stop every child, the idle by a word, those in the user's code by force."""
        with self._gate.lock:
            self._gate.bells[self._connector.segment].remove(self._ring)
        try:
            for child in self._children.values():
                with contextlib.suppress(EOFError):
                    self._stop(child)
            for child in list(self._children.values()):
                child.pipe.drain()  # to its end: then it is gone
                self._forget(selector, child)
        finally:
            os.close(self._bell)

    def _stop(self, child: Child) -> None:
        if child.lease is None:
            child.pipe.send(None)
            return
        while not child.pid:  # it is the first thing that it says
            message = child.pipe.receive()
            child.pid = message if isinstance(message, int) else 0
        with contextlib.suppress(ProcessLookupError):  # it has just died
            os.kill(child.pid, signal.SIGKILL)
