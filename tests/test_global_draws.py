"""Draws from the global generators are sound, whichever workers make the samples."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import penstock as ps
from support.moves import workers_pay
from support.short_epochs import LENGTH, samples


@pytest.fixture(autouse=True)
def _tuned() -> None:
    ps.set_enable_autotune(True)


GLOBAL: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
}


def draw_all() -> tuple[float, ...]:
    """Draw from each of the global generators."""
    return tuple(float(draw()) for draw in GLOBAL.values())


def give_way() -> None:
    """Let another process take samples, too."""
    time.sleep(0.0005)


class Draws:
    """Draws from the global generators, and may end its process once."""

    def __init__(self, dies: Path | None = None) -> None:
        self.dies = dies

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[float, ...]:
        give_way()
        if self.dies is not None and index == LENGTH // 2 and not self.dies.exists():
            self.dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return draw_all()


Columns = list[tuple[float, ...]]


def drawn(data: Draws, workers: int) -> Columns:
    """Return what each generator gave in two epochs of a pipeline.

    Each epoch has worker processes of its own.
    """
    pipe = ps.Pipeline.from_dataset(
        data, executor="process", num_parallel_workers=workers
    ).batch(8)
    with pipe.options(persistent_workers=False) as pipe:
        return list(zip(*samples(pipe), strict=True))


@pytest.mark.parametrize("workers", [1, 3])
def test_no_two_worker_processes_draw_the_same(workers: int, tmp_path: Path) -> None:
    columns = drawn(Draws(dies=tmp_path / "died"), workers)
    assert [len(set(column)) for column in columns] == 3 * [2 * LENGTH]


def test_draws_of_a_single_worker_process_are_repeatable() -> None:
    ps.set_enable_autotune(False)  # with tuning there may soon be more than one
    assert drawn(Draws(), 1) == drawn(Draws(), 1)


def test_draws_in_the_engines_own_process_are_not_those_of_the_trainer() -> None:
    pipe = ps.Pipeline.from_dataset(Draws(), executor="thread")
    with pipe.batch(8).options(host="process") as pipe:
        draws = zip(*samples(pipe), strict=True)
    own = zip(*(draw_all() for _ in range(4 * LENGTH)), strict=True)
    for theirs, ours in zip(draws, own, strict=True):
        assert not set(theirs) & set(ours)


class OfItsWorker(Draws):
    """Draws from a generator that a `worker_init_fn` makes."""

    def __init__(self) -> None:
        self.generator: Any = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        give_way()
        return float(self.generator.random())


def make_generator(number: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert (info.id, info.seed) == (number, torch.initial_seed())
    info.dataset.generator = np.random.default_rng(info.seed)


def test_generators_that_worker_init_fn_makes_differ_among_workers_and_epochs() -> None:
    loader = ps.DataLoader(
        OfItsWorker(), batch_size=8, num_workers=2, worker_init_fn=make_generator
    )
    draws = samples(loader)
    for _ in range(2):
        draws += next(iter(loader)).tolist()  # and between loops that are left early
    assert len(set(draws)) == 2 * LENGTH + 2 * 8


@pytest.mark.parametrize("library", GLOBAL)
def test_auto_leaves_a_pipeline_with_global_draws_to_the_trainer(library: str) -> None:
    class Single(Draws):
        def __getitem__(self, index: int) -> float:  # type: ignore[override]
            return GLOBAL[library]()

    with workers_pay(), ps.Pipeline.from_dataset(Single()).batch(8) as pipe:
        list(pipe)
        stats = pipe.stats()
        assert stats is not None
        assert {segment.executor for segment in stats.segments} == {"inline"}
