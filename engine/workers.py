"""Workers in this process: the trainer itself, threads, and coroutines.

`WorkerPool` is what every kind of workers offers to the engine; those in other
processes (far/) do, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch

from ..system.wakeup import Wakeup
from .batch.buffer import BatchBuffer
from .batch.layout import size_of
from .core.connector import Connector, SampledClock, WorkerMeter
from .core.core import FAR_LEASE_NS, LEASE_NS
from .core.in_flight import Lease, Outcome, Parts
from .program.program import FAILED, BatchMap, Calling, Calls, Program, Watch, Work
from .program.randomness import SampleRandom
from .witness.witness import Witness

LOGGER = logging.getLogger("penstock")
ALONE = (
    "%s: only one thread works on it, whatever num_parallel_workers says: since the"
    ' first sample %s, which threads must not share. Use executor="process", where each'
    " worker opens its own, keep it in a threading.local(), or pass"
    " from_dataset(thread_safe=True) if threads may share it."
)

# Kinds of workers.
Kind = Literal["inline", "thread", "process", "async", "ray"]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Numbers of workers."""

    alive: int
    """Workers that work or wait, including those that are about to retire."""
    beginning: int = 0
    """Workers whose speed is not known yet: they are starting, or have settled none of
    their leases."""
    most: int = sys.maxsize
    """Workers that there is room for."""
    children: int = 0
    """Processes that they are in, if these are not the trainer's."""


class Holding(NamedTuple):
    """The leases that workers hold."""

    leases: int
    """How many at once."""
    lease_ns: int
    """Work in one of them."""
    makers: int = 1
    """How many work on one each, if they make whole batches."""


class WorkerPool(ABC):
    """The workers of one segment, of one kind. They only `take` and `settle`."""

    executor: ClassVar[Kind]
    _connector: Connector
    _present: set[Any]
    """Its workers, if they are in this process; the engine lock guards it."""

    @abstractmethod
    def resize(self, count: int) -> None:
        """Request `count` workers; return at once, without waiting for running work."""

    def leases(self, workers: int) -> Holding:
        """Return what leases so many workers hold: one each."""
        return Holding(workers, LEASE_NS)

    def retire(self) -> None:
        """Let all workers leave for good after their current lease; return at once."""
        self.resize(0)

    @abstractmethod
    def close(self, until_s: float = inf) -> list[str]:
        """Stop, and wait until all workers are gone. The engine lock is closed already.

        Args:
            until_s: when to stop waiting for stuck ones, on the monotonic clock.

        Returns:
            The names of threads that still run: a thread cannot be interrupted.
        """

    def statistics(self) -> PoolStatistics:
        """Return the numbers of workers. The engine lock must not be held."""
        with self._connector.engine_lock.lock:
            beginning = sum(meter.begins for meter in self._connector.meters)
            return PoolStatistics(len(self._present), beginning)

    def threads(self) -> list[str]:
        """Return the /proc folders of its threads, without the caller's."""
        return []

    def rest(self, until_ns: int) -> None:  # noqa: B027 most leases are short
        """Let workers rest within a lease, too, until this moment; 0: no more."""

    def serve_now(self) -> None:  # noqa: B027 few need it
        """Do what a thread would do next for its workers. For the trainer's thread."""

    def at_work(self) -> bool:
        """Whether a worker is working. The engine lock is held."""
        return self._connector.busy


class ServedPool(WorkerPool):
    """Workers served by one thread, which waits for whatever happens first.

    The engine lock guards `_asked`, `_leaving` and `_wakeup`; everything else belongs
    to that thread.

    Args:
        connector: where leases come from.
        name: name of the thread.
    """

    def __init__(self, connector: Connector, name: str) -> None:
        self._connector, self._engine_lock = connector, connector.engine_lock
        self._listeners = connector.engine_lock.listeners[connector.segment]
        self._asked, self._leaving = 0, False
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._work, name=f"penstock {name}", daemon=True
        )

    def resize(self, count: int) -> None:
        with self._engine_lock.lock:
            self._asked = count
            self._wakeup.notify()

    def retire(self) -> None:
        with self._engine_lock.lock:
            self._asked, self._leaving = 0, True
            self._wakeup.notify()

    def close(self, until_s: float = inf) -> list[str]:
        return join_all([self._thread], until_s)

    def _start(self) -> None:
        """Start listening and serving."""
        with self._engine_lock.lock:
            self._listeners.append(self._hear_of_work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 ours: user code is caught before
            self._engine_lock.fail(error)
        finally:
            with self._engine_lock.lock:
                self._listeners.remove(self._hear_of_work)
                self._wakeup.close()
            self._end_all()

    def _hear_of_work(self) -> None:
        """React to possible work. The engine lock is held."""
        self._wakeup.notify()

    @abstractmethod
    def _serve(self) -> None:
        """Serve the workers until the engine is closed or all have left."""

    def _end_all(self) -> None:
        """End the remaining workers."""


def join_all(threads: Iterable[threading.Thread], until_s: float) -> list[str]:
    """Wait for other threads to end; return the names of those that did not in time."""
    others = [
        thread
        for thread in threads
        if thread is not threading.current_thread() and thread.ident is not None
    ]
    for thread in others:
        thread.join(min(max(0.0, until_s - time.monotonic()), threading.TIMEOUT_MAX))
    return [thread.name for thread in others if thread.is_alive()]


# Makes what observes the samples of one worker.
Watches = Callable[[], Watch | None]


def no_watch() -> None:
    """Observe nothing."""


def run_lease(
    lease: Lease,
    program: Program,
    random: SampleRandom,
    clock: SampledClock,
    watch: Watch | None,
) -> Outcome:
    """Work on a lease in this thread.

    Args:
        lease: what to work on.
        program: what to do.
        random: the worker's generator.
        clock: the worker's CPU clock.
        watch: observes which sample it is at; None: nobody.
    """
    chunk, sink = lease.chunk, sink_of(program, lease)
    if watch is None:
        return program.run(chunk, lease.inputs, sink, random, clock=clock)
    in_flight = lease.in_flight
    watch.begin(in_flight.number, chunk.first_row - in_flight.first_row)
    sample_watch = None if isinstance(program.operations[0], BatchMap) else watch
    outcome = program.run(chunk, lease.inputs, sink, random, sample_watch, clock)
    watch.end()
    return outcome


def sink_of(program: Program, lease: Lease) -> BatchBuffer | None:
    """Return the batch that a lease's rows are written to, if they are."""
    return lease.in_flight.buffer if program.places else None


class Inline(WorkerPool):
    """The trainer: its `next()` runs the segment, without another thread."""

    executor = "inline"

    def __init__(
        self,
        connector: Connector,
        program: Program,
        seed: int,
        watch: Watches = no_watch,
    ) -> None:
        self._connector, self._program = connector, program
        self._random, self._watch = SampleRandom(seed), watch()
        self._meter = connector.enter()
        self._has_left = False
        # Rows done so far.
        self.done = 0
        self._rows, self._run_ns, self._slowest = 0, 0, (0, 0)

    @property
    def tally(self) -> tuple[int, int]:
        """Rows done and nanoseconds spent, without the first lease, which is cold.

        The slowest lease is left out too if there are others: another process may have
        had the core.
        """
        rows, run_ns = self._slowest
        if rows == self._rows:
            return self._rows, self._run_ns
        return self._rows - rows, self._run_ns - run_ns

    def step(self) -> bool:
        """Work on one lease; return False if there is none."""
        lease = self._connector.try_take(self._meter)
        if lease is None:
            return False
        # Elsewhere the trainer reads the queue.
        queue, counts = self._connector.own_queue, self._watch is None
        if counts:
            queue.begin()
        outcome = self.outcome(lease)
        if counts:
            queue.end(outcome.run_ns)
        for failure in outcome.failures if counts else ():
            if isinstance(failure.error, KeyboardInterrupt):
                raise failure.error  # at once: it was meant for the trainer's loop
        self._connector.settle(lease, outcome, self._meter)
        if self.done:
            self._rows += outcome.done
            self._run_ns += outcome.run_ns
            rows, run_ns = self._slowest
            if outcome.run_ns * rows >= run_ns * outcome.done:
                self._slowest = outcome.done, outcome.run_ns
        self.done += outcome.done
        return True

    def leases(self, workers: int) -> Holding:
        # If it is watched, it does nothing else.
        return Holding(workers, LEASE_NS if self._watch is None else FAR_LEASE_NS)

    def resize(self, count: int) -> None:
        """Do nothing: there is always one worker."""

    def retire(self) -> None:
        self._has_left = True
        self._connector.leave(self._meter)

    def close(self, until_s: float = inf) -> list[str]:  # noqa: ARG002 it ends at once
        self.retire()
        return []

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(alive=not self._has_left)

    def outcome(self, lease: Lease) -> Outcome:
        """Work on a lease."""
        return run_lease(
            lease, self._program, self._random, self._meter.clock, self._watch
        )


# Held around a fork: otherwise a child could inherit it locked, without its holder.
_torch_threads = threading.Lock()
os.register_at_fork(
    before=_torch_threads.acquire,
    after_in_parent=_torch_threads.release,
    after_in_child=_torch_threads.release,
)


def use_one_torch_thread() -> None:
    """Make torch's operators use this thread alone.

    Rows are processed in parallel already; a pool of threads for each worker would only
    compete. The setting belongs to each thread, but also becomes the default of threads
    that have not used torch yet, so one more thread resets the default. The lock keeps
    two workers from mistaking each other's setting for the default.
    """
    with _torch_threads:
        default = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(default,))
        restore.start()
        restore.join()


class Threads(WorkerPool):
    """Threads: for functions that wait, or that release the GIL.

    The engine lock guards `_target`, `_most`, `_asked`, `_staying` and `_present`. If
    more are staying than are asked for, the next ones that call `take` retire: they
    leave, but are present until they have ended.

    Args:
        connector: where they take their leases.
        program: what they run.
        seed: seed of the samples' random streams.
        name: name of the segment.
        watch: makes what observes the samples of a thread; it may return None.
    """

    executor = "thread"

    def __init__(
        self,
        connector: Connector,
        program: Program,
        seed: int,
        name: str,
        watch: Watches = no_watch,
    ) -> None:
        self._connector, self._engine_lock = connector, connector.engine_lock
        self._program, self._seed = program, seed
        self._name, self._watch = name, watch
        self._sure = not program.doubtful
        self._most = inf if self._sure else 1
        self._target = self._asked = self._staying = 0
        self._present: set[threading.Thread] = set()

    def resize(self, count: int) -> None:
        self._adjust(target=count)

    def _adjust(self, **changes: float) -> None:
        """Change the requested number, or its bound, and start threads as needed."""
        with self._engine_lock.lock:
            self._target = int(changes.get("target", self._target))
            self._most = changes.get("most", self._most)
            self._asked = int(min(self._target, self._most))
            new = [
                threading.Thread(
                    target=self._work, name=f"penstock {self._name}", daemon=True
                )
                for _ in range(self._asked - self._staying)
            ]
            self._present.update(new)
            self._staying += len(new)
            surplus = self._staying > self._asked
        try:
            for thread in new:
                thread.start()
        except BaseException:  # the system has no more of them, or Ctrl-C
            missing = {thread for thread in new if thread.ident is None}
            with self._engine_lock.lock:
                self._present -= missing
                self._staying -= len(missing)
            raise
        if surplus:
            self._engine_lock.notify(self._connector.segment)

    def close(self, until_s: float = inf) -> list[str]:
        with self._engine_lock.lock:
            threads = list(self._present)
        return join_all(threads, until_s)

    def threads(self) -> list[str]:
        with self._engine_lock.lock:
            numbers = [thread.native_id for thread in self._present]
        return [f"/proc/self/task/{number}" for number in numbers if number is not None]

    def _work(self) -> None:
        meter = self._connector.enter()
        try:
            use_one_torch_thread()
            random, watch = SampleRandom(self._seed), self._watch()
            while self._serve(meter, random, watch):
                pass
        except BaseException as error:  # noqa: BLE001 ours: user code is caught before
            self._engine_lock.fail(error)
        finally:
            self._connector.leave(meter)
            with self._engine_lock.lock:
                self._present.discard(threading.current_thread())

    def _serve(
        self, meter: WorkerMeter, random: SampleRandom, watch: Watch | None
    ) -> bool:
        """Work on one lease. Keeps no reference between two leases."""
        lease = self._connector.take(meter, self._retires)
        if lease is None:
            return False
        witness = None if self._sure else Witness(self._program.doubtful)
        outcome = run_lease(lease, self._program, random, meter.clock, watch)
        # What fails may not have come to what it shares.
        if witness is not None and len(outcome.failures) < outcome.done:
            self._sure = True
            finding = witness.finding()
            if finding is None:  # others may share what this first thread used
                self._adjust(most=inf)
            else:
                LOGGER.warning(ALONE, self._name, finding)
        self._connector.settle(lease, outcome, meter)
        return True

    def _retires(self) -> bool:
        if self._staying <= self._asked:
            return False
        self._staying -= 1
        return True


class Coroutines(ServedPool):
    """Coroutines: for reads that wait, hundreds at once, in one thread.

    The thread runs one event loop. A *permit* is a worker: a task of the loop that has
    one lease in progress, or is idle. One more worker therefore costs a few kilobytes,
    but no thread and no stack. The loop never waits for a lease: the engine lock
    notifies it of possible work. The rows of a lease are awaited one after another.
    Rows that wait long are leased one by one (core.py sizes leases by time), and many
    leases wait at once.

    All functions of the program are coroutine functions.

    If a function goes on after its cancellation, closing the pool does not wait for it
    without end. The thread is left behind, and ends when the function does.
    """

    executor = "async"

    def __init__(
        self,
        connector: Connector,
        program: Program,
        seed: int,
        name: str,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(connector, f"{name} coroutines")
        self._program, self._seed, self._timeout_s = program, seed, timeout_s
        self._present: set[asyncio.Task[None]] = set()
        # What idle permits wait for, those first that have waited longest.
        self._idle: deque[asyncio.Future[None]] = deque()
        # The thread's CPU time when the last lease was settled.
        self._cpu_ns = 0
        self._loop_wakeup = asyncio.Event()
        self._start()

    def threads(self) -> list[str]:
        number = self._thread.native_id
        return [] if number is None else [f"/proc/self/task/{number}"]

    # The loop's thread

    def _serve(self) -> None:
        use_one_torch_thread()
        # On exit, the runner cancels all tasks and waits for them, ends all async
        # generators and the threads of `asyncio.to_thread`, and closes the loop.
        with asyncio.Runner() as runner:
            runner.run(self._loop())

    async def _loop(self) -> None:
        loop, lock = asyncio.get_running_loop(), self._engine_lock
        loop.add_reader(self._wakeup, self._hear)
        try:
            while not lock.closed and (self._present or not self._leaving):
                surplus = len(self._present) - self._asked
                for _ in range(-surplus):
                    self._present.add(asyncio.create_task(self._permit()))
                # If the first finds no work, nor would the others.
                self._notify_idle(max(1, surplus))
                await self._loop_wakeup.wait()
                self._loop_wakeup.clear()
        finally:
            loop.remove_reader(self._wakeup)

    def _hear(self) -> None:
        self._wakeup.clear()
        self._loop_wakeup.set()

    def _notify_idle(self, count: int) -> None:
        """Let so many idle permits look for work, or leave if they are too many."""
        while count and self._idle:
            notice = self._idle.popleft()
            if not notice.done():  # else its own function has cancelled it
                notice.set_result(None)
                count -= 1

    async def _permit(self) -> None:
        """Take and settle leases until there are too many permits.

        One that finds no work goes to the end of the line, so that in time all meters
        show what they wait for. One that was notified and finds some notifies the next.
        """
        meter, random = self._connector.enter(), SampleRandom(self._seed)
        lock, notice = self._engine_lock, None
        try:
            # Its function may have resisted the cancellation, which comes only once.
            while not lock.closed and len(self._present) <= self._asked:
                lease = self._connector.try_take(meter)
                if lease is None:
                    notice = asyncio.get_running_loop().create_future()
                    self._idle.append(notice)
                    await notice
                    continue
                if notice is not None:  # there may be work for another one, too
                    notice = None
                    self._notify_idle(1)
                # A task of its own: what a function binds in its context, such as the
                # span of a trace, ends with the lease. A cancellation reaches it.
                await asyncio.create_task(self._run(lease, random, meter))
        except asyncio.CancelledError:  # nobody needs its rows any more
            raise
        except BaseException as error:  # noqa: BLE001 ours: user code is caught before
            lock.fail(error)
            self.retire()
        finally:
            self._connector.leave(meter)
            self._present.discard(cast("asyncio.Task[None]", asyncio.current_task()))
            self._loop_wakeup.set()  # somebody may wait for the last permit to leave

    async def _run(
        self, lease: Lease, random: SampleRandom, meter: WorkerMeter
    ) -> None:
        """Work on one lease. Keeps no reference between two leases."""
        outcome = await self._outcome(lease, random)
        # The thread served several leases since the last settling. The share of each is
        # unknown, but the sum is right.
        now_ns = time.thread_time_ns()
        outcome.cpu_ns, self._cpu_ns = now_ns - self._cpu_ns, now_ns
        self._connector.settle(lease, outcome, meter)
        try:
            await asyncio.sleep(0)  # so that others run whose wait is over
        except asyncio.CancelledError:
            if self._engine_lock.closed:
                raise
            # Its function cancelled its own task, and did not wait for that to happen.

    async def _outcome(self, lease: Lease, random: SampleRandom) -> Outcome:
        """Work on a lease as `Program.run` does; the CPU time is not known."""
        start_ns, program = time.perf_counter_ns(), self._program
        work = Work(lease.chunk, random, lease.inputs or [])
        parts: Parts = ()
        made_ns = 0
        for operation in program.operations:
            assert isinstance(operation, Calling)
            calls = operation.begin(work)
            await self._make(calls, operation.stage)
            operation.finish(work, calls.results)
            before_ns, made_ns = made_ns, time.perf_counter_ns() - start_ns
            nbytes = size_of(work.samples[0]) if work.samples else 0
            parts += ((made_ns - before_ns, 0, nbytes),)
        outcome = program.finish(work, sink_of(program, lease))
        outcome.run_ns = time.perf_counter_ns() - start_ns
        outcome.parts = program.parted(parts, outcome, made_ns)
        return outcome

    async def _make(self, calls: Calls, stage: str) -> None:
        """Make the calls and await each, setting failures aside.

        A cancellation before the end comes from the function, and is a failure like any
        exception.
        """
        samples: list[Any] = []
        failed: set[int] = set()
        for at in range(calls.number):
            try:
                samples.append(await self._limited(calls, stage))
            except BaseException as error:
                if self._engine_lock.closed and isinstance(
                    error, asyncio.CancelledError
                ):
                    raise
                failed.add(at)
                calls.results.fail(at, error, stage)
                samples.append(FAILED)
        calls.results.continue_with(samples, failed)

    async def _limited(self, calls: Calls, stage: str) -> Any:
        if self._timeout_s is None:
            return await next(calls.each)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await next(calls.each)
        except TimeoutError as error:
            if not limit.expired():
                raise  # a TimeoutError of the function's own
            raise TimeoutError(
                f"{stage} was still waiting for this sample after its `timeout` of "
                f"{self._timeout_s:g} s, and was cancelled; raise `timeout`, or let the"
                " function retry with a shorter time limit of its own"
            ) from error
