"""Does the model of many nodes predict how fast 2, 4 and 8 ranks are?

    python benchmarks/scale.py --check
    python benchmarks/scale.py --svg docs/pictures/scale.svg

`--check` measures one rank: the time of its steps, the cost of a sample, and the bytes
per second that it gets from a local web server with limited bandwidth. From these
figures alone, the model predicts the speed of 2, 4 and 8 ranks, in a first epoch and in
one whose samples are cached. Then the script runs them: real processes that gloo keeps
in step, each with a real pipeline that reads its shard of photographs over HTTP,
decodes and crops them. The trainers sleep, so that the store is the limit and not the
CPU of this machine.

`--svg` draws the curves of `docs/scale.md`, and prints them as a table.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from limited_store import served
from scale_chart import draw, predicted, table

import penstock as ps
from penstock.autotune.planner import Cluster, Tier
from penstock.pipeline.testing import draw_photos
from penstock.system.resources import effective_cpus

RANKS = (1, 2, 4, 8)
AIM = 0.10
"""Largest difference between measurement and prediction, relative."""
PHOTOS = 16
SIZE = (200, 150)
"""Size of the photographs, small enough for two cores to serve eight ranks."""
PIXELS = 64
BATCH = 8
FILES_PER_S = 160.0
"""Bandwidth of the store: 20 batches per second for all ranks."""
STEP_S = 0.15
"""The trainer's own part of a step, on average. Three ranks then saturate the store."""
SPREAD = 0.2
"""Largest deviation of a step from that, in either direction; uniformly distributed."""
READERS = 8
WARMING = 8
"""First steps of an epoch, whose batches were prefetched; they do not count."""
STEPS = 48
"""Steps of an epoch that count."""
PATIENCE = timedelta(seconds=60)
RAM = 256 << 20
"""Cache for all files of the largest run."""


@dataclass(frozen=True)
class Run:
    """The work of each rank."""

    url: str
    folder: str
    ranks: int
    steps: int
    step_s: float

    @property
    def files(self) -> list[str]:
        """One URL per sample of an epoch; even 8 ranks never use the same one twice."""
        count = self.ranks * BATCH * (WARMING + self.steps)
        return [f"{self.url}/{number}" for number in range(count)]


@dataclass(frozen=True)
class Epoch:
    """One epoch, as one rank saw it."""

    ends_s: list[float]
    """When each step ended for all ranks."""
    own_s: list[float]
    """The trainer's own part of each step."""
    cpu_s: float

    def rows_per_s(self, ranks: int) -> float:
        """Samples per second of all ranks, once prefetched batches are used up."""
        counted_s = self.ends_s[WARMING - 1 :]
        return ranks * BATCH * (len(counted_s) - 1) / (counted_s[-1] - counted_s[0])


# In the process of one rank


def be(rank: int, run: Run) -> None:
    """Train two epochs, and write the results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{run.folder}/meeting-point",
        rank=rank,
        world_size=run.ranks,
        timeout=PATIENCE,
    )
    pipe = (
        ps.Pipeline.from_files(run.files, num_parallel_workers=READERS, hedge=False)
        .cache(ram=RAM)
        .shuffle(seed=0)
        .map(ps.image.decode_random_resized_crop(PIXELS), num_parallel_workers=1)
        .batch(BATCH)
    )
    dice = random.Random(rank)
    epochs = []
    for _ in range(2):
        dist.barrier()
        epochs.append(train(pipe, run.step_s, dice).__dict__)
    pipe.close()
    (Path(run.folder) / f"{rank}.json").write_text(json.dumps(epochs))
    dist.barrier()
    dist.destroy_process_group()


def train(pipe: Any, step_s: float, dice: random.Random) -> Epoch:
    """Sleep in each step, then wait for the other ranks, as for gradients."""
    gradient = torch.zeros(1)
    ends_s, own_s, cpu_s = [], [], cpu_now_s()
    for _ in pipe:
        began_s = time.perf_counter()
        time.sleep(step_s * dice.uniform(1.0 - SPREAD, 1.0 + SPREAD))
        own_s.append(time.perf_counter() - began_s)
        dist.all_reduce(gradient)
        ends_s.append(time.perf_counter())
    return Epoch(ends_s, own_s, cpu_now_s() - cpu_s)


def cpu_now_s() -> float:
    """Return the CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# In the process that asks


def measured(url: str, ranks: int, steps: int, step_s: float) -> list[Epoch]:
    """Run several ranks; return a cold and a warm epoch, as the first rank saw them.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as folder:
        run = Run(url, folder, ranks, steps, step_s)
        start = get_context("fork").Process
        processes = [start(target=be, args=(rank, run)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"one of {ranks} ranks failed")
        text = (Path(folder) / "0.json").read_text()
    return [Epoch(**fields) for fields in json.loads(text)]


@dataclass(frozen=True)
class Point:
    """A number of ranks, and the samples per second of all of them together."""

    ranks: int
    epoch: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The error of the prediction, relative."""
        return self.predicted / self.measured - 1.0

    def __str__(self) -> str:
        return (
            f"{self.ranks:>5}  {self.epoch:<5}  {self.predicted:>9.1f}"
            f"  {self.measured:>8.1f}  {100 * self.error:+5.1f} %"
        )


def calibrated(url: str, row_bytes: float, steps: int) -> Cluster:
    """Measure one rank, with a trainer that takes no time and with one that sleeps."""
    fast = measured(url, 1, 4 * steps, 0.0)[0]
    slow = measured(url, 1, 2 * steps, STEP_S)[0]
    rows = len(fast.ends_s) * BATCH
    return Cluster(
        steps_s=tuple(slow.own_s),
        batch_rows=BATCH,
        row_bytes=row_bytes,
        node_rows_per_s=rows / fast.cpu_s,
        store_bytes_per_s=fast.rows_per_s(1) * row_bytes,
        data_bytes=row_bytes,
        tiers=(Tier(row_bytes),),
    )


def on_this_host(one: Cluster, ranks: int) -> Cluster:
    """Return one of a number of ranks that share the cores of this machine."""
    share = effective_cpus() / ranks
    return replace(one, node_rows_per_s=share * one.node_rows_per_s)


def check(steps: int) -> list[Point]:
    """Predict from one rank, then measure several."""
    with tempfile.TemporaryDirectory(prefix="penstock-photos-") as folder:
        draw_photos(folder, PHOTOS, size=SIZE)
        photos = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))]
    row_bytes = statistics.fmean(map(len, photos))
    points = []
    with served(photos, FILES_PER_S * row_bytes) as url:
        one = calibrated(url, row_bytes, steps)
        print(
            f"one rank: the store gives {one.store_bytes_per_s / row_bytes:.1f} samples"
            f" a second, a core makes {one.node_rows_per_s:.0f}, the trainer's part of"
            f" a step takes {1000 * statistics.fmean(one.steps_s):.0f} ms",
            file=sys.stderr,
        )
        for ranks in RANKS:
            epochs = measured(url, ranks, steps, STEP_S)
            for epoch, name in zip(epochs, ("cold", "warm"), strict=True):
                node = on_this_host(one, ranks)
                prediction = node.speed(ranks, warm=name == "warm").rows_per_s
                points.append(Point(ranks, name, prediction, epoch.rows_per_s(ranks)))
                print(points[-1], file=sys.stderr, flush=True)
    return points


def main() -> None:
    """Check the model, or draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="measure 2, 4, 8 ranks")
    parser.add_argument("--steps", type=int, default=STEPS, help="that are counted")
    parser.add_argument("--json", action="store_true", help="for another program")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    if options.svg:
        values = predicted()
        options.svg.write_text(draw(values))
        print(table(values))
    if options.check:
        points = check(options.steps)
        if options.json:
            print(json.dumps([asdict(point) for point in points]))
        else:
            print("ranks  epoch  predicted  measured  error of the prediction")
            print(*points, sep="\n")
        sys.exit(any(abs(p.error) > AIM for p in points))


if __name__ == "__main__":
    main()
