"""How a measured pipeline would run on other machines: `penstock plan`.

The last window of a run's log shows how long a sample takes in each stage, on a core
and waiting. That bounds the speed on other cores, and says which workers reach it.

Many such machines may train one model in step, each from its own cache tiers and from a
store whose bandwidth all share. A step ends for all nodes when the slowest one has done
its part. It takes as long as the tightest of a few limits, each in closed form. Time to
exchange gradients is left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from operator import itemgetter
from statistics import NormalDist, fmean

from ..engine.observe.observation import SegmentObservation
from ..errors import check
from ..system.printing import figures
from .explain import verdict_of
from .policies.policy import Situation
from .report.recording import read_recording
from .window import own_s

# Workers that a stage may have, unless it reads an iterable.
MAX_WORKERS = 1024
# Speed at which a node reads the cache on its own disk.
DISK_BYTES_PER_S = 1e9
# Number of quantiles that stand for a normal distribution: enough for its tail to
# include the slowest of a thousand nodes.
QUANTILES = 4096

SLOWEST, LOADING, DISK, STORE = (
    "the slowest trainer of a step",
    "a node's own loading",
    "a node's disk",
    "the store's bandwidth",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A whole pipeline and its trainer, as measured."""

    stages: tuple[SegmentObservation, ...]
    gap_s: float
    """The trainer's own part of a step."""
    batch_rows: int = 32
    source_bytes: float = 0.0
    """Bytes of a sample as it is read; 0: unknown."""

    @property
    def cpu_s(self) -> float:
        """Seconds of a core that a row takes in all stages."""
        return sum(stage.cpu_s_per_row for stage in self.stages)

    @property
    def wanted_rows_per_s(self) -> float:
        """Rows per second of a trainer that never waits."""
        return self.batch_rows / self.gap_s if self.gap_s else inf

    def limit(self, cores: float) -> tuple[float, SegmentObservation | None]:
        """Return the rows per second that loading can reach, and the stage that binds.

        All cores are busy then, or all workers of a stage that may have no more
        (operational analysis: P. Denning and J. Buzen, 1978). The stage is None if it
        is the cores.
        """
        bounds: list[tuple[float, SegmentObservation | None]] = [
            ((1 if stage.iterable else MAX_WORKERS) / stage.run_s_per_row, stage)
            for stage in self.stages
            if stage.run_s_per_row
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
        costly = max(self.workload.stages, key=lambda stage: stage.cpu_s_per_row)
        return f"CPU: all cores are busy, most of them with {costly.name}"

    def workers(self, stage: SegmentObservation) -> int:
        """Return the workers of a stage that reach this speed, at least one."""
        # A product that should be whole may be a little larger.
        return max(1, ceil(round(self.rows_per_s * stage.run_s_per_row, 9)))

    def __str__(self) -> str:
        rate, share, stages = self.rows_per_s, self.wait_share, self.workload.stages
        width = max(len(stage.name) for stage in stages)
        head = (
            f"on {figures(self.cores)} cores: {rate:,.0f} samples/s, the trainer waits"
            f" {100 * share:.0f}% of each step ({verdict_of(share)})"
        )
        rows = [
            f"  {stage.name:<{width}}  {self.workers(stage):>4} workers,"
            f" {rate * stage.cpu_s_per_row:.2f} cores"
            for stage in stages
        ]
        return "\n".join([head, *rows, f"  what binds: {self.binds}"])


def measured_workloads(
    path: str | os.PathLike[str], name: str | None = None
) -> dict[str, Workload]:
    """Read the measured workload of each pipeline of a tuned run from its log.

    Args:
        path: one rank's `<prefix>_<rank>.jsonl`, or the prefix.
        name: of the pipeline to read about; None means all.

    Returns:
        Name and workload of each pipeline that trained, as its first rank measured it.

    Raises:
        SpecError: the log does not exist, is of another version, has no such pipeline,
            or shows no training.
    """
    workloads: dict[str, Workload] = {}
    for pipeline in read_recording(path, name).pipelines:
        if pipeline.latest is not None and pipeline.name not in workloads:
            observation = Situation.from_row(pipeline.latest).observation
            trainer, parts = observation.trainer, observation.segments[0].parts
            workloads[pipeline.name] = Workload(
                observation.segments,
                own_s(observation),
                batch_rows=max(1, round(trainer.rows / trainer.steps)),
                source_bytes=parts[0].bytes_per_row if parts else 0.0,
            )
    check(
        bool(workloads),
        f"{os.fspath(path)!r} shows no training; train for some seconds with"
        " set_enable_autotune(True, filepath_prefix)",
    )
    return workloads


# Many nodes in step


@dataclass(frozen=True, slots=True)
class Tier:
    """A cache of each node, read before the tiers after it and before the store."""

    nbytes: float
    """Capacity in bytes."""
    bytes_per_s: float = inf
    """Speed at which a node reads it; the time for RAM is not worth counting."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One node as it was measured, and the resources that all nodes share."""

    steps_s: tuple[float, ...]
    """Times of the trainer's own part of a step. Each step of a node draws one."""
    batch_rows: int
    """Samples that a node trains on per step."""
    row_bytes: float
    """Size of a sample in the store, and in the caches."""
    node_rows_per_s: float = inf
    """Samples per second that a node can load if no store limits it. Its CPUs are the
    limit, by the bottleneck law."""
    store_bytes_per_s: float = inf
    """Bandwidth of the store, which all nodes share."""
    data_bytes: float = inf
    """Size of the whole dataset."""
    tiers: tuple[Tier, ...] = ()
    """RAM first, then disk. Empty: each epoch reads from the store."""
    own_parts: bool = True
    """Whether a node reads the same part of the data in each epoch, as with
    `shuffle(parts=...)`. Otherwise a node may get any sample."""

    def step_bounds(self, nodes: int, *, warm: bool = False) -> dict[str, float]:
        """Return the shortest possible step in seconds under each limit, by its name.

        The longest of these is the step if enough is prefetched to even out what varies
        (operational analysis: P. Denning and J. Buzen, 1978).

        Args:
            nodes: number of nodes.
            warm: whether an earlier epoch has filled the caches.
        """
        batch = self.batch_rows * self.row_bytes
        data = self.data_bytes / nodes if self.own_parts else self.data_bytes
        # The share of a batch that no tier before has, and how long the tiers take.
        missed_share, tiers_s = 1.0, 0.0
        for tier in self.tiers if warm else ():
            share = min(missed_share, tier.nbytes / data)
            missed_share -= share
            tiers_s += share * batch / tier.bytes_per_s
        return {
            SLOWEST: expected_slowest_s(self.steps_s, nodes),
            LOADING: self.batch_rows / self.node_rows_per_s,
            DISK: tiers_s,
            STORE: nodes * missed_share * batch / self.store_bytes_per_s,
        }

    def speed(self, nodes: int, *, warm: bool = False) -> ClusterSpeed:
        """Return the speed of a number of nodes.

        Args:
            nodes: number of nodes.
            warm: whether an earlier epoch has filled the caches.
        """
        binds, step_s = max(
            self.step_bounds(nodes, warm=warm).items(), key=itemgetter(1)
        )
        efficiency = min(1.0, fmean(self.steps_s) / step_s)
        return ClusterSpeed(nodes, nodes * self.batch_rows / step_s, efficiency, binds)


@dataclass(frozen=True, slots=True)
class ClusterSpeed:
    """The predicted speed of a number of nodes."""

    nodes: int
    rows_per_s: float
    """Samples per second of all nodes together."""
    efficiency: float
    """Their speed as a share, 0 to 1, of the speed of as many trainers that never wait,
    neither for data nor for each other."""
    binds: str
    """The name of the longest of `Cluster.step_bounds`."""


def normal_steps(mean_s: float, spread: float) -> tuple[float, ...]:
    """Return times of steps that are normally distributed, in seconds.

    Args:
        mean_s: mean time of a step.
        spread: standard deviation, relative to the mean; 0: all steps are equal.
    """
    if spread * mean_s == 0:
        return (mean_s,)
    quantiles = NormalDist(mean_s, spread * mean_s).quantiles(QUANTILES)
    return tuple(max(0.0, quantile) for quantile in quantiles)


def expected_slowest_s(steps_s: Sequence[float], nodes: int) -> float:
    """Return how long the slowest of `nodes` nodes takes on average, in seconds.

    With `m` equally likely values in ascending order, the largest of `n` draws is at
    most the i-th with the probability `(i / m) ** n` (H. A. David, Order Statistics).
    """
    count = len(steps_s)
    below = [(at / count) ** nodes for at in range(count + 1)]
    return sum(
        value * (below[at + 1] - below[at]) for at, value in enumerate(sorted(steps_s))
    )


# A first epoch, and a later one.
Epochs = tuple[ClusterSpeed, ClusterSpeed]


def table_of(cores: float, speeds: Sequence[Epochs]) -> str:
    """Return a table of the speed of several numbers of nodes, with a line for each.

    Args:
        cores: of each node.
        speeds: for each number of nodes.
    """
    lines = [
        (
            f"nodes in step, {figures(cores)} cores each: samples/s of all nodes, and"
            " their share of the rate of trainers that never wait"
        ),
        f"  {'nodes':>6}  {'first epoch':>20}  {'later epochs':>20}  what binds",
    ]
    for first, later in speeds:
        changes = "" if later.binds == first.binds else f"; later {later.binds}"
        columns = "  ".join(
            f"{speed.rows_per_s:>13,.0f}  {speed.efficiency:>5.2f}"
            for speed in (first, later)
        )
        lines.append(f"  {first.nodes:>6,}  {columns}  {first.binds}{changes}")
    return "\n".join(lines)


def plan_nodes(
    workload: Workload,
    cores: float,
    counts: Sequence[int],
    *,
    store_bytes_per_s: float = inf,
    data_bytes: float = inf,
    ram_bytes: float = 0.0,
    disk_bytes: float = 0.0,
    spread: float = 0.02,
) -> list[Epochs]:
    """Predict the speed of several nodes in step, each like the measured one.

    Args:
        workload: of the measured one.
        cores: of each node.
        counts: numbers of nodes.
        store_bytes_per_s: bandwidth of the store, which all nodes share.
        data_bytes: size of the whole dataset as it is read.
        ram_bytes: size of a node's cache in RAM.
        disk_bytes: size of a node's cache on its own disk.
        spread: standard deviation of a trainer's steps, relative to their mean.

    Raises:
        SpecError: a limit depends on the bytes of a sample, which the log does not
            have; or there are caches, and the size of the dataset is not given.
    """
    check(
        data_bytes < inf or not ram_bytes + disk_bytes,
        "a cache's hit rate depends on the size of the dataset, which is not given;"
        " pass it, for example --data-size 140GB",
    )
    check(
        workload.source_bytes > 0 or (store_bytes_per_s == inf == data_bytes),
        "the log does not say how large a sample is when it is read, so a store's"
        " bandwidth or the size of the dataset cannot be used; leave these options out,"
        " or record the run again",
    )
    one = Cluster(
        normal_steps(workload.gap_s, spread),
        batch_rows=workload.batch_rows,
        row_bytes=workload.source_bytes or 1.0,
        node_rows_per_s=workload.limit(cores)[0],
        store_bytes_per_s=store_bytes_per_s,
        data_bytes=data_bytes,
        tiers=(Tier(ram_bytes), Tier(disk_bytes, DISK_BYTES_PER_S)),
    )
    return [(one.speed(nodes), one.speed(nodes, warm=True)) for nodes in counts]
