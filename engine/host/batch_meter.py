"""Measures a trainer that makes its own batches."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from ...system.run_queue import OwnQueue
from ..core.metrics import LONG_NS, SOME, PartReading, PartsMeter, WorkerReading
from ..observe.observation import ratio

__all__ = ["BatchMeter"]

NOTHING = nullcontext()


class BatchMeter:
    """The time that making batches takes. Only the trainer's thread writes to it.

    meter.begin()
    ...                     # make the samples
    meter.collating()
    ...                     # collate them
    meter.end(rows)
    """

    def __init__(self, operations: int = 1) -> None:
        self.parts = PartsMeter(operations)
        """The cost of each operation, if there are several."""
        self.queue = OwnQueue()
        self._born_ns = time.perf_counter_ns()
        self.batches = self.rows = self._run_ns = self._collate_ns = 0
        self._clocked_ns = self._cpu_ns = self._collate_cpu_ns = 0
        """Totals of the batches whose CPU time was measured."""
        self._alike_ns = 0
        """Time of all batches, without the excess of suddenly long ones: the excess was
        waiting, as far as the measured batches can tell."""
        self._begun_ns = self._made_ns = 0
        self._begun_cpu_ns = self._made_cpu_ns = 0
        self.last_ns = LONG_NS
        """Time of the last batch (ns); before the first one, `LONG_NS`."""
        self._cold = self._slowest = (0, 0)
        """Rows and nanoseconds of the first batch, and of the slowest other one."""
        self.sample_bytes = 0
        """Bytes of a sample, as last measured."""
        self.usual_ns = 0
        """Time of a sample (ns): the median of the first batch; 0 if unknown."""

    def begin(self) -> None:
        """Begin a batch."""
        clocked = self.last_ns >= LONG_NS or self.batches % SOME == 0
        if clocked:
            self.queue.begin()
        self._begun_cpu_ns = time.thread_time_ns() if clocked else 0
        self._begun_ns = time.perf_counter_ns()

    @property
    def share(self) -> float | None:
        """Likely share of this batch's time on a CPU; None if it is measured."""
        return None if self._begun_cpu_ns else ratio(self._cpu_ns, self._clocked_ns)

    def collating(self) -> AbstractContextManager[object]:
        """Note that the samples are made, and collating them starts."""
        if self._begun_cpu_ns:
            self._made_cpu_ns = time.thread_time_ns()
        self._made_ns = time.perf_counter_ns()
        return NOTHING

    def end(self, rows: int) -> None:
        """End a batch of `rows` rows."""
        now_ns = time.perf_counter_ns()
        run_ns = self.last_ns = now_ns - self._begun_ns
        if self._begun_cpu_ns:
            cpu_ns = time.thread_time_ns()
            self._cpu_ns += cpu_ns - self._begun_cpu_ns
            self._collate_cpu_ns += cpu_ns - self._made_cpu_ns
            self._clocked_ns += run_ns
            self.queue.end(run_ns)
        self._alike_ns += run_ns if self._begun_cpu_ns else min(run_ns, LONG_NS)
        if self.batches == 0:
            self._cold = rows, run_ns
        elif run_ns > self._slowest[1]:
            self._slowest = rows, run_ns
        self.batches += 1
        self.rows += rows
        self._run_ns += run_ns
        self._collate_ns += now_ns - self._made_ns

    @property
    def run_ns(self) -> int:
        """Nanoseconds that all batches took."""
        return self._run_ns

    @property
    def tally(self) -> tuple[int, int]:
        """Rows and nanoseconds without the first batch and the slowest other one."""
        (cold, cold_ns), (slow, slow_ns) = self._cold, self._slowest
        if self.batches <= 2:
            slow = slow_ns = 0
        return self.rows - cold - slow, self._run_ns - cold_ns - slow_ns

    @property
    def samples_tally(self) -> tuple[int, int]:
        """Rows and nanoseconds like `tally`, without the time for collating."""
        rows, run_ns = self.tally
        return rows, int(run_ns * (1.0 - ratio(self._collate_ns, self._run_ns)))

    def read(self) -> tuple[WorkerReading, tuple[PartReading, ...]]:
        """Return the totals: of everything, of each operation, and of collating."""
        rows, run_s = self.rows, self._run_ns / 1e9
        collate_s = min(self._collate_ns / 1e9, run_s)
        alive_s = (time.perf_counter_ns() - self._born_ns) / 1e9
        cpu_s = self._alike_ns / 1e9 * min(1.0, ratio(self._cpu_ns, self._clocked_ns))
        collate_cpu_s = cpu_s * ratio(self._collate_cpu_ns, self._cpu_ns)
        nbytes, held_s = rows * self.sample_bytes, max(0.0, alive_s - run_s)
        work = WorkerReading(
            rows=rows, worker_s=alive_s, run_s=run_s, cpu_s=cpu_s, wait_credit_s=held_s
        )
        made = self.parts.read()
        if len(made) == 1:  # its cost is that of everything but collating
            rest_s = run_s - collate_s, cpu_s - collate_cpu_s
            made = (PartReading(rows, *rest_s, nbytes),)
        return work, (*made, PartReading(rows, collate_s, collate_cpu_s, nbytes))

    @property
    def queued_s(self) -> float:
        """Seconds that the trainer waited for a core while making batches."""
        return self._alike_ns / 1e9 * self.queue.share
