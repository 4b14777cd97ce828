"""The monitor: reads the counters of one engine, and triggers the GIL probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from ..system.run_queue import Times
from .core.connector import EngineLock
from .core.metrics import ConnectorObservation, PartReading, WorkerReading
from .observe.gil import GilProbe
from .observe.observation import (
    MIN_WAIT,
    Observation,
    Restriction,
    SegmentObservation,
    TrainerObservation,
    parts_of,
)
from .plan import Planning
from .recipe import Recipe
from .segment import Segment
from .trainer_cost import TrainerMeter
from .workers import PoolStatistics

# How long a result of the GIL probe stays valid.
PROBE_AGAIN_S = 60.0


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
            read = [each.connector.read(now_ns, window_s) for each in self._segments]
            reservations = self._engine_lock.core.reservations
            held_bytes, batch_bytes = reservations.held_bytes, reservations.batch_bytes
            begun_next = self._engine_lock.core.next_step
        self._look_at_gil(now_ns / 1e9, trainer)
        segments: list[SegmentObservation] = []
        for segment, look, pool, work in zip(
            self._segments, looks, pools, read, strict=True
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
