"""The trainer as worker: its `next()` runs the segment, without another thread."""

from __future__ import annotations

from math import inf

from ..core.chunk import Lease, Outcome
from ..core.connector import Connector
from ..core.core import FAR_LEASE_NS, LEASE_NS
from ..program.program import Program
from ..program.randomness import SampleRandom
from .pool import Holding, PoolStatistics, Watches, WorkerPool, no_watch, run_lease


class Inline(WorkerPool):
    """One worker that works on request, in the caller's thread."""

    executor = "inline"

    def __init__(
        self,
        connector: Connector,
        program: Program,
        seed: int,
        watch: Watches = no_watch,
    ) -> None:
        self._connector = connector
        self._program = program
        self._random, self._watch = SampleRandom(seed), watch()
        self._meter = connector.enter()
        self._left = False
        self.done = 0
        """Rows done so far."""
        self._rows = self._run_ns = 0
        self._slowest = (0, 0)

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
        self._run(lease)
        return True

    def leases(self, workers: int) -> Holding:
        # If it is watched, it does nothing else.
        return Holding(workers, LEASE_NS if self._watch is None else FAR_LEASE_NS)

    def resize(self, count: int) -> None:
        """Do nothing: there is always one worker."""

    def retire(self) -> None:
        self._left = True
        self._connector.leave(self._meter)

    def close(self, until_s: float = inf) -> list[str]:  # noqa: ARG002 it ends at once
        self.retire()
        return []

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(alive=not self._left)

    def _run(self, lease: Lease) -> None:
        queue = self._connector.own_queue
        counts = self._watch is None  # elsewhere the trainer reads the queue
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

    def outcome(self, lease: Lease) -> Outcome:
        """Work on a lease."""
        clock = self._meter.clock
        return run_lease(lease, self._program, self._random, clock, self._watch)
