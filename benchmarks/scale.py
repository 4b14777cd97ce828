"""Is what the model of many nodes says of 2, 4 and 8 ranks what they do?

    python benchmarks/scale.py --check
    python benchmarks/scale.py --svg docs/pictures/scale.svg

`--check` measures one rank: what its steps take, what a sample costs, and how many
bytes a second a rate-limited web server on this machine gives it. From these alone
follows what 2, 4 and 8 ranks would do, in a first epoch and in one whose samples are
cached. Then it runs them: real processes in step by gloo, each with a real pipeline
that reads its shard of photographs over HTTP, decodes and crops them. The trainers
sleep, so that the store binds, and not the CPU of this machine.

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
from scale_chart import draw, simulated, table

import penstock as ps
from penstock.autotune.simulator.scale import Cluster, Tier, simulate
from penstock.pipeline.testing import draw_photos
from penstock.system.resources import effective_cpus

RANKS = (1, 2, 4, 8)
AIM = 0.10
"""By which what was measured may differ from what was predicted."""
PHOTOS = 16
SIZE = (200, 150)
"""Of the photographs: small, that two cores are enough for eight ranks."""
PIXELS = 64
BATCH = 8
FILES_PER_S = 160.0
"""That the store gives: 20 batches a second for all ranks."""
STEP_S = 0.15
"""The trainer's own part of a step, on the average: three ranks use the store up."""
SPREAD = 0.2
"""By which one step is longer or shorter than that, at most: all are equally likely."""
READERS = 8
WARMING = 8
"""Steps of an epoch until its first stock is used up; they are not counted."""
STEPS = 48
"""Of an epoch that is counted."""
PATIENCE = timedelta(seconds=60)
RAM = 256 << 20
"""For all files of the largest run."""


@dataclass(frozen=True)
class Run:
    """What each rank is to do."""

    url: str
    folder: str
    ranks: int
    steps: int
    step_s: float

    @property
    def files(self) -> list[str]:
        """One for each sample of an epoch: 8 ranks' worth never has the same name."""
        count = self.ranks * BATCH * (WARMING + self.steps)
        return [f"{self.url}/{number}" for number in range(count)]


@dataclass(frozen=True)
class Epoch:
    """What one rank saw of one epoch."""

    ends_s: list[float]
    """When each step ended, for all."""
    own_s: list[float]
    """The trainer's own part of each."""
    cpu_s: float

    def rows_per_s(self, ranks: int) -> float:
        """Samples a second of all ranks, once the stock of the beginning is used up."""
        counted = self.ends_s[WARMING - 1 :]
        return ranks * BATCH * (len(counted) - 1) / (counted[-1] - counted[0])


# In the process of one rank


def be(rank: int, run: Run) -> None:
    """Train two epochs, and write down what was seen."""
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
    found = []
    for _ in range(2):
        dist.barrier()
        found.append(train(pipe, run.step_s, dice).__dict__)
    pipe.close()
    (Path(run.folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(pipe: Any, step_s: float, dice: random.Random) -> Epoch:
    """Sleep in each step, then meet the other ranks, as gradients do."""
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
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# In the process that asks


def measured(url: str, ranks: int, steps: int, step_s: float) -> list[Epoch]:
    """Run so many ranks; return what the first saw of a cold and of a warm epoch.

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
    return [Epoch(**each) for each in json.loads(text)]


@dataclass(frozen=True)
class Point:
    """So many ranks: samples a second of all of them together."""

    ranks: int
    epoch: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.measured - 1.0

    def __str__(self) -> str:
        return (
            f"{self.ranks:>5}  {self.epoch:<5}  {self.predicted:>9.1f}"
            f"  {self.measured:>8.1f}  {100 * self.error:+5.1f} %"
        )


def calibrated(url: str, row_bytes: float, steps: int) -> Cluster:
    """Measure one rank: with a trainer that takes no time, and with one that does."""
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
    """Return what one of so many ranks is like that share the cores of this machine."""
    share = effective_cpus() / ranks
    return replace(one, node_rows_per_s=share * one.node_rows_per_s)


def check(steps: int) -> list[Point]:
    """Predict from one rank, then measure."""
    with tempfile.TemporaryDirectory(prefix="penstock-photos-") as folder:
        draw_photos(folder, PHOTOS, size=SIZE)
        photos = [path.read_bytes() for path in sorted(Path(folder).rglob("*.jpg"))]
    row_bytes = statistics.fmean(map(len, photos))
    found = []
    with served(photos, FILES_PER_S * row_bytes) as url:
        one = calibrated(url, row_bytes, steps)
        print(
            f"one rank: the store gives {one.store_bytes_per_s / row_bytes:.1f} samples"
            f" a second, a core makes {one.node_rows_per_s:.0f}, the trainer's part of"
            f" a step takes {1000 * one.mean_s:.0f} ms",
            file=sys.stderr,
        )
        for ranks in RANKS:
            epochs = measured(url, ranks, steps, STEP_S)
            for epoch, name in zip(epochs, ("cold", "warm"), strict=True):
                node = on_this_host(one, ranks)
                said = simulate(node, ranks, warm=name == "warm").rows_per_s
                found.append(Point(ranks, name, said, epoch.rows_per_s(ranks)))
                print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Check the model, or draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="measure 2, 4, 8 ranks")
    parser.add_argument("--steps", type=int, default=STEPS, help="that are counted")
    parser.add_argument("--json", action="store_true", help="for another program")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    if options.svg:
        values = simulated()
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
