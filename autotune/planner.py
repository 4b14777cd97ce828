"""How a measured pipeline would run on another machine: `penstock plan`.

The last window of a run's log shows how long a sample takes in each stage, on a core
and waiting. That bounds the speed on other cores, and says which workers reach it. Many
such machines can form nodes in step that share a store: see `scale.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from ..engine.observe.observation import Observation, SegmentObservation
from ..errors import check
from ..system.printing import figures
from .explain import verdict_of
from .report.recording import Row, read_recording
from .scale import Cluster, ScalePoint, Tier, normal_steps, simulate
from .situation import Situation

MAX_WORKERS = 1024
"""Workers that a stage may have, unless it reads an iterable."""


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """One stage; all times are seconds per row."""

    name: str
    cpu_s: float
    wait_s: float
    """Time off the CPU."""
    max_workers: int = MAX_WORKERS

    @property
    def run_s(self) -> float:
        """The time that a row keeps a worker."""
        return self.cpu_s + self.wait_s


@dataclass(frozen=True, slots=True)
class Workload:
    """A whole pipeline and its trainer, as measured."""

    stages: tuple[MeasuredStage, ...]
    gap_s: float
    """The trainer's own part of a step."""
    batch_rows: int = 32
    source_bytes: float = 0.0
    """Bytes of a sample as it is read; 0: unknown."""

    @property
    def cpu_s(self) -> float:
        """Seconds of a core that a row takes in all stages."""
        return sum(stage.cpu_s for stage in self.stages)

    @property
    def wanted_rows_per_s(self) -> float:
        """Rows per second of a trainer that never waits."""
        return self.batch_rows / self.gap_s if self.gap_s else inf

    def limit(self, cores: float) -> tuple[float, MeasuredStage | None]:
        """Return the rows per second that loading can reach, and the stage that binds.

        All cores are busy then, or all workers of a stage that may have no more
        (operational analysis: P. Denning and J. Buzen, 1978). The stage is None if it
        is the cores.
        """
        bounds: list[tuple[float, MeasuredStage | None]] = [
            (stage.max_workers / stage.run_s, stage)
            for stage in self.stages
            if stage.run_s
        ]
        if self.cpu_s:
            bounds.append((cores / self.cpu_s, None))
        return min(bounds, key=lambda bound: bound[0], default=(inf, None))


@dataclass(frozen=True, slots=True)
class Projection:
    """How fast a machine with so many cores would train on a workload."""

    workload: Workload
    cores: float

    @property
    def rows_per_s(self) -> float:
        """Rows per second with the workers that are named."""
        return min(self.workload.limit(self.cores)[0], self.workload.wanted_rows_per_s)

    @property
    def wait_share(self) -> float:
        """Share of its step that the trainer waits, 0 to 1."""
        return 1.0 - self.rows_per_s / self.workload.wanted_rows_per_s

    @property
    def binds(self) -> str:
        """What limits the speed."""
        limit, stage = self.workload.limit(self.cores)
        if limit >= self.workload.wanted_rows_per_s:
            return "the trainer: loading keeps up with it"
        if stage is not None:
            return f"{stage.name}: it may have no more workers"
        costly = max(self.workload.stages, key=lambda stage: stage.cpu_s)
        return f"CPU: all cores are busy, most of them with {costly.name}"

    def workers(self, stage: MeasuredStage) -> int:
        """Return the workers of a stage that reach this speed, at least one."""
        return max(1, ceil(self.rows_per_s * stage.run_s - ROUNDING))

    def __str__(self) -> str:
        rate, share = self.rows_per_s, self.wait_share
        stages = self.workload.stages
        width = max(len(stage.name) for stage in stages)
        head = (
            f"on {figures(self.cores)} cores: {rate:,.0f} samples/s, the trainer waits"
            f" {100 * share:.0f}% of each step ({verdict_of(share)})"
        )
        rows = [
            f"  {stage.name:<{width}}  {self.workers(stage):>4} workers,"
            f" {rate * stage.cpu_s:.2f} cores"
            for stage in stages
        ]
        return "\n".join([head, *rows, f"  what binds: {self.binds}"])


ROUNDING = 1e-9
"""A product that should be whole may be larger by this."""


def measured_workload(
    path: str | os.PathLike[str], name: str | None = None
) -> Workload:
    """Read the measured workload of a tuned run from its log.

    Args:
        path: one rank's `<prefix>_<rank>.jsonl`, or the prefix.
        name: the pipeline's name; None if only one trained.

    Raises:
        SpecError: the log does not exist, is of another version, shows no training, or
            shows several pipelines and `name` does not choose one.
    """
    shown = os.fspath(path)
    seen: dict[str, Observation] = {}
    for each in read_recording(path, name).pipelines:
        if each.latest is not None:
            seen.setdefault(each.name, _observed(each.latest))
    check(
        bool(seen),
        f"{shown!r} shows no training; train for some seconds with"
        " set_enable_autotune(True, filepath_prefix)",
    )
    check(
        len(seen) == 1,
        f"{shown!r} has several pipelines ({', '.join(seen)}); choose one, for example"
        f" with `penstock plan {shown} --name {next(iter(seen), '')}`",
    )
    (observation,) = seen.values()
    return _workload(observation)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The facts about a cluster that a log lacks; by default, nothing is limited."""

    store_bytes_per_s: float = inf
    """Bandwidth of the store, which all nodes share."""
    data_bytes: float = inf
    """Size of the whole dataset as it is read."""
    ram_bytes: float = 0.0
    """Size of a node's cache in RAM."""
    disk_bytes: float = 0.0
    """Size of a node's cache on its own disk."""
    disk_bytes_per_s: float = 1e9
    """Speed at which that disk is read."""
    spread: float = 0.02
    """Standard deviation of a trainer's steps, relative to their mean."""

    @property
    def bounded(self) -> bool:
        """Whether the prediction depends on the bytes of a sample."""
        return self.store_bytes_per_s < inf or self.data_bytes < inf


@dataclass(frozen=True, slots=True)
class ScaleProjection:
    """The predicted speed of several numbers of nodes with a workload."""

    cores: float
    """Cores of each node."""
    epochs: tuple[tuple[ScalePoint, ScalePoint], ...]
    """The first epoch and a later one, for each number of nodes."""

    def __str__(self) -> str:
        head = (
            f"nodes in step, {figures(self.cores)} cores each: samples/s of all nodes,"
            " and their share of the rate of trainers that never wait"
        )
        lines = [
            head,
            f"  {'nodes':>6}  {'first epoch':>20}  {'later epochs':>20}  what binds",
        ]
        for first, later in self.epochs:
            binds = first.binds
            if later.binds != binds:
                binds = f"{binds}; later {later.binds}"
            columns = "  ".join(
                f"{each.rows_per_s:>13,.0f}  {each.efficiency:>5.2f}"
                for each in (first, later)
            )
            lines.append(f"  {first.nodes:>6,}  {columns}  {binds}")
        return "\n".join(lines)


def plan_nodes(
    workload: Workload, cores: float, counts: Sequence[int], around: Surroundings
) -> ScaleProjection:
    """Predict the speed of several nodes in step, each like the measured one.

    Raises:
        SpecError: a limit depends on the bytes of a sample, which the log does not
            have; or there are caches, and the size of the dataset is not given.
    """
    check(
        around.data_bytes < inf or not around.ram_bytes + around.disk_bytes,
        "a cache's hit rate depends on the size of the dataset, which is not given;"
        " pass it, for example --data-size 140GB",
    )
    check(
        workload.source_bytes > 0 or not around.bounded,
        "the log does not say how large a sample is when it is read, so a store's"
        " bandwidth or the size of the dataset cannot be used; leave these options out,"
        " or record the run again",
    )
    one = Cluster(
        normal_steps(workload.gap_s, around.spread),
        batch_rows=workload.batch_rows,
        row_bytes=workload.source_bytes or 1.0,
        node_rows_per_s=workload.limit(cores)[0],
        store_bytes_per_s=around.store_bytes_per_s,
        data_bytes=around.data_bytes,
        tiers=(
            Tier(around.ram_bytes),
            Tier(around.disk_bytes, around.disk_bytes_per_s),
        ),
    )
    epochs = tuple(
        (simulate(one, nodes), simulate(one, nodes, warm=True)) for nodes in counts
    )
    return ScaleProjection(cores, epochs)


def _observed(row: Row) -> Observation:
    return Situation.from_row(row).observation


def _workload(seen: Observation) -> Workload:
    trainer = seen.trainer
    return Workload(
        tuple(map(_stage, seen.segments)),
        trainer.gap_s / trainer.steps,
        batch_rows=max(1, round(trainer.rows / trainer.steps)),
        source_bytes=_source_bytes(seen.segments[0]),
    )


def _source_bytes(segment: SegmentObservation) -> float:
    return segment.parts[0].bytes_per_row if segment.parts else 0.0


def _stage(segment: SegmentObservation) -> MeasuredStage:
    cpu_s = segment.cpu_s_per_row
    most = 1 if segment.iterable else MAX_WORKERS
    return MeasuredStage(
        segment.name, cpu_s, max(0.0, segment.run_s_per_row - cpu_s), most
    )
