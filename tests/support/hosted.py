"""Pipelines whose engine runs in a process of its own, and functions for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil

import penstock as ps
from penstock.engine.run import Run

from .datasets import WORKERS, Numbers, Sample
from .functions import augment, digest, fails_on
from .leaks import children

__all__ = [
    "PROMPT_S",
    "Kind",
    "epochs",
    "failing",
    "hangs",
    "host_of",
    "hosted",
    "kill",
    "odd",
    "pipe_of",
    "run_of",
    "suicide",
]

Kind = Mapping[str, Any]
"""Settings of a stage that decide which workers it has."""

PROMPT_S = 60.0
"""Seconds to wait for what should end at once, even on a busy machine."""


def pipe_of(host: Any, first: Kind, second: Kind, length: int = 52) -> ps.Pipeline:
    """Return batches of eight, read by `first` and augmented by `second`."""
    return (
        ps.Pipeline.from_dataset(Numbers(length), **first)
        .shuffle(seed=3)
        .map(augment, **second)
        .batch(8)
        .options(host=host)
    )


def hosted(kind: Kind, length: int = 52) -> ps.Pipeline:
    """Return the same in a host process, with one kind of workers throughout."""
    return pipe_of("process", kind, kind, length)


def epochs(count: int, length: int = 52) -> list[str]:
    """Return the digests of the first epochs, as made by the trainer itself."""
    inline = WORKERS["inline"]
    with pipe_of("trainer", inline, inline, length) as pipe:
        return [digest(pipe) for _ in range(count)]


def host_of(pipe: ps.Pipeline) -> psutil.Process:
    """Return the first process that makes batches of a pipeline."""
    (server,) = children()
    assert pipe.stats() is not None
    return server.children()[0]


def run_of(pipe: ps.Pipeline) -> Run:
    """Return the tuner's view of a pipeline in the middle of a loop."""
    run = pipe._slot.run  # noqa: SLF001 there is no other way to one that is live
    assert run is not None
    return run


def kill(process: psutil.Process) -> None:
    """Kill a process, and wait until it is dead."""
    process.kill()
    process.wait(PROMPT_S)


def failing(kind: Kind, **batch: Any) -> ps.Pipeline:
    """Return a hosted pipeline of five batches that fails on row 5 of step 2."""
    return (
        ps.Pipeline.from_dataset(Numbers(40), **kind)
        .map(fails_on(21), **kind, name="check")
        .batch(8, **batch)
        .options(host="process")
    )


def odd(sample: Sample) -> bool:
    """Keep every other sample: a predicate."""
    return sample[1] % 2 == 1


def suicide(sample: Sample) -> Sample:
    """Kill the process that works on sample 20, each time."""
    if sample[1] == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def hangs(sample: Sample) -> Sample:
    """Never come back from sample 16."""
    if sample[1] == 16:
        time.sleep(1000)
    return sample
