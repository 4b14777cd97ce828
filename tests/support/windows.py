"""Hand-made observations: a pipeline of two segments, with every number at hand."""

from __future__ import annotations

from dataclasses import replace

from penstock.autotune.policies.policy import KnobKey, KnobView, Situation
from penstock.engine.observe.observation import (
    ConnectorObservation,
    Observation,
    SegmentObservation,
    TrainerObservation,
)
from penstock.system.resources import Budget

READ, DECODE = "Folder(ID:0)", "Map(ID:1) decode"
BATCH = 64
ROOMY = Budget(100.0, 1 << 40)
"""A budget that binds nothing."""


def connector(share: float, *, prefetch: int = 2) -> ConnectorObservation:
    """A connector that is full to this share, all the time."""
    capacity = prefetch * BATCH
    return ConnectorObservation(
        occupancy=share * capacity,
        capacity=capacity,
        empty=1.0 if share == 0 else 0.0,
        full=1.0 if share == 1 else 0.0,
        row_bytes=1000,
    )


def segment(
    name: str,
    *,
    workers: int,
    busy: float,
    cpu: float,
    rows: int,
    feeding: ConnectorObservation | None,
    output: ConnectorObservation,
) -> SegmentObservation:
    """A segment seen for a second; `busy` and `cpu` are shares of its workers' time."""
    return SegmentObservation(
        name=name,
        queue_name=name,
        executor="thread",
        num_parallel_workers=workers,
        prefetch_size=2,
        rows=rows,
        worker_s=workers,
        run_s=busy * workers,
        cpu_s=cpu * workers,
        wait_input_s=(1 - busy) * workers if feeding is not None else 0.0,
        wait_credit_s=(1 - busy) * workers if feeding is None else 0.0,
        input=feeding,
        output=output,
    )


def starved(*, time_s: float = 1.0) -> Observation:
    """One reader that blocks 15 ms a row starves a trainer of 640 rows a second."""
    between = connector(0.0)
    return Observation(
        time_s=time_s,
        window_s=1.0,
        epoch=0,
        step=10,
        trainer=TrainerObservation(steps=1, rows=64, wait_s=0.9, gap_s=0.1),
        segments=(
            segment(
                READ,
                workers=1,
                busy=1.0,
                cpu=0.02,
                rows=64,
                feeding=None,
                output=between,
            ),
            segment(
                DECODE,
                workers=1,
                busy=0.04,
                cpu=0.04,
                rows=64,
                feeding=between,
                output=connector(0.0),
            ),
        ),
        held_bytes=1_000_000,
        peak_bytes=1_000_000,
        batch_bytes=BATCH * 1000,
    )


def computing() -> Observation:
    """One decoder that computes 2 ms a row starves a trainer of 5,000 rows a second."""
    full = connector(1.0)
    return Observation(
        time_s=1.0,
        window_s=1.0,
        epoch=0,
        step=10,
        trainer=TrainerObservation(steps=8, rows=512, wait_s=0.9, gap_s=0.1),
        segments=(
            segment(
                READ, workers=1, busy=0.1, cpu=0.02, rows=500, feeding=None, output=full
            ),
            segment(
                DECODE,
                workers=1,
                busy=1.0,
                cpu=0.98,
                rows=500,
                feeding=full,
                output=connector(0.0),
            ),
        ),
        held_bytes=1_000_000,
        peak_bytes=1_000_000,
    )


def at_ease(*, workers: int = 8, time_s: float = 1.0) -> Observation:
    """A trainer that never waits, and `workers` a segment of which one is busy."""
    full = connector(1.0)
    return Observation(
        time_s=time_s,
        window_s=1.0,
        epoch=0,
        step=10,
        trainer=TrainerObservation(steps=5, rows=320, wait_s=0.001, gap_s=0.999),
        segments=(
            segment(
                READ,
                workers=workers,
                busy=0.7 / workers,
                cpu=0.02,
                rows=320,
                feeding=None,
                output=full,
            ),
            segment(
                DECODE,
                workers=workers,
                busy=0.7 / workers,
                cpu=0.02,
                rows=320,
                feeding=full,
                output=full,
            ),
        ),
        held_bytes=1_000_000,
        peak_bytes=1_000_000,
    )


def situation(
    observation: Observation,
    *,
    upper: int = 32,
    tunable: bool = True,
    prefetch_upper: int = 128,
    cores: float = 16.0,
    memory_bytes: int = 10**9,
) -> Situation:
    """The observation with knobs that stand as it says."""
    knobs: dict[KnobKey, KnobView] = {}
    for part in observation.segments:
        workers = KnobView(part.num_parallel_workers, 1, upper, tunable)
        knobs[part.name, "num_parallel_workers"] = workers
        prefetch = KnobView(part.prefetch_size, 1, prefetch_upper, tunable)
        knobs[part.queue_name, "prefetch_size"] = prefetch
    return Situation(observation, knobs, Budget(cores, memory_bytes))


def with_output(observation: Observation, share: float) -> Observation:
    """The observation with the connector behind its last segment this full."""
    last = replace(observation.segments[-1], output=connector(share))
    return replace(observation, segments=(*observation.segments[:-1], last))


def eased_situation() -> Situation:
    """A trainer that finds its batches ready."""
    return situation(at_ease())


def rate(rows: int) -> Observation:
    """A starving window in which each segment finished so many rows."""
    observation = starved()
    segments = tuple(replace(segment, rows=rows) for segment in observation.segments)
    return replace(observation, segments=segments)
