"""The monitor: reads the counters of one engine, and triggers the GIL probe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from .core.connector import EngineLock
from .core.metrics import PartReading, SegmentCounters
from .observe.gil import GilProbe
from .observe.observation import (
    ConnectorObservation,
    Observation,
    SegmentObservation,
    TrainerObservation,
    parts_of,
)
from .observe.trainer_meter import TrainerMeter
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

    def read(self) -> Observation:
        """Return the window since the run began."""
        # These are files, and must not be read under the lock.
        queued = [
            segment.run_queue.look() + segment.connector.own_queue.seconds
            for segment in self._segments
        ]
        pools = [segment.pool.statistics() for segment in self._segments]
        with self._engine_lock.lock:
            now_ns = self._engine_lock.clock()
            read = [segment.connector.read(now_ns) for segment in self._segments]
            reservations = self._engine_lock.core.reservations
            held_bytes, batch_bytes = reservations.held_bytes, reservations.batch_bytes
            begun_next = self._engine_lock.core.next_step
        trainer = self._trainer
        seen = trainer.read()
        self._look_at_gil(now_ns / 1e9, seen)
        window_s = trainer.window_s(now_ns, seen)
        segments: list[SegmentObservation] = []
        for segment, queued_s, pool, counters in zip(
            self._segments, queued, pools, read, strict=True
        ):
            feeding = segments[-1].output if segments else None
            told = _segment(segment, queued_s, pool, window_s, counters)
            segments.append(replace(told, input=feeding))
        return Observation(
            time_s=now_ns / 1e9,
            window_s=window_s,
            epoch=trainer.epoch,
            step=trainer.step,
            trainer=seen,
            segments=tuple(segments),
            held_bytes=held_bytes,
            peak_bytes=reservations.peak_bytes,
            regime=self._plan.regime(begun_next),
            gil_held=self._probe.last_share,
            process_cpu_s=time.process_time(),
            torch_threads=torch.get_num_threads(),
            batch_bytes=batch_bytes,
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
    segment: Segment,
    queued_s: float,
    pool: PoolStatistics,
    window_s: float,
    counters: SegmentCounters,
) -> SegmentObservation:
    """Return what one segment has done since the run began, but for its input."""
    recipe, work = segment.recipe, counters.work
    costs = counters.parts
    if len(recipe.stages) == 1:
        costs = (PartReading(work.rows, work.run_s, work.cpu_s, work.nbytes),)
    return SegmentObservation(
        name=recipe.name,
        queue_name=recipe.queue_name,
        executor=segment.executor,
        num_parallel_workers=segment.num_parallel_workers,
        prefetch_size=segment.prefetch_size,
        rows=work.rows,
        worker_s=work.alive_s,
        run_s=work.run_s,
        cpu_s=work.cpu_s,
        wait_input_s=work.wait_input_s,
        wait_credit_s=work.wait_credit_s,
        output=ConnectorObservation.of(counters.gauge, window_s, counters.row_bytes),
        moves=tuple(segment.moves),
        moving=segment.moving,
        run_queue_s=queued_s,
        parts=parts_of(recipe.stages, costs, recipe.storable),
        wait_memory_s=work.wait_memory_s,
        max_workers=min(recipe.bounds[1], pool.most),
        iterable=recipe.iterable,
        alive=pool.alive,
        beginning=pool.beginning,
    )


def unmeasured(recipe: Recipe) -> Observation:
    """Return the window of a pipeline that has not run yet: nothing happened."""
    segments = tuple(
        SegmentObservation(
            segment.name,
            segment.queue_name,
            segment.executor,
            segment.num_parallel_workers,
            segment.prefetch_size,
        )
        for segment in recipe.segments
    )
    return Observation(0.0, 0.0, 0, 0, TrainerObservation(), segments)
