"""Do sixteen cores feed the trainer, and does it keep its own speed? Acted out on two.

    python benchmarks/many_cores.py [--workers 14]

A decoder takes one of sixteen cores for 2.5 ms and waits without the GIL, as one in
native code computes, and makes `uint8 [112, 112, 3]` of 100 kB of bytes. The trainer
launches 1,500 tiny operations of torch a step and then sleeps 5 ms, as one does that
drives an accelerator: it takes and releases the GIL all the time. Batches hold 256
samples, and the CPU budget is 16.

Each row trains in a process of its own: pipelines with autotune on, from defaults, and
with workers set by hand; one of files, whose threads in another process read and decode
several of them in a call; and torch's DataLoader. Printed are the rate
beside what so many workers could give, and the trainer's own part of a step, from a
batch's arrival to the next call for one, beside the same with nothing to load, and the
seconds until 95 % of that rate. The verdict follows, and how many times faster a
trainer is that has nothing to load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data as torchs
from numpy.typing import NDArray

import penstock as ps

CORES = 16
BATCH = 256
SAMPLES = 1 << 20
DECODE_S = 0.0025
OPERATIONS = 1500
SLEEP_S = 0.005
SETTLED_S, MEASURED_S = 6.0, 8.0
"""What does not count at first, and what does."""
GLIDE_S = 1.0
"""The rate at a moment is measured over this many seconds after it."""
SHAPE = (112, 112, 3)
LINKS = 4096
"""Files in a class folder."""
FREE = os.eventfd(CORES, os.EFD_SEMAPHORE)
"""Counts the cores that nobody uses; all processes share it."""


class Trained(NamedTuple):
    """What a training loop saw."""

    rate: float
    """Samples a second."""
    own_s: float
    """The trainer's own part of a step: the median."""
    near_s: float
    """Seconds until 95 % of the rate."""
    verdict: str


class Files(torchs.Dataset[tuple[bytes, int]]):
    """100 kB of bytes and a label for each index."""

    def __init__(self) -> None:
        self.content = np.random.default_rng(0).bytes(100_000)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return bytes(bytearray(self.content)), index  # a copy, as a read makes


def decoded(sample: tuple[bytes, int]) -> tuple[NDArray[np.uint8], int]:
    """Wait as long as a decoder computes, and return an image of the bytes."""
    compute(1)
    return image_of(sample)


def compute(samples: int) -> None:
    """Take one of the cores for as long as so many samples take."""
    os.eventfd_read(FREE)
    time.sleep(samples * DECODE_S)
    os.eventfd_write(FREE, 1)


def image_of(sample: tuple[bytes, int]) -> tuple[NDArray[np.uint8], int]:
    """Return an image of the bytes."""
    content, label = sample
    image = np.frombuffer(content, np.uint8, np.prod(SHAPE).item())
    return image.reshape(SHAPE).copy(), label


class Together:
    """Decodes several samples in one call, as a kernel in native code does."""

    def __call__(self, sample: tuple[bytes, int]) -> tuple[NDArray[np.uint8], int]:
        return decoded(sample)

    def __penstock_rows__(
        self, samples: Sequence[tuple[bytes, int]], *_: Any
    ) -> list[tuple[NDArray[np.uint8], int]]:
        compute(len(samples))
        return [image_of(sample) for sample in samples]


class Decoded(Files):
    """The same images as a dataset of one piece, for torch's loader."""

    def __getitem__(self, index: int) -> Any:
        return decoded(super().__getitem__(index))


def step(weight: torch.Tensor) -> None:
    """Launch many tiny operations, then wait for the device."""
    for _ in range(OPERATIONS):
        weight.add_(1)
    time.sleep(SLEEP_S)


def trained(batches: Iterable[Any]) -> tuple[float, float, float]:
    """Train for a while; return what was seen, but for the verdict."""
    torch.set_num_threads(1)
    weight = torch.zeros(1)
    own: list[float] = []
    times: list[float] = []
    begin_s = time.perf_counter()
    start = 0.0
    for _ in batches:
        arrived = time.perf_counter()
        times.append(arrived - begin_s)
        if not start and arrived - begin_s > SETTLED_S:
            start = arrived
        step(weight)
        now = time.perf_counter()
        if start:
            own.append(now - arrived)
            if now - start > MEASURED_S:
                break
    steps_s = len(own) / (now - start)
    counts = ((at, bisect(times, at + GLIDE_S) - i) for i, at in enumerate(times))
    near = (at for at, count in counts if count >= 0.95 * steps_s * GLIDE_S)
    return steps_s * BATCH, statistics.median(own), next(near)


def alone(_: int) -> Trained:
    """Train on one batch that is there."""
    return Trained(*trained(repeat(torch.zeros(BATCH, *SHAPE))), "")


def tuned(_: int) -> Trained:
    """Train on a pipeline that starts with its defaults."""
    ps.set_enable_autotune(True)
    return piped(ps.Pipeline.from_dataset(Files()).shuffle(seed=0).map(decoded))


def by_hand(workers: int) -> Trained:
    """Train on a pipeline whose maps run in this many processes."""
    settings: Any = {"executor": "process", "num_parallel_workers": workers}
    files = ps.Pipeline.from_dataset(Files(), num_parallel_workers=2).shuffle(seed=0)
    return piped(files.map(decoded, **settings))


def together(workers: int) -> Trained:
    """Train on what threads of one process make of files, several in a call."""
    with TemporaryDirectory() as folder:
        write_files(Path(folder))
        files = ps.Pipeline.from_folder(folder).shuffle(seed=0).repeat(100)
        samples = files.map(Together(), num_parallel_workers=workers)
        return piped(samples, host="process")


def write_files(folder: Path) -> None:
    """Write class folders of files; those of a class are links to the first one."""
    for name in map(str, range(CORES)):
        (folder / name).mkdir()
        first = folder / name / "0.jpg"
        first.write_bytes(Files().content)
        for at in range(1, LINKS):
            (folder / name / f"{at}.jpg").hardlink_to(first)


def piped(samples: ps.Pipeline, host: Any = "auto") -> Trained:
    """Train on batches of a pipeline's samples."""
    ps.set_cpu_budget(CORES)
    with samples.batch(BATCH).options(host=host) as pipe:
        return Trained(*trained(pipe), pipe.explain().line)


def of_torch(workers: int) -> Trained:
    """Train on torch's DataLoader with this many workers."""
    loader = torchs.DataLoader(Decoded(), BATCH, shuffle=True, num_workers=workers)
    return Trained(*trained(loader), "")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers", type=int, default=14, help="of what is set by hand"
    )
    workers = parser.parse_args().workers
    rows: dict[str, tuple[Callable[[int], Trained], int]] = {
        "nothing to load": (alone, CORES),
        "penstock, tuned from defaults": (tuned, CORES),
        f"penstock, {workers} processes by hand": (by_hand, workers),
        f"penstock, {CORES} threads in a process": (together, CORES),
        f"DataLoader num_workers={workers}": (of_torch, workers),
    }
    results: dict[str, Trained] = {}
    for name, (train, number) in rows.items():
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            results[name] = pool.submit(train, number).result()
        row, ideal = results[name], number / DECODE_S
        share = "" if train is alone else f"{row.rate / ideal:6.2f} of {ideal:,.0f}/s"
        free = results["nothing to load"]
        own, truly = row.own_s / free.own_s, f"truly {free.rate / row.rate:.2f}x faster"
        print(
            f"  {name:<36} {row.rate:>8,.0f}/s {share:>18}"
            f"   own part of a step {row.own_s * 1e3:5.1f} ms, {own:.2f} of alone,"
            f" after {row.near_s:.1f} s"
            f"   {row.verdict}{' ' * bool(row.verdict)}{truly}",
            flush=True,
        )


if __name__ == "__main__":
    main()
