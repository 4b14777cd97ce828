"""Worker processes by fork, forkserver and spawn: the same batches."""

from __future__ import annotations

import threading
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.engine.far import pools
from penstock.engine.witness import hazards
from support.datasets import WORKERS, Numbers
from support.functions import augment, digest, indices, kills_once
from support.leaks import children
from support.warm import spawnv_passfds

SPAWN = pytest.param("spawn", marks=pytest.mark.slow)
"""Takes longest to start."""
METHODS = ["fork", "forkserver", SPAWN]
PROCESSES = WORKERS["3 processes"]


def pipe_of(method: Any, function: Any = augment) -> ps.Pipeline:
    return (
        ps.Pipeline.from_dataset(Numbers(40), **PROCESSES)
        .shuffle(seed=3)
        .map(function, **PROCESSES)
        .batch(8)
        .options(multiprocessing_context=method)
    )


@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize("method", METHODS)
def test_two_epochs_are_byte_identical(method: str) -> None:
    with pipe_of(method) as pipe:
        epochs_digest = digest([*pipe, *pipe])
    inline = ps.Pipeline.from_dataset(Numbers(40)).shuffle(seed=3).map(augment)
    with inline.batch(8) as pipe:
        assert epochs_digest == digest([*pipe, *pipe])


@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize("method", ["forkserver", SPAWN])
def test_functions_made_on_the_spot_travel_to_fresh_interpreters(method: str) -> None:
    offset = 5
    with pipe_of(method, lambda sample: sample[1] + offset) as pipe:
        values = sorted(index for batch in pipe for index in batch.tolist())
    assert values == list(range(5, 45))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_an_object_that_cannot_travel_is_named(method: str) -> None:
    class Locked(Numbers):
        def __init__(self) -> None:
            super().__init__(40)
            object.__setattr__(self, "guard", threading.Lock())

    described = ps.Pipeline.from_dataset(Locked(), **PROCESSES).batch(8)
    with (
        described.options(multiprocessing_context=method) as pipe,  # type: ignore[arg-type]
        pytest.raises(ps.SpecError, match=r"\.guard") as caught,
    ):
        next(iter(pipe))
    assert 'multiprocessing_context="fork"' in str(caught.value)


@pytest.mark.parametrize("held", [False, True])
def test_with_cuda_in_use_only_data_with_its_tensors_is_not_forked(
    *, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def spawn(path: bytes, args: Any, passfds: Any) -> int:
        started.append(args)
        return spawnv_passfds(path, args, passfds)

    monkeypatch.setattr(util, "spawnv_passfds", spawn)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    search = hazards.find_on_device  # on another device, as there may be no CUDA here
    monkeypatch.setattr(pools, "find_on_device", lambda *of: search(*of[:2], "meta"))
    table = torch.zeros(2, device="meta" if held else "cpu")
    with pipe_of(None, lambda sample: sample[1] + len(table)) as pipe:
        loop = iter(pipe)
        next(loop)
        assert len(children()) == 1
    roles = [args[-3] for args in started]
    assert roles == ["forkserver"] * held


def test_a_loader_with_workers_forks_them_whatever_its_dataset_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(pools, "find_on_device", lambda *_: ("held", "cuda:0"))
    loader = ps.DataLoader(Numbers(40), 8, num_workers=2, sample_seeding=True)
    loop = iter(loader)
    next(loop)
    commands = [" ".join(child.cmdline()) for child in children()]
    assert len(commands) == 1
    assert "penstock.engine.far.fork_server" not in commands[0]
    loader.close()


@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize("method", METHODS)
def test_killed_workers_of_any_start_method_are_replaced(
    method: str, tmp_path: Path
) -> None:
    with pipe_of(method, partial(kills_once, mark=tmp_path / "killed")) as pipe:
        samples = sorted(index for batch in indices(pipe) for index in batch)
    assert samples == list(range(40))


@pytest.mark.usefixtures("warm_interpreters")
def test_code_that_a_fresh_interpreter_cannot_import_is_an_error() -> None:
    with (
        pipe_of("forkserver", only_here) as pipe,
        pytest.raises(ps.WorkerError) as caught,
    ):
        next(iter(pipe))
    assert "ModuleNotFoundError" in str(caught.value)


def only_here(sample: Any) -> Any:
    """Is defined in a module that only its path can import."""
    return sample
