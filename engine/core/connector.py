"""The one seam between the engine and its workers: `take` a lease, `settle` it.

A monitor over the pure core (core.py), which nobody else touches. One lock an engine
guards the core and the instruments; nothing blocks and no user code runs while it is
held. A worker that finds nothing waits on its segment's condition and is woken by
event; one that must not block (a selector) adds a listener and uses `try_take`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ...system.run_queue import OwnQueue
from ...system.wakeup import NOTICE_S
from .chunk import InFlightBatch, Lease, Outcome, Signal
from .core import ALL, FEED, LEASE_NS, Core, State
from .metrics import GaugeReading, PartsMeter, Wait, WorkerMeter, WorkerReading

Clock = Callable[[], int]


class Waiters:
    """The lock, and how each of those who wait under it is woken.

    Workers wait on a condition, selectors have a listener called, the trainer sleeps.
    """

    def __init__(self, segments: int, wakes: dict[int, int]) -> None:
        self.lock = threading.Lock()
        self.broken: BaseException | None = None
        """What went wrong inside the engine itself; the trainer raises it."""
        self.wakes = wakes
        self._conditions = [threading.Condition(self.lock) for _ in range(segments)]
        self._waiting = [0] * segments
        self.listeners: list[list[Callable[[], None]]] = [[] for _ in range(segments)]
        """By segment: called with the lock held, so they must not wait for anything."""
        self.trainer_waits = False
        """Set by the trainer, under the lock, before it calls `sleep`."""
        self._trainer: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Wake those who may find something to do. The lock is held."""
        wakes = self.wakes
        if wakes.pop(FEED, 0):
            self.wake_trainer()
        for at, count in wakes.items():
            if self._waiting[at]:
                self._conditions[at].notify(count)
            for listener in self.listeners[at]:
                listener()
        wakes.clear()

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
        taken. Where Ctrl-C came first the wake-up stays, and ends a later sleep.
        """
        with contextlib.suppress(queue.Empty):
            self._trainer.get(timeout=NOTICE_S)

    def wake_trainer(self) -> None:
        """Wake the trainer if it waits. The lock is held."""
        if self.trainer_waits:
            self.trainer_waits = False
            self._trainer.put(None)

    def notify(self, at: int = 0) -> None:
        """Let segment `at` look again, as the source does when bytes came free."""
        with self.lock:
            self.wakes[at] = ALL
            self.wake()

    def fail(self, error: BaseException) -> None:
        """The engine itself is at fault: let the trainer know."""
        with self.lock:
            self.broken = self.broken or error
            self.wake_trainer()


class EngineLock(Waiters):
    """The engine's lock, and what may be done with the core under it.

        with engine_lock.lock:
            popped = engine_lock.pop()  # and those are woken whom that concerns
        engine_lock.notify_others()     # pipelines that wait for bytes given back here

    The lock is held by whoever calls a method, unless it says otherwise. It is taken by
    `with` on the lock itself, never through a method of ours: the trainer's thread may
    be hit by Ctrl-C between any two steps of Python code, and only there it is certain
    that the lock is let go. The properties may be read without it.
    """

    def __init__(self, core: Core, clock: Clock = time.perf_counter_ns) -> None:
        super().__init__(len(core.segments), core.wakes)
        self._core = core
        self.clock = clock
        self.reservations = core.reservations

    @property
    def closed(self) -> bool:
        """Whether no work is given any more."""
        return self._core.state is State.CLOSED

    @property
    def head(self) -> int:
        """The step that `pop` returns next."""
        return self._core.head

    @property
    def next_step(self) -> int:
        """The step that the source opens next."""
        return self._core.next_step

    def peek(self) -> tuple[InFlightBatch, Any] | None:
        """Return what `pop` would, and leave it. For the trainer, without the lock."""
        return self._core.outbox.get(self._core.head)

    def notify_others(self) -> None:
        """Let other pipelines know of bytes that came free. No lock is held."""
        notifications = self.reservations.notifications
        while notifications:
            try:
                notify = notifications.popleft()
            except IndexError:  # another thread has called the last one
                return
            notify()

    def pop(self) -> tuple[InFlightBatch, Any] | None:
        """Take the next batch in order, or None while it is not ready."""
        popped = self._core.pop(self.clock())
        self.wake()
        return popped

    def pause_source(self) -> bool:
        """Open no batch until `restart`; return whether the source is still read."""
        return self._core.pause_source()

    def pause(self) -> None:
        """Give nobody work. Batches that are ready may be popped."""
        self._core.pause()

    def unpause(self) -> None:
        """Go on after `pause`."""
        self._core.unpause()
        self.wake()

    def extend(self, until: int | None) -> None:
        """Let batches up to this step be opened; None: as many as there are."""
        self._core.extend(until)
        self.wake()

    def restart(self, step: int) -> None:
        """Forget everything in flight, and go on at `step`."""
        self._core.restart(step, self.clock())
        self.wake()

    def close(self) -> None:
        """Forget everything, for good."""
        self._core.close(self.clock())
        self.wake()

    def __repr__(self) -> str:
        return repr(self._core)


class Suspension:
    """Gives up what was prefetched, between two epochs, when others need the bytes.

    For any thread; no lock is held.
    """

    def __init__(self, engine_lock: EngineLock) -> None:
        self._engine_lock = engine_lock
        self._byte_budget = engine_lock.reservations.byte_budget
        # Whether what was prefetched was given up; guarded by the engine's lock.
        self._suspended = False

    def rest(self) -> None:
        """The trainer is between two epochs: others may need the bytes more."""
        self._byte_budget.rest(self._suspend)

    def resume(self) -> None:
        """The trainer goes on: what was given up is loaded once more."""
        self.leave()
        with self._engine_lock.lock:
            if self._suspended:
                self._suspended = False
                self._engine_lock.extend(None)

    def leave(self) -> None:
        """Nothing is to be given up here any more."""
        self._byte_budget.resume(self._suspend)

    def _suspend(self) -> None:
        """Drop what is prefetched, and begin no more."""
        engine_lock = self._engine_lock
        with engine_lock.lock:
            resting = self._suspend in self._byte_budget.resting()
            if resting and not self._suspended:
                self._suspended = True
                engine_lock.restart(engine_lock.head)
                engine_lock.extend(engine_lock.head)
        engine_lock.notify_others()


class LoneWorker:
    """What the only worker of a segment, by the user's word, has seen of its data."""

    def __init__(self) -> None:
        self.looks = 0
        """How often it has looked if its data changes, and found nothing; -1: it
        does."""
        self.on_change: Callable[[str], object] = str
        """Called with the path of what does."""

    def tell(self, path: str) -> None:
        """It has looked what changes; empty: nothing."""
        if self.looks >= 0:
            self.looks = -1 if path else self.looks + 1
            if path:
                self.on_change(path)


class Connector:
    """What feeds one segment's workers, and takes their results."""

    def __init__(
        self,
        core: Core,
        engine_lock: EngineLock,
        segment: int,
        finish: Callable[[InFlightBatch], Any],
        operations: int = 1,
    ) -> None:
        self._core = core
        self.engine_lock = engine_lock
        self.parts = PartsMeter(operations)
        self.own_queue = OwnQueue()
        """Of the trainer's thread, where that works on the segment."""
        self.segment = segment
        self._finish = finish
        self.lone = LoneWorker()
        # Batches that workers are collating.
        self._finishing = 0
        self.meters: set[WorkerMeter] = set()
        """Of the workers there are; the lock guards it."""
        self._waits_for: Wait | None = None
        self._gone = WorkerReading()

    # For workers

    def enter(self) -> WorkerMeter:
        """A worker begins: give it its instrument."""
        with self.engine_lock.lock:
            meter = WorkerMeter(self.engine_lock.clock())
            self.meters.add(meter)
        return meter

    def leave(self, meter: WorkerMeter) -> None:
        """A worker is gone; what it did stays counted."""
        with self.engine_lock.lock:
            if meter in self.meters:
                self.meters.remove(meter)
                self._gone += meter.read(self.engine_lock.clock())

    def take(self, meter: WorkerMeter, surplus: Callable[[], bool]) -> Lease | Signal:
        """Wait for work; `surplus()`, asked under the lock: retire instead?"""
        engine_lock = self.engine_lock
        with engine_lock.lock:
            while True:
                if engine_lock.closed:
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
            return None if self.engine_lock.closed else self._attempt(meter)

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
            in_flight = self._core.settle(lease, outcome, now_ns)
            self._finishing += in_flight is not None
            engine_lock.wake()
        # They are the batch's now. A traceback holds the frames it came through, with
        # this outcome in them: letting go here, both die without the collector.
        outcome.failures.clear()
        if in_flight is not None:
            batch = self._finish(in_flight)
            with engine_lock.lock:
                self._finishing -= 1
                self._core.deliver(in_flight, batch, engine_lock.clock())
                engine_lock.wake()
        engine_lock.notify_others()

    def keeps_nothing(self) -> None:
        """What is called for batches keeps nothing from one to the next.

        So worker processes may make whole ones, and an inline segment may be ahead of
        the trainer.
        """
        with self.engine_lock.lock:
            state = self._core.segments[self.segment]
            state.collates = state.ahead = True
            self._core.set_prefetch(self.segment, state.prefetch)  # they span more
            self.engine_lock.wake()

    # For the segment and the monitor, who hold the lock

    @property
    def busy(self) -> bool:
        """Whether a worker has a batch or a lease in hand, even a dropped one."""
        return self._finishing > 0 or any(meter.leases for meter in self.meters)

    @property
    def batch_rows(self) -> int:
        """Rows of a batch, as they are now."""
        return self._core.batch_rows

    def resize(
        self,
        workers: int,
        prefetch: int,
        lease_ns: int = LEASE_NS,
        *,
        inline: bool = False,
    ) -> None:
        """Take note of how many workers there are, and how far ahead they may work."""
        self._core.set_workers(self.segment, workers, lease_ns, inline=inline)
        self._core.set_prefetch(self.segment, prefetch)
        self.engine_lock.wake()

    def waiting(self, now_ns: int) -> tuple[GaugeReading, float]:
        """Return what waits behind the segment, and the bytes of one such row."""
        core, reader = self._core, self.segment + 1
        gauge = core.segments[self.segment].gauge.read(now_ns)
        if reader < len(core.segments):
            return gauge, core.segments[reader].row_bytes
        return gauge, core.reservations.batch_bytes / core.batch_rows

    def readings(self, now_ns: int) -> tuple[WorkerReading, ...]:
        """Return one reading a live worker."""
        return tuple(meter.read(now_ns) for meter in self.meters)

    def total(self, now_ns: int) -> WorkerReading:
        """Return the sum over all workers there ever were."""
        return sum(self.readings(now_ns), self._gone)

    def _note_wait(self, what: Wait, now_ns: int) -> None:
        """One waits for this, and so do all who wait, and have not asked again."""
        if what is self._waits_for:
            return
        self._waits_for = what
        for each in self.meters:
            if each.waiting_for is not None:
                each.wait(what, now_ns)

    def _attempt(self, meter: WorkerMeter) -> Lease | None:
        now_ns = self.engine_lock.clock()
        lease = self._core.take(self.segment, now_ns)
        if isinstance(lease, Wait):
            meter.wait(lease, now_ns)
            self._note_wait(lease, now_ns)
            return None
        meter.start(now_ns)
        self.engine_lock.wake()
        return lease

    def __repr__(self) -> str:
        return f"<Connector of segment {self.segment}: {len(self.meters)} workers>"
