"""The monitor: reads the counters of one engine, and triggers the GIL probe."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .core.connector import EngineLock
from .core.metrics import GaugeReading, WorkerReading
from .observe.gil import GilProbe
from .observe.observation import Observation, TrainerObservation
from .observe.reading import Reading, SegmentReading, TrainerMeter, difference
from .plan import Planning
from .recipe import Recipe
from .segment import Segment
from .workers.pool import PoolStatistics

PROBE_AGAIN_S = 60.0
"""How long a result of the GIL probe stays valid."""
MIN_WAIT = 0.05
"""Share of its time that the trainer must wait for the GIL to be worth probing."""


class Monitor:
    """Reads one engine."""

    def __init__(
        self,
        engine_lock: EngineLock,
        segments: Sequence[Segment],
        trainer: TrainerMeter,
        probe: GilProbe,
        plan: Planning,
    ) -> None:
        self._engine_lock = engine_lock
        self._plan = plan
        self._segments = segments
        self._trainer = trainer
        self._probe = probe
        self._probed_s = -PROBE_AGAIN_S
        # The workers when the GIL was last probed.
        self._workers: tuple[tuple[str, int], ...] = ()
        self._waited = (0.0, 0.0)

    def read(self) -> Reading:
        """Return all totals as of now."""
        # These are files, and must not be read under the lock.
        queued = [
            segment.run_queue.look() + segment.connector.own_queue.seconds
            for segment in self._segments
        ]
        pools = [segment.pool for segment in self._segments]
        with self._engine_lock.lock:
            now_ns = self._engine_lock.clock()
            found = zip(self._segments, queued, pools, strict=True)
            rows = tuple(self._segment(s, now_ns, q, p) for s, q, p in found)
            reservations = self._engine_lock.reservations.statistics()
            begun_next = self._engine_lock.next_step
        trainer = self._trainer
        self._look_at_gil(now_ns / 1e9, trainer.read())
        return Reading(
            now_ns / 1e9,
            trainer.epoch,
            trainer.step,
            trainer.read(),
            rows,
            reservations.held_bytes,
            reservations.peak_bytes,
            self._plan.regime(begun_next),
            self._probe.last_share,
            time.process_time(),
            batch_bytes=reservations.batch_bytes,
        )

    def _look_at_gil(self, now_s: float, trainer: TrainerObservation) -> None:
        """Start the probe from time to time, if threads may be short of the GIL.

        Results from other workers are forgotten.
        """
        workers = tuple((s.executor, s.num_parallel_workers) for s in self._segments)
        if workers != self._workers:
            self._workers, self._probed_s = workers, -PROBE_AGAIN_S
            self._probe.clear()
        known = self._probe.held_share is not None
        if (known and now_s - self._probed_s < PROBE_AGAIN_S) or all(
            executor != "thread" for executor, _ in workers
        ):
            return
        (wait_s, gap_s), self._waited = self._waited, (trainer.wait_s, trainer.gap_s)
        waited_s, spent_s = trainer.wait_s - wait_s, trainer.gap_s - gap_s
        if waited_s >= MIN_WAIT * (waited_s + spent_s):
            self._probed_s = now_s
            self._probe.burst()

    def _segment(
        self, segment: Segment, now_ns: int, queued_s: float, pool: PoolStatistics
    ) -> SegmentReading:
        total, gauge, row_bytes = segment.connector.read(now_ns)
        return SegmentReading(
            segment.recipe.name,
            segment.recipe.queue_name,
            segment.executor,
            segment.num_parallel_workers,
            segment.prefetch_size,
            total,
            pool.alive,
            gauge,
            row_bytes,
            tuple(segment.moves),
            segment.moving,
            queued_s,
            segment.connector.parts.read(),
            segment.recipe.stages,
            segment.recipe.storable,
            min(segment.recipe.bounds[1], pool.most),
            segment.recipe.iterable,
            pool.beginning,
        )


def unmeasured(recipe: Recipe) -> Observation:
    """Return the window of a pipeline that has not run yet: nothing happened."""
    nothing = WorkerReading()
    segments = tuple(
        SegmentReading(
            segment.name,
            segment.queue_name,
            segment.executor,
            segment.num_parallel_workers,
            segment.prefetch_size,
            nothing,
            0,
            GaugeReading(0.0, 0.0, 0.0, 0),
            0.0,
        )
        for segment in recipe.segments
    )
    trainer = TrainerObservation(0, 0, 0.0, 0.0)
    reading = Reading(0.0, 0, 0, trainer, segments, 0, 0)
    return difference(reading, reading)
