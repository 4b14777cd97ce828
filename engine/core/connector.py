"""The one seam between the engine and its workers: `take` a lease, `settle` it.

A monitor over the pure state of flow.py. One lock an engine guards the flow, the
instruments and the count of workers to retire; nothing blocks and no user code runs
while it is held. A worker that finds nothing waits on its segment's condition and is
woken by event; one that must not block (a selector) subscribes a bell instead and uses
`try_take`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .chunk import InFlightBatch, Lease, Outcome, Signal
from .core import FEED, Core
from .metrics import PartsMeter, Wait, WorkerMeter, WorkerReading

__all__ = [
    "Connector",
    "EngineLock",
]

Clock = Callable[[], int]


class EngineLock:
    """The engine's lock, and whom to wake when something has changed under it.

        with gate.lock:
            gate.flow. ...      # change it
            gate.ring()         # wake whom that concerns
        gate.poke_others()      # pipelines that wait for bytes given back here

    The lock is taken by `with` on the lock itself, never through a method of ours: the
    trainer's thread may be hit by Ctrl-C between any two steps of Python code, and only
    there it is certain that the lock is let go.
    """

    def __init__(self, core: Core, clock: Clock = time.perf_counter_ns) -> None:
        self.core = core
        self.clock = clock
        self.lock = threading.Lock()
        self.broken: BaseException | None = None
        """What went wrong inside the engine itself; the trainer is told."""
        segments = range(len(core.segments))
        self._conditions = [threading.Condition(self.lock) for _ in segments]
        self._waiting = [0 for _ in segments]
        self._notifications: deque[Callable[[], None]] = deque()
        self.listeners: list[list[Callable[[], None]]] = [[] for _ in segments]
        """By segment: rung with the lock held, so they must not wait for anything."""
        self.trainer_waits = False
        """Set by the trainer, under the lock, before it calls `sleep`."""
        self._trainer: SimpleQueue[None] = SimpleQueue()
        self._suspended = False
        """Whether what was prefetched was given up; guarded by the lock."""

    def wake(self) -> None:
        """Wake those whose luck may have changed. The lock is held."""
        core = self.core
        wakes = core.wakes
        if wakes:
            if wakes.pop(FEED, 0):
                self.wake_trainer()
            for at, count in wakes.items():
                if self._waiting[at]:
                    self._conditions[at].notify(count)
                for wakeup in self.listeners[at]:
                    wakeup()
            wakes.clear()
        if core.reservations.notifications:
            self._notifications.extend(core.reservations.take_notifications())

    def notify_others(self) -> None:
        """Tell other pipelines of bytes that came free. No lock is held."""
        while self._notifications:
            self._notifications.popleft()()

    def wait(self, at: int) -> None:
        """Wait, with the lock held, until segment `at` is woken. For workers."""
        self._waiting[at] += 1
        try:
            self._conditions[at].wait()
        finally:
            self._waiting[at] -= 1

    def sleep(self) -> None:
        """Wait, without the lock, until `wake_trainer`; may return for no reason.

        No condition: Ctrl-C could come while one takes its lock back, and leave it not
        taken. What wakes nobody, as Ctrl-C came first, makes a later sleep end at once.
        """
        self._trainer.get()

    def wake_trainer(self) -> None:
        """Wake the trainer if it waits. The lock is held."""
        if self.trainer_waits:
            self.trainer_waits = False
            self._trainer.put(None)

    def notify(self) -> None:
        """Bytes came free elsewhere: the source may be granted credit now."""
        with self.lock:
            self.core.wakes[0] = 1 << 30
            self.wake()

    def extend(self, until: int) -> None:
        """Batches up to this step may be begun."""
        with self.lock:
            self.core.until = until
            self.core.wakes[0] = 1 << 30
            self.wake()

    def rest(self) -> None:
        """The trainer is between two epochs: others may need the bytes more."""
        self.core.reservations.byte_budget.rest(self._suspend)

    def resume(self) -> None:
        """The trainer goes on, or is gone: what was taken back is loaded once more."""
        self.core.reservations.byte_budget.resume(self._suspend)
        with self.lock:
            if self._suspended:
                self._suspended = False
                self.core.until = None
                self.core.wakes[0] = 1 << 30
                self.wake()

    def leave(self) -> None:
        """Nobody is to be parked here any more."""
        self.core.reservations.byte_budget.resume(self._suspend)

    def _suspend(self) -> None:
        """Drop what is prefetched, and begin no more. For any thread; holds no lock."""
        with self.lock:
            resting = self._suspend in self.core.reservations.byte_budget.resting()
            if resting and not self._suspended:
                self._suspended = True
                self.core.restart(self.core.head, self.clock())
                self.core.until = self.core.head
                self.wake()
        self.notify_others()

    def fail(self, error: BaseException) -> None:
        """The engine itself is at fault: let the trainer know."""
        with self.lock:
            self.broken = self.broken or error
            self.core.wakes[FEED] = 1
            self.wake()


class Connector:
    """What feeds one segment's workers, and takes their results."""

    def __init__(
        self,
        engine_lock: EngineLock,
        segment: int,
        finish: Callable[[InFlightBatch], Any],
        operations: int = 1,
    ) -> None:
        self.engine_lock = engine_lock
        self.parts = PartsMeter(operations)
        self.segment = segment
        self._finish = finish
        self._meters: set[WorkerMeter] = set()
        self._gone = WorkerReading()

    # For workers

    def enter(self) -> WorkerMeter:
        """A worker begins: give it its instrument."""
        with self.engine_lock.lock:
            meter = WorkerMeter(self.engine_lock.clock())
            self._meters.add(meter)
        return meter

    def leave(self, meter: WorkerMeter) -> None:
        """A worker is gone; what it did stays counted."""
        with self.engine_lock.lock:
            if meter in self._meters:
                self._meters.remove(meter)
                self._gone += meter.read(self.engine_lock.clock())

    def take(self, meter: WorkerMeter, surplus: Callable[[], bool]) -> Lease | Signal:
        """Wait for work; `surplus()`, asked under the lock: retire instead?"""
        engine_lock = self.engine_lock
        with engine_lock.lock:
            while True:
                if engine_lock.core.closed:
                    return Signal.CLOSED
                if surplus():
                    return Signal.RETIRE
                lease = self._attempt(meter)
                if lease is not None:
                    return lease
                engine_lock.wait(self.segment)

    def try_take(self, meter: WorkerMeter) -> Lease | None:
        """Take work if there is any now."""
        with self.engine_lock.lock:
            return None if self.engine_lock.core.closed else self._attempt(meter)

    def settle(self, lease: Lease, outcome: Outcome, meter: WorkerMeter) -> None:
        """Hand in what became of a lease; the one who completes a batch finishes it.

        Never waits for another worker. Finishing may run the user's `collate_fn`, in
        this worker, with no lock held.
        """
        engine_lock = self.engine_lock
        with engine_lock.lock:
            now_ns = engine_lock.clock()
            spent_ns = outcome.run_ns, outcome.cpu_ns
            meter.stop(outcome.done, *spent_ns, now_ns, outcome.nbytes)
            if outcome.parts:
                self.parts.add(outcome.parts, outcome.done)
            in_flight = engine_lock.core.settle(lease, outcome, now_ns)
            engine_lock.wake()
        # They are the batch's now. A traceback holds the frames it came through, with
        # this outcome in them: letting go here, both die without the collector.
        outcome.failures.clear()
        if in_flight is not None:
            batch = self._finish(in_flight)
            with engine_lock.lock:
                engine_lock.core.deliver(in_flight, batch, engine_lock.clock())
                engine_lock.wake()
        engine_lock.notify_others()

    def wake_all(self) -> None:
        """Let every waiting worker look again (a retirement was asked for)."""
        with self.engine_lock.lock:
            self.engine_lock.core.wakes[self.segment] = 1 << 30
            self.engine_lock.wake()

    @property
    def busy(self) -> bool:
        """Whether a worker has a lease in hand, also one dropped by `restart`."""
        return any(meter.leases for meter in self._meters)

    # For the monitor

    def readings(self, now_ns: int) -> tuple[WorkerReading, ...]:
        """Return one reading a live worker. The gate's lock is held."""
        return tuple(meter.read(now_ns) for meter in self._meters)

    def total(self, now_ns: int) -> WorkerReading:
        """Return the sum over all workers there ever were. The gate's lock is held."""
        return sum(self.readings(now_ns), self._gone)

    def _attempt(self, meter: WorkerMeter) -> Lease | None:
        engine_lock = self.engine_lock
        now_ns = engine_lock.clock()
        lease = engine_lock.core.take(self.segment, now_ns)
        if isinstance(lease, Wait):
            meter.wait(lease, now_ns)
            return None
        meter.start(now_ns)
        engine_lock.wake()
        return lease

    def __repr__(self) -> str:
        return f"<Connector of segment {self.segment}: {len(self._meters)} workers>"
