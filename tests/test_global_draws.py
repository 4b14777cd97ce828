"""Draws from the global generators are sound, whichever workers make the samples."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import penstock as ps
from support.short_epochs import LENGTH, samples, work


@pytest.fixture(autouse=True)
def _tuned() -> None:
    ps.set_enable_autotune(True)


GLOBAL: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
}


class Draws:
    """Draws from a global generator, and may end its process once."""

    def __init__(self, draw: Callable[[], float], dies: Path | None = None) -> None:
        self.draw, self.dies = draw, dies

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        work()
        if self.dies is not None and index == LENGTH // 2 and not self.dies.exists():
            self.dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.draw()


def drawn(data: Draws, workers: int) -> list[float]:
    """Return two epochs of a pipeline, each with worker processes of its own."""
    pipe = ps.Pipeline.from_dataset(
        data, executor="process", num_parallel_workers=workers
    ).batch(8)
    with pipe.options(persistent_workers=False) as pipe:
        return [row for _ in range(2) for batch in pipe for row in batch.tolist()]


@pytest.mark.parametrize("library", GLOBAL)
def test_no_two_worker_processes_draw_the_same(library: str, tmp_path: Path) -> None:
    for workers in (1, 3):
        data = Draws(GLOBAL[library], dies=tmp_path / f"{library}{workers}")
        assert len(set(drawn(data, workers))) == 2 * LENGTH


@pytest.mark.parametrize("library", GLOBAL)
def test_draws_of_a_single_worker_process_are_repeatable(library: str) -> None:
    ps.set_enable_autotune(False)  # with tuning there may soon be more than one
    data = Draws(GLOBAL[library])
    assert drawn(data, 1) == drawn(data, 1)


@pytest.mark.parametrize("library", GLOBAL)
def test_draws_in_the_engines_own_process_are_not_those_of_the_trainer(
    library: str,
) -> None:
    pipe = ps.Pipeline.from_dataset(Draws(GLOBAL[library]), executor="thread")
    with pipe.batch(8).options(host="process") as pipe:
        drawn = [row for (row,) in samples(pipe)]
    assert not set(drawn) & {GLOBAL[library]() for _ in range(4 * LENGTH)}


class OfItsWorker(Draws):
    """Draws from a generator that a `worker_init_fn` makes."""

    def __init__(self) -> None:
        self.generator: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        work()
        return float(self.generator.random())


def make_generator(number: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert (info.id, info.seed) == (number, torch.initial_seed())
    info.dataset.generator = np.random.default_rng(info.seed)


def test_generators_that_worker_init_fn_makes_differ_among_workers_and_epochs() -> None:
    loader = ps.DataLoader(
        OfItsWorker(), batch_size=8, num_workers=2, worker_init_fn=make_generator
    )
    drawn = samples(loader)
    for _ in range(3):
        drawn += next(iter(loader)).tolist()  # and between loops that are left early
    assert len(set(drawn)) == 2 * LENGTH + 3 * 8


@pytest.mark.parametrize("library", GLOBAL)
def test_auto_leaves_a_pipeline_with_global_draws_to_the_trainer(library: str) -> None:
    data = Draws(GLOBAL[library])
    with ps.Pipeline.from_dataset(data).batch(8) as pipe:
        list(pipe)
        stats = pipe.stats()
        assert stats is not None
        assert {segment.executor for segment in stats.segments} == {"inline"}
