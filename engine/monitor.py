"""The monitor: reads the counters of one engine, and triggers the GIL probe.

The probe finds out at what share of moments other threads hold the GIL. A thread that
sleeps for 3.5 ms is late for three reasons: waking up takes a moment, then it waits for
a CPU, and then for the GIL. The first is short, and Linux reports the second
(`schedstat`). So the rest shows whether the GIL was free when the thread woke. The
result is a yes or a no: how long the wait takes depends on the switch interval and on
luck in the queue, and says nothing more about the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import inf

import torch

from ..system.run_queue import Times
from .core.connector import EngineLock
from .observe.observation import (
    MIN_WAIT,
    ConnectorObservation,
    Observation,
    PartReading,
    Restriction,
    SegmentObservation,
    TrainerObservation,
    WorkerReading,
    parts_of,
)
from .plan import Planning
from .recipe import Recipe
from .segment import Segment
from .trainer_cost import TrainerMeter
from .workers import PoolStatistics, join_all

# How long a result of the GIL probe stays valid.
PROBE_AGAIN_S = 60.0
# Shorter than the interpreter's switch interval of 5 ms, which the waits of other
# threads restart when the probe falls asleep. After exactly 5 ms it would wake when the
# GIL changes hands, and find it free: seen at 60 % of moments between two busy threads.
SLEEP_S = 0.0035
# If it is later than this, beyond the scheduler's part, the GIL was held. Waking an
# idle core takes 0.2 ms on a virtual machine (measured), a busy one 0.1 ms.
LATE_NS = 300_000
# Moments in a burst: at least 0.18 s, and some 5 ms of CPU. Their share is accurate to
# 0.14, twice its standard error.
BURST = 50


class Monitor:
    """Reads one engine."""

    def __init__(
        self,
        engine_lock: EngineLock,
        segments: Sequence[Segment],
        trainer: TrainerMeter,
        plan: Planning,
    ) -> None:
        self._engine_lock, self._segments = engine_lock, segments
        self._trainer, self._plan = trainer, plan
        self.probe = GilProbe()
        self._probed_s = -PROBE_AGAIN_S
        # The workers when the GIL was last probed.
        self._workers: tuple[tuple[str, int], ...] = ()
        self._trained = TrainerObservation()

    def read(self) -> Observation:
        """Return the window since the run began."""
        # These are files, and must not be read under the lock.
        looks = [segment.run_queue.look() for segment in self._segments]
        pools = [segment.pool.statistics() for segment in self._segments]
        meter, trainer = self._trainer, self._trainer.read()
        with self._engine_lock.lock:
            now_ns = self._engine_lock.clock()
            window_s = meter.window_s(now_ns, trainer)
            readings = [
                segment.connector.read(now_ns, window_s) for segment in self._segments
            ]
            reservations = self._engine_lock.core.reservations
            held_bytes, batch_bytes = reservations.held_bytes, reservations.batch_bytes
            begun_next = self._engine_lock.core.next_step
        self._look_at_gil(now_ns / 1e9, trainer)
        segments: list[SegmentObservation] = []
        for segment, look, pool, work in zip(
            self._segments, looks, pools, readings, strict=True
        ):
            feeding = segments[-1].output if segments else None
            segments.append(_segment(segment, feeding, look, pool, *work))
        return Observation(
            time_s=now_ns / 1e9,
            window_s=window_s,
            epoch=meter.epoch,
            step=meter.step,
            trainer=trainer,
            segments=tuple(segments),
            held_bytes=held_bytes,
            peak_bytes=reservations.peak_bytes,
            regime=self._plan.regime(begun_next),
            gil_held=self.probe.held_share,
            process_cpu_s=meter.process_cpu_s,
            torch_threads=torch.get_num_threads(),
            batch_bytes=batch_bytes,
        )

    def _look_at_gil(self, now_s: float, trainer: TrainerObservation) -> None:
        """Start the probe from time to time, if threads may be short of the GIL."""
        workers = tuple((s.executor, s.num_parallel_workers) for s in self._segments)
        if workers != self._workers:
            self._workers, self._probed_s = workers, -PROBE_AGAIN_S
        threads = any(executor == "thread" for executor, _ in workers)
        if now_s - self._probed_s < PROBE_AGAIN_S or not threads:
            return
        since, self._trained = trainer - self._trained, trainer
        waits = since.wait_s >= MIN_WAIT * (since.wait_s + since.gap_s)
        if waits and self.probe.burst():
            self._probed_s = now_s


def _segment(
    segment: Segment,
    feeding: ConnectorObservation | None,
    look: Times,
    pool: PoolStatistics,
    work: WorkerReading,
    output: ConnectorObservation,
    costs: tuple[PartReading, ...],
) -> SegmentObservation:
    """Return what one segment has done since the run began."""
    recipe = segment.recipe
    return SegmentObservation(
        name=recipe.name,
        queue_name=recipe.queue_name,
        executor=segment.executor,
        num_parallel_workers=segment.num_parallel_workers,
        prefetch_size=segment.prefetch_size,
        **asdict(work),
        input=feeding,
        output=output,
        moves=tuple(segment.moves),
        moving=segment.moving,
        run_queue_s=(look.waited_ns + segment.connector.own_queue.total_ns) / 1e9,
        threads_cpu_s=look.on_core_ns / 1e9,
        looked=look.looked,
        lined=look.lined,
        parts=parts_of(recipe.stages, costs, recipe.storable),
        max_workers=min(recipe.bounds[1], pool.most),
        iterable=recipe.iterable,
        alive=pool.alive,
        beginning=pool.beginning,
        children=pool.children,
        alone_s_per_row=recipe.alone_s_per_row,
        stays=segment.stays,
        held="" if recipe.tunable else Restriction.PINNED,
    )


def unmeasured(recipe: Recipe) -> Observation:
    """Return the window of a pipeline that has not run yet: nothing happened."""
    return Observation(
        time_s=0.0,
        window_s=0.0,
        epoch=0,
        step=0,
        trainer=TrainerObservation(),
        segments=tuple(
            SegmentObservation(
                name=segment.name,
                queue_name=segment.queue_name,
                executor=segment.executor,
                num_parallel_workers=segment.num_parallel_workers,
                prefetch_size=segment.prefetch_size,
            )
            for segment in recipe.segments
        ),
    )


class GilProbe:
    """Samples the GIL in bursts, each in a short-lived thread of its own.

        with closing(GilProbe()) as probe:
            probe.burst()      # returns at once
            probe.held_share   # of the last burst, once it is over

    `burst` belongs to one thread at a time; any thread may call `close`.
    """

    def __init__(self) -> None:
        # Share of moments, 0 to 1, at which others held the GIL in the last complete
        # burst; None before that. Written by the burst's thread.
        self.held_share: float | None = None
        self._closed = threading.Event()
        # Held while the probe's thread may sleep; `close` releases it.
        self._bed = threading.Lock()
        self._bed.acquire()
        self._thread: threading.Thread | None = None
        # Held to start it, and to close: a thread that has not started has no end.
        self._starting = threading.Lock()

    def burst(self) -> bool:
        """Start a burst, unless one is in progress; return whether it was started."""
        with self._starting:
            if self._closed.is_set() or (self._thread and self._thread.is_alive()):
                return False
            self._thread = threading.Thread(
                target=self._look, name="penstock gil probe", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                self._thread.start()
                return True
        return False

    def close(self) -> None:
        """Stop a burst in progress, and wait for it. Idempotent."""
        with self._starting:
            if not self._closed.is_set():
                self._closed.set()
                self._bed.release()
            thread = self._thread
        join_all(filter(None, [thread]), inf)

    def _look(self) -> None:
        held_count = 0
        with run_queue_clock() as waited_ns:
            for _ in range(BURST):
                queued_ns, begun_ns = waited_ns(), time.perf_counter_ns()
                # Acquiring a lock with a timeout is a sleep that `close` can end.
                if self._bed.acquire(timeout=SLEEP_S):
                    self._bed.release()
                    return
                late_ns = time.perf_counter_ns() - begun_ns - int(SLEEP_S * 1e9)
                late_ns -= waited_ns() - queued_ns
                held_count += late_ns > LATE_NS
        self.held_share = held_count / BURST


@contextlib.contextmanager
def run_queue_clock() -> Iterator[Callable[[], int]]:
    """Yield a clock of the nanoseconds that this thread has waited for a CPU.

    It stands still if the system does not report them. Reading it keeps the GIL, as
    getting that back is what is measured: `PyDLL` calls C in this way.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield lambda: 0
        return
    pread = ctypes.PyDLL(None).pread
    pread.restype = ctypes.c_ssize_t
    pread.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]
    text = ctypes.create_string_buffer(64)

    def waited_ns() -> int:
        # "<ns on a CPU> <ns waiting for one> <turns>": proc(5), schedstats
        length: int = pread(file, text, len(text) - 1, 0)
        return int(text.raw[:length].split()[1])

    try:
        yield waited_ns
    finally:
        os.close(file)
