"""The pipelines of autotune_suite.py, and what is known about each."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from burning import burn, rounds_for
from PIL import Image

import penstock as ps

__all__ = ["MAX_WORKERS_TRIED", "ROWS", "SAMPLES", "Row", "photograph"]

MAX_WORKERS_TRIED = 32
"""Workers of each stage in the start with too many."""
SAMPLES = 10**8


@dataclass(frozen=True)
class Sleep:
    """A sample, or a stage's work on one, that waits.

    Args:
        seconds: how long it waits.
        heavy_s: how long one sample in a hundred waits instead.
    """

    seconds: float
    heavy_s: float = 0.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return self(index)

    def __call__(self, sample: int) -> int:
        heavy = self.heavy_s and hash((sample, 1)) % 100 == 0
        time.sleep(self.heavy_s if heavy else self.seconds)
        return sample


class Crowded:
    """Work that gets slower the more workers do it: a lock in a native library.

    The seconds per sample with 1, 2, 3, ... workers are those of SPDL's video demuxer
    (0.010 s with one, best with three).
    """

    CURVE_S = (0.010, 0.010, 0.013, 0.023, 0.045, 0.067, 0.108, 0.150)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        with self._lock:
            self._inside += 1
            inside = self._inside
        least = self.CURVE_S[min(inside, len(self.CURVE_S)) - 1]
        time.sleep(least * max(1.0, inside / len(self.CURVE_S)))
        with self._lock:
            self._inside -= 1
        return index


@dataclass(frozen=True)
class Python:
    """A sample that computes in pure Python, perhaps after a wait.

    Args:
        loops: loops of Python.
        wait_s: seconds of waiting before them.
    """

    loops: int
    wait_s: float = 0.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if self.wait_s:
            time.sleep(self.wait_s)
        burn(self.loops)
        return index


def photograph() -> bytes:
    """Return a JPEG file of 500 x 375 pixels."""
    down, across = np.mgrid[0:375, 0:500]
    waves = [np.sin(down / k) + np.cos(across / (k + 3)) for k in (7, 23, 61)]
    pixels = np.stack([(wave + 2) * 63 for wave in waves], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


@dataclass(frozen=True)
class Photos:
    """The same photograph repeated, to decode and resize."""

    encoded: bytes = field(default_factory=photograph)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        with Image.open(io.BytesIO(self.encoded)) as image:
            return np.asarray(image.convert("RGB").resize((224, 224)))


MS = rounds_for(0.001)


@dataclass(frozen=True)
class Row:
    """One pipeline with its trainer, and what is known about it."""

    make: Callable[[int], ps.Pipeline]
    """Return the pipeline with this many workers in each stage."""
    step_s: float
    """The trainer's own part of a step."""
    verdict: str
    cause: str | tuple[str, ...]
    """The beginning of the right cause of `explain`."""
    best: float = 0.0
    """Steps per second of the best settings; 0: they are searched among `fixed`."""
    fewest: int = 0
    """Fewest workers, over all stages, that reach this; 0: unknown."""
    fixed: tuple[int, ...] = ()
    most: int = MAX_WORKERS_TRIED


def read(data: Any, batch: int, **settings: Any) -> Callable[[int], ps.Pipeline]:
    """Return a maker of pipelines that only read."""
    return lambda workers: ps.Pipeline.from_dataset(
        data, num_parallel_workers=workers, thread_safe=True, **settings
    ).batch(batch)


def three(*seconds: float) -> Callable[[int], ps.Pipeline]:
    """Return a maker of pipelines of three stages that wait."""

    def make(workers: int) -> ps.Pipeline:
        settings: Any = {"executor": "thread", "num_parallel_workers": workers}
        pipe = ps.Pipeline.from_dataset(Sleep(seconds[0]), **settings)
        for wait_s in seconds[1:]:
            pipe = pipe.map(Sleep(wait_s), **settings)
        return pipe.batch(1)

    return make


def sequential(workers: int) -> ps.Pipeline:
    """A stage limited to one worker, after a stage that may have more."""
    settings: Any = {"executor": "thread", "num_parallel_workers": workers}
    one: Any = {"executor": "thread", "num_parallel_workers": (1, 1)}
    source = ps.Pipeline.from_dataset(Sleep(0.005), **settings)
    return source.map(Sleep(0.010), **one).batch(4)


# The beginnings of causes. One thread alone shows no contention for the GIL.
TRAINER, BLOCKED, CPU = "the trainer", "waiting reads", "CPU"
GIL = ("the GIL", CPU)

ROWS = {
    "latency": Row(
        read(Sleep(0.020), 16, executor="thread"),
        0.020,
        "not input-bound",
        TRAINER,
        best=50.0,
        fewest=16,
    ),
    "10/25/40": Row(
        three(0.010, 0.025, 0.040),
        0.030,
        "not input-bound",
        TRAINER,
        best=1 / 0.030,
        fewest=4,
    ),
    "40/25/10": Row(
        three(0.040, 0.025, 0.010),
        0.030,
        "not input-bound",
        TRAINER,
        best=1 / 0.030,
        fewest=4,
    ),
    "crowded": Row(
        read(Crowded(), 8, executor="thread"),
        0.0,
        "input-bound",
        "waiting reads",
        best=3 / 0.013 / 8,
        fewest=3,
    ),
    "GIL": Row(
        read(Python(2 * MS), 8, executor="thread"),
        0.0,
        "input-bound",
        GIL,
        fixed=(1, 2),
    ),
    "JPEG": Row(
        read(Photos(), 16, executor="thread"), 0.0, "input-bound", CPU, fixed=(2, 3)
    ),
    "W3": Row(
        read(Python(MS, 0.020), 32, executor="process"),
        0.0,
        "input-bound",
        CPU,
        fixed=(48, 64),
        most=64,
    ),
    "heavy tail": Row(
        read(Sleep(0.002, 0.100), 16, executor="thread"),
        0.020,
        "not input-bound",
        TRAINER,
        best=50.0,
        fewest=3,
    ),
    "sequential": Row(sequential, 0.010, "input-bound", BLOCKED, best=25.0, fewest=2),
    "trainer": Row(
        read(Sleep(0.001), 8, executor="thread"),
        0.050,
        "not input-bound",
        TRAINER,
        best=20.0,
        fewest=1,
    ),
}
