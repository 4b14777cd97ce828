"""Coroutines as workers: for reads that wait, hundreds at once, in one thread.

One thread runs one event loop. A *permit* is a worker: the right to have one lease in
progress. One more worker therefore costs a few hundred bytes, but no thread and no
stack. The loop never waits for a lease: the engine lock notifies it of possible work.
The rows of a lease are awaited one after another. Rows that wait long are leased one by
one (core.py sizes leases by time), and many leases wait at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..batch.layout import size_of
from ..core.chunk import Lease, Outcome, Parts
from ..core.connector import Connector
from ..core.metrics import WorkerMeter
from ..program.program import FAILED, Calling, Calls, Program, Work
from ..program.randomness import SampleRandom
from .pool import PoolStatistics, ServedPool, beginning, sink_of
from .threads import use_one_torch_thread


@dataclass(slots=True, eq=False)
class Permit:
    """One worker."""

    meter: WorkerMeter
    random: SampleRandom
    """Its own, because others draw while its function waits."""
    task: asyncio.Task[None] | None = None
    """Works on leases; None while idle. (The loop itself refers to it only weakly.)"""


class Coroutines(ServedPool):
    """A number of permits, each taking and settling leases.

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
        self._program = program
        self._timeout_s = timeout_s
        self._seed = seed
        self._name = name
        self._permits: set[Permit] = set()
        self._idle: deque[Permit] = deque()
        # The thread's CPU time when the last lease was settled.
        self._cpu_ns = 0
        self._rung = asyncio.Event()
        self._start()

    def statistics(self) -> PoolStatistics:
        with self._engine_lock.lock:
            return PoolStatistics(len(self._permits), beginning(self._connector))

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

    def _end_all(self) -> None:
        for permit in list(self._permits):
            self._remove(permit)

    async def _loop(self) -> None:
        loop, lock = asyncio.get_running_loop(), self._engine_lock
        loop.add_reader(self._wakeup, self._hear)
        try:
            while not lock.closed and (self._permits or not self._leaving):
                self._staff()
                self._hand_out()
                await self._rung.wait()
                self._rung.clear()
        finally:
            loop.remove_reader(self._wakeup)

    def _hear(self) -> None:
        self._wakeup.clear()
        self._rung.set()

    def _staff(self) -> None:
        """Adjust the number of permits to the request, as far as they are idle."""
        while len(self._permits) < self._asked:
            permit = Permit(self._connector.enter(), SampleRandom(self._seed))
            self._permits.add(permit)
            if not self._employ(permit):
                self._idle.append(permit)
        while self._idle and len(self._permits) > self._asked:
            self._remove(self._idle.popleft())

    def _hand_out(self) -> None:
        """Employ idle permits up to the first that finds no work.

        The others would find none, either. That one goes to the end of the line, so
        that in time all meters show what they wait for.
        """
        while self._idle:
            if not self._employ(self._idle[0]):
                self._idle.rotate(-1)
                return
            self._idle.popleft()

    def _employ(self, permit: Permit) -> bool:
        lease = self._connector.try_take(permit.meter)
        if lease is None:
            return False
        permit.task = asyncio.create_task(self._busy(permit, lease))
        return True

    async def _busy(self, permit: Permit, first: Lease) -> None:
        """Work on one lease after another, until there are none."""
        lease: Lease | None = first
        try:
            while lease is not None:
                await self._run(permit, lease)
                await self._yield()
                lease = self._next(permit)
        except asyncio.CancelledError:  # nobody needs its rows any more
            raise
        except BaseException as error:  # noqa: BLE001 ours: user code is caught before
            self._engine_lock.fail(error)
            self._remove(permit)
        permit.task = None

    async def _yield(self) -> None:
        """Let other tasks run whose wait is over."""
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._engine_lock.closed:
                raise
            # Its function cancelled its own task, and did not wait for that to happen.

    def _next(self, permit: Permit) -> Lease | None:
        if len(self._permits) > self._asked:
            self._remove(permit)
            return None
        lease = self._connector.try_take(permit.meter)
        if lease is None:
            self._idle.append(permit)
        return lease

    async def _run(self, permit: Permit, lease: Lease) -> None:
        outcome = await self._outcome(lease, permit.random)
        # The thread served several leases since the last settling. The share of each is
        # unknown, but the sum is right.
        now_ns = time.thread_time_ns()
        outcome.cpu_ns, self._cpu_ns = now_ns - self._cpu_ns, now_ns
        self._connector.settle(lease, outcome, permit.meter)

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
                cancelled = isinstance(error, asyncio.CancelledError)
                if cancelled and self._engine_lock.closed:
                    raise
                failed.add(at)
                calls.results.fail(at, error, stage)
                samples.append(FAILED)
        calls.results.take(samples, failed)

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

    def _remove(self, permit: Permit) -> None:
        self._permits.discard(permit)
        self._connector.leave(permit.meter)
        self._rung.set()  # somebody may wait for the last permit to leave
