"""The one seam between the engine and its workers: `take` a lease, `settle` it.

A monitor over the pure core (core.py). One lock per engine guards the core and the
instruments. Nothing blocks while it is held. No user code runs then, except that
opening a batch calls the functions of a schedule. A worker that finds no work waits on
its segment's condition and is woken by an event. One that must not block (a selector)
adds a listener and uses `try_take`.

The monitor's instruments are cumulative counters, updated under the engine's lock. An
event costs each well under a microsecond (benchmarks/engine_overhead.py). A reading
includes the interval that is still open. So a worker that has waited for a minute never
looks healthy.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ...system.run_queue import waited_ns
from ...system.wakeup import NOTICE_S
from ..observe.observation import (
    ConnectorObservation,
    PartReading,
    WorkerReading,
    total_of,
)
from .core import ALL, FEED, Core, State, pop_unmade
from .in_flight import InFlightBatch, Lease, Outcome, Wait


class ReaderLost(Exception):
    """The process that read an iterable has died, and its place with it."""


class EngineLock:
    """The engine's lock, the core that it guards, and those who wait.

        with engine_lock.lock:
            engine_lock.core.unpause()
            engine_lock.wake()          # whoever this concerns
        engine_lock.notify_others()     # pipelines that wait for bytes released here

    Workers wait on a condition, selectors register a listener, the trainer sleeps.
    Callers of a method hold the lock, unless it says otherwise. They take it by `with`
    on the lock itself, never through a method of ours: Ctrl-C may interrupt the
    trainer's thread between any two steps of Python code, and only this form is certain
    to release the lock. The core's numbers may be read without it.
    """

    def __init__(
        self, core: Core, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.lock = threading.Lock()
        self.core, self.clock = core, clock
        # A failure of the engine itself; the trainer raises it.
        self.broken: BaseException | None = None
        # By segment: where workers wait for it to be woken.
        self.conditions = [threading.Condition(self.lock) for _ in core.segments]
        # By segment: called with the lock held, so they must never wait.
        self.listeners: list[list[Callable[[], None]]] = [[] for _ in core.segments]
        # Whether the trainer wakes others because it takes a batch: afterwards, it has
        # pools serve their workers.
        self.trainer_pops = False
        # Set by the trainer, under the lock, before it calls `sleep`.
        self.trainer_waits = False
        # Whether the trainer may have work to do: in a segment where it is inline.
        self.work_came = True
        self._trainer: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Wake everybody who may find something to do, after any change of the core."""
        wakes = self.core.wakes
        if wakes.pop(FEED, 0):
            self.wake_trainer()
        for at, count in wakes.items():
            if self.core.segments[at].inline:
                self.work_came = True
                self.wake_trainer()
            self.conditions[at].notify(count)
            for listener in self.listeners[at]:
                listener()
        wakes.clear()

    def sleep(self) -> None:
        """Wait, without the lock, until `wake_trainer`; may also return without one.

        This is not a condition: a Ctrl-C could interrupt one that is reacquiring its
        lock, and leave the lock not taken. If Ctrl-C comes first, the wakeup stays, and
        ends a later sleep.
        """
        with contextlib.suppress(queue.Empty):
            self._trainer.get(timeout=NOTICE_S)

    def wake_trainer(self) -> None:
        """Wake the trainer if it is waiting."""
        if self.trainer_waits:
            self.trainer_waits = False
            self._trainer.put(None)

    def notify(self, at: int = 0) -> None:
        """Let segment `at` look for work again, such as when bytes became free.

        No lock is held.
        """
        with self.lock:
            self.core.wakes[at] = ALL
            self.wake()

    def fail(self, error: BaseException) -> None:
        """Report a failure of the engine itself to the trainer. No lock is held."""
        with self.lock:
            self.broken = self.broken or error
            self.wake_trainer()

    def mend(self) -> None:
        """Note that an iterable is read again from the start."""
        if isinstance(self.broken, ReaderLost):
            self.broken = None

    @property
    def closed(self) -> bool:
        """Whether it has stopped handing out work for good."""
        return self.core.state is State.CLOSED

    def peek(self) -> tuple[InFlightBatch, Any] | None:
        """Return what `pop` would, without removing it. For the trainer, unlocked."""
        return self.core.outbox.get(self.core.head)

    def notify_others(self) -> None:
        """Notify other pipelines that bytes became free. No lock is held."""
        notifications = self.core.reservations.notifications
        while notifications:
            try:
                notify = notifications.popleft()
            except IndexError:  # another thread has taken the last one
                return
            notify()

    def pop(self) -> tuple[InFlightBatch, Any] | None:
        """Take the next batch in order, or None while it is not ready.

        Raises:
            Exception: a function of the schedule raised it for this batch.
        """
        core = self.core
        if core.unplanned is not None and core.head == core.next_step:
            raise core.unplanned
        entry = core.pop(self.clock())
        self.trainer_pops = entry is not None
        try:
            self.wake()
        finally:
            self.trainer_pops = False
        return entry


class PartsMeter:
    """The cost of each operation of a segment. Guarded by the engine lock."""

    def __init__(self, count: int) -> None:
        self._rows = 0
        # For each operation, its wall time (ns), its CPU time (ns), and the bytes.
        self.spent = [(0, 0, 0)] * count

    def add(self, parts: Iterable[tuple[int, int, int]], rows: int) -> None:
        """Add the cost of a chunk.

        Args:
            parts: for each operation, its wall time (ns), its CPU time (ns), and the
                bytes of a sample.
            rows: number of rows worked on.
        """
        self._rows += rows
        self.spent = [
            (run_ns + more_ns, cpu_ns + more_cpu_ns, nbytes + row_bytes * rows)
            for (run_ns, cpu_ns, nbytes), (more_ns, more_cpu_ns, row_bytes) in zip(
                self.spent, parts, strict=True
            )
        ]

    def read(self) -> tuple[PartReading, ...]:
        """Return the totals."""
        return tuple(
            PartReading(self._rows, run_ns / 1e9, cpu_ns / 1e9, nbytes)
            for run_ns, cpu_ns, nbytes in self.spent
        )


# Pieces at least this long always have their CPU time measured.
LONG_NS = 1_000_000
# One in this many shorter pieces is measured.
SOME = 64


class SampledClock:
    """A clock of one thread that is read for some of many similar pieces of its work.

        clock.begin()
        ...                             # one piece
        spent_ns = clock.end(run_ns)

    Reading it takes a system call or two, which may take longer than a short piece. So
    it is read for long pieces and for a few of the others, beginning with the first.
    The rest are assumed to be like the latest measured ones.

    Args:
        read: returns nanoseconds; by default, those that the thread has computed.
        long_ns: pieces of at least this length are always measured.
    """

    __slots__ = (
        "_begun_ns",
        "_last_ns",
        "_long_ns",
        "_read",
        "_run_ns",
        "_share",
        "_spent_ns",
        "_until",
        "total_ns",
    )

    def __init__(
        self, read: Callable[[], int] | None = None, long_ns: int = LONG_NS
    ) -> None:
        self._read = read or time.thread_time_ns
        self._last_ns = self._long_ns = long_ns
        # How many more to skip; the times of those measured, with decaying weights.
        self._until = 0
        self._begun_ns: int | None = None
        self._spent_ns = self._run_ns = self._share = 0.0
        # Nanoseconds of all pieces.
        self.total_ns = 0

    def begin(self) -> float | None:
        """Begin a piece; return its likely share of the time, or None if measured."""
        if self._last_ns < self._long_ns and self._until:
            self._until, self._begun_ns = self._until - 1, None
            return self._share
        self._until, self._begun_ns = SOME, self._read()
        return None

    def end(self, run_ns: int) -> int:
        """End a piece that took `run_ns`; return the nanoseconds by this clock."""
        self._last_ns = run_ns
        if self._begun_ns is None:
            # A sudden long one was waiting; if not, the next ones are measured.
            spent_ns = int(min(self._long_ns, run_ns) * self._share)
        else:
            spent_ns = self._read() - self._begun_ns
            self._spent_ns = self._spent_ns / 2 + spent_ns
            self._run_ns = self._run_ns / 2 + run_ns
            self._share = min(1.0, self._spent_ns / max(self._run_ns, 1.0))
        self.total_ns += spent_ns
        return spent_ns


# As `LONG_NS`, for waits for a core: reading them takes some 15 us.
QUEUE_LONG_NS = 5_000_000


def own_queue() -> SampledClock:
    """Return a clock of the time that the calling thread waits for a core."""
    return SampledClock(partial(waited_ns, "/proc/thread-self"), QUEUE_LONG_NS)


class WorkerMeter:
    """The time of one worker, or of several in another process: running, or waiting.

    Those in another process may have a second lease waiting while they run one.

    Args:
        now_ns: when they begin.
        workers: how many they are.
    """

    __slots__ = (
        "_alive",
        "_cpu",
        "_rows",
        "_run",
        "_running_since",
        "_since",
        "_squares",
        "_wait",
        "_waiting_since",
        "_workers",
        "clock",
        "leases",
        "waiting_for",
    )

    def __init__(self, now_ns: int, workers: int = 1) -> None:
        self._since, self._workers = now_ns, workers
        # The CPU clock of a worker thread.
        self.clock = SampledClock()
        self._rows = self._alive = self._run = self._cpu = 0
        self._squares, self._wait = 0.0, dict.fromkeys(Wait, 0)
        self.waiting_for: Wait | None = None
        self._waiting_since = self._running_since = 0
        # Leases that the worker has, including the one it works on.
        self.leases = 0

    @property
    def begins(self) -> bool:
        """Whether the worker is working on its first lease."""
        return self.leases > 0 and self._rows == 0

    def resize(self, workers: int, now_ns: int) -> None:
        """Note that they are more from now on, or fewer."""
        self._alive += (now_ns - self._since) * self._workers
        self._since = now_ns
        self._add_wait(now_ns)
        self._workers = workers

    def wait(self, what: Wait, now_ns: int) -> None:
        """Note that the worker found nothing to do, for the reason `what`."""
        if self.leases == 0 and self.waiting_for is not what:
            self._add_wait(now_ns)
            self.waiting_for, self._waiting_since = what, now_ns

    def start(self, now_ns: int) -> None:
        """Note that the worker received a lease."""
        if self.waiting_for is not None:
            self._add_wait(now_ns)
            self.waiting_for = None
        if self.leases == 0:
            self._running_since = now_ns
        self.leases += 1

    def stop(self, rows: int, run_ns: int, cpu_ns: int, now_ns: int) -> None:
        """Note that a lease was settled; the next one, if any, starts now.

        `run_ns` and `cpu_ns` are worker-time.
        """
        self._rows += rows
        self._run += run_ns
        self._squares += run_ns * 1e-18 * run_ns
        self._cpu += cpu_ns
        self._running_since = now_ns
        self.leases -= 1

    def read(self, now_ns: int) -> WorkerReading:
        """Return the totals, including the open interval."""
        self._add_wait(now_ns)
        run, waits = self._run, self._wait
        if self.leases:
            run += (now_ns - self._running_since) * self._workers
        return WorkerReading(
            rows=self._rows,
            worker_s=(self._alive + (now_ns - self._since) * self._workers) / 1e9,
            run_s=run / 1e9,
            settled_s=self._run / 1e9,
            settled_s2=self._squares,
            cpu_s=self._cpu / 1e9,
            wait_input_s=waits[Wait.INPUT] / 1e9,
            wait_credit_s=(waits[Wait.CREDIT] + waits[Wait.MEMORY]) / 1e9,
            wait_memory_s=waits[Wait.MEMORY] / 1e9,
        )

    def _add_wait(self, now_ns: int) -> None:
        """Count what they have waited up to now."""
        if self.waiting_for is not None:
            waited_ns = (now_ns - self._waiting_since) * self._workers
            self._wait[self.waiting_for] += waited_ns
            self._waiting_since = now_ns


class Connector:
    """Hands work to one segment's workers, and takes their results."""

    def __init__(
        self,
        engine_lock: EngineLock,
        segment: int,
        finish: Callable[[InFlightBatch], Any],
        operations: int = 1,
    ) -> None:
        self.engine_lock, self._core = engine_lock, engine_lock.core
        self.parts = PartsMeter(operations)
        # The trainer's thread's waits for a core, while it works on the segment.
        self.own_queue = own_queue()
        self.segment, self._finish = segment, finish
        # Called when a segment's only worker has looked at its copy of the data, with
        # the path of what changed there, or an empty string.
        self.on_look: Callable[[str], object] = str
        # Called with the reason once workers elsewhere are out of reach for good.
        self.on_lost: Callable[[str], object] = str
        # Number of batches that workers are collating.
        self._finishing = 0
        # The meters of the current workers; guarded by the lock.
        self.meters: set[WorkerMeter] = set()
        self._waits_for: Wait | None = None
        self._past_reading = WorkerReading()

    # For workers

    def enter(self, workers: int = 1) -> WorkerMeter:
        """Register a new worker, or several that share leases; return the meter."""
        with self.engine_lock.lock:
            meter = WorkerMeter(self.engine_lock.clock(), workers)
            self.meters.add(meter)
        return meter

    def resize_meter(self, meter: WorkerMeter, workers: int) -> None:
        """Note how many workers share a meter."""
        with self.engine_lock.lock:
            meter.resize(workers, self.engine_lock.clock())

    def leave(self, meter: WorkerMeter) -> None:
        """Deregister a worker; its counts are kept."""
        with self.engine_lock.lock:
            if meter in self.meters:
                self.meters.remove(meter)
                self._past_reading += meter.read(self.engine_lock.clock())

    def take(self, meter: WorkerMeter, surplus: Callable[[], bool]) -> Lease | None:
        """Wait for work; return a lease, or None if the worker must end.

        Args:
            meter: the worker's instrument.
            surplus: called with the lock held; True means that this worker retires.
        """
        engine_lock = self.engine_lock
        with engine_lock.lock:
            while not (engine_lock.closed or surplus()):
                lease = self._attempt(meter)
                if lease is not None:
                    return lease
                engine_lock.conditions[self.segment].wait()
        return None

    def try_take(self, meter: WorkerMeter) -> Lease | None:
        """Return a lease; None if there is no work now, or the engine is closed."""
        with self.engine_lock.lock:
            return None if self.engine_lock.closed else self._attempt(meter)

    def settle(self, lease: Lease, outcome: Outcome, meter: WorkerMeter) -> None:
        """Report the outcome of a lease; whoever completes a batch finishes it.

        Never waits for another worker. Finishing may run the user's `collate_fn` in
        this worker, with no lock held.
        """
        engine_lock = self.engine_lock
        with engine_lock.lock:
            now_ns = engine_lock.clock()
            meter.stop(outcome.done, outcome.run_ns, outcome.cpu_ns, now_ns)
            if outcome.parts:
                self.parts.add(outcome.parts, outcome.done)
            in_flight = self._core.settle(lease, outcome, now_ns)
            self._finishing += in_flight is not None
            engine_lock.wake()
        # The failures belong to the batch now. A traceback keeps the frames it passed
        # through, with this outcome in them: clearing it breaks the cycle, so both are
        # freed without the garbage collector.
        outcome.failures.clear()
        if in_flight is not None:
            batch = self._finish(in_flight)
            with engine_lock.lock:
                self._finishing -= 1
                self._core.deliver(in_flight, batch, engine_lock.clock())
                engine_lock.wake()
        engine_lock.notify_others()

    def make_alone(
        self, work: Callable[[Lease], Outcome]
    ) -> tuple[InFlightBatch, Any] | None:
        """Make the next batch at once, as nobody else works here; None if it is split.

        No lease has to be taken and settled, and nobody woken. The engine's counters of
        work do not include it.

        Args:
            work: works on a lease of all rows.
        """
        with self.engine_lock.lock:
            in_flight = None if self.engine_lock.closed else pop_unmade(self._core)
        if in_flight is None:
            return None
        chunk = in_flight.chunk(0, len(in_flight.rows))
        outcome = work(Lease(self.segment, chunk, in_flight.inputs, in_flight))
        if self.engine_lock.closed:  # meanwhile: nobody is left to take it
            return None
        self.parts.add(outcome.parts, outcome.done)
        self._core.segments[self.segment].learn(
            outcome.run_ns, outcome.cpu_ns, outcome.done
        )
        in_flight.failures += outcome.failures
        in_flight.dropped, in_flight.ended = outcome.dropped, outcome.ended
        outcome.failures.clear()  # for the reason in `settle`
        return in_flight, self._finish(in_flight)

    def keeps_nothing(self) -> None:
        """Note that `collate_fn` and the like keep no state between batches.

        Worker processes may then make whole batches, and an inline segment may work
        ahead of the trainer.
        """
        with self.engine_lock.lock:
            state = self._core.segments[self.segment]
            state.collates = state.ahead = True
            self._core.set_prefetch(self.segment, state.prefetch)  # leases grow
            self.engine_lock.wake()

    # For the segment and the monitor, which hold the lock

    @property
    def busy(self) -> bool:
        """Whether a worker has a batch or a lease, even one that was dropped."""
        return self._finishing > 0 or any(meter.leases for meter in self.meters)

    def read(
        self, now_ns: int, window_s: float
    ) -> tuple[WorkerReading, ConnectorObservation, tuple[PartReading, ...]]:
        """Return all totals up to now, since the run began `window_s` ago.

        They are the sum over its workers, past ones included, the rows that wait after
        it, and the cost of each operation.
        """
        core, reader = self._core, self.segment + 1
        row_bytes = (
            core.segments[reader].row_bytes
            if reader < len(core.segments)
            else core.reservations.batch_bytes / core.batch_rows
        )
        return (
            total_of(
                (self._past_reading, *(meter.read(now_ns) for meter in self.meters))
            ),
            core.segments[self.segment].gauge.read(now_ns, window_s, row_bytes),
            self.parts.read(),
        )

    def _attempt(self, meter: WorkerMeter) -> Lease | None:
        now_ns = self.engine_lock.clock()
        lease = self._core.take(self.segment, now_ns)
        if isinstance(lease, Wait):
            meter.wait(lease, now_ns)
            if lease is not self._waits_for:  # nor can those do more who wait already
                self._waits_for = lease
                for other in [m for m in self.meters if m.waiting_for is not None]:
                    other.wait(lease, now_ns)
            return None
        meter.start(now_ns)
        self.engine_lock.wake()
        return lease
