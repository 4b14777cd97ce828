"""Measures the trainer's side: how long `next()` made it wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from ...system.run_queue import RunQueue
from ..plan import BatchPlan
from .observation import TrainerObservation

AWAY_NS = 1_000_000_000
AWAY = 20
"""A gap this many times the usual one, and at least `AWAY_NS`, means it was away."""


class TrainerMeter:
    """Measures how long `next()` made the trainer wait.

    A step's times are counted when its batch is handed over, together with the batch,
    so a window never holds half a step. Only the trainer's thread writes; any thread
    may read at any time.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter_ns() / 1e9
        self._began_cpu_s = time.process_time()
        self.epoch = self.step = 0
        self._totals = (0, 0, 0, 0, 0, 0, 0)
        """Steps, rows, and nanoseconds: waits, gaps, the part of the waits for copying
        to the device, time away, and waits for first batches. Replaced as a whole, so
        readers need no lock."""
        self.collate_ns = 0
        """Time spent in the user's `collate_fn`, in nanoseconds."""
        self.begin_ns = 0
        """How long the start of the loop took, in nanoseconds: the trainer waited."""
        self._loops, self._loop_ns = 0, (0, 0)
        """Loops begun; when the last one began, and how long the one before took."""
        self._left_ns: int | None = None
        self._asked_ns = self._gap_ns = 0
        self._first = False
        self._thread = 0
        self._run_queue = RunQueue(lambda: [f"/proc/self/task/{self._thread}"])

    @property
    def training(self) -> bool:
        """Whether the trainer is in its loop."""
        return self._left_ns is not None

    @property
    def gap_s(self) -> float:
        """Seconds between the last batch and this request; 0 at the start of a loop."""
        return self._gap_ns / 1e9

    def ask(self, now_ns: int) -> None:
        """Note that the trainer calls `next()`."""
        self._first = self._left_ns is None
        if self._first:
            self._thread = threading.get_native_id()
        self._gap_ns = 0 if self._left_ns is None else now_ns - self._left_ns
        self._asked_ns, self._left_ns = now_ns - self.begin_ns, now_ns
        self.begin_ns = 0

    def get(self, now_ns: int, plan: BatchPlan, copy_ns: int = 0) -> None:
        """Note a batch; `copy_ns` of its wait went into copying it to the device."""
        self.count(now_ns, plan.n_rows, copy_ns)
        self.epoch, self.step = plan.epoch, plan.step

    def count(self, now_ns: int, n_rows: int, copy_ns: int = 0) -> None:
        """Note a batch that has no plan."""
        steps, rows, wait_ns, gap_ns, copied_ns, away_ns, first_ns = self._totals
        gap, wait = self._gap_ns, now_ns - self._asked_ns
        if self._first:
            first_ns += wait
            begun_ns, _ = self._loop_ns
            self._loop_ns = self._asked_ns, self._asked_ns - begun_ns
            self._loops += 1
        if gap > AWAY_NS and gap * steps > AWAY * (gap_ns + away_ns) > 0:
            gap, away_ns = 0, away_ns + gap
        self._totals = (
            steps + 1,
            rows + n_rows,
            wait_ns + wait,
            gap_ns + gap,
            copied_ns + copy_ns,
            away_ns,
            first_ns,
        )
        self._left_ns = now_ns

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        """Measure the user's `collate_fn` in the trainer's thread."""
        begun_ns = time.perf_counter_ns()
        yield
        self.collate_ns += time.perf_counter_ns() - begun_ns

    def stop(self) -> None:
        """Note that it left the loop: the last step ends here, and no gap begins."""
        steps, rows, wait_ns, gap_ns, copied_ns, away_ns, first_ns = self._totals
        gap_ns += self._gap_ns
        self._totals = steps, rows, wait_ns, gap_ns, copied_ns, away_ns, first_ns
        self._left_ns = None

    def read(self) -> TrainerObservation:
        """Return the totals over whole steps."""
        steps, rows, *spent_ns = self._totals
        spent_ns.insert(3, self.collate_ns)
        spent_ns.append(self._run_queue.look().waited_ns)
        found = TrainerObservation(steps, rows, *(ns / 1e9 for ns in spent_ns))
        loops, (begun_ns, last_ns) = self._loops, self._loop_ns
        age_ns = (
            self._left_ns or begun_ns
        ) - begun_ns  # a long loop may follow a short
        loop_ns = max(last_ns, age_ns) if loops > 1 else 0
        return replace(found, loops=loops, loop_s=loop_ns / 1e9)

    @property
    def process_cpu_s(self) -> float:
        """CPU-seconds of this process since the run began."""
        return time.process_time() - self._began_cpu_s

    def window_s(self, now_ns: int, seen: TrainerObservation) -> float:
        """Return the seconds since the run began, without those that it was away."""
        return now_ns / 1e9 - self._began_s - seen.away_s
