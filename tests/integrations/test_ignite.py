"""Ignite's engines, including the one that rebuilds loaders."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.data as torchs

from penstock import DataLoader
from support.framework_data import BATCH, STEPS, Slow, loader, verdict, whole

ignite = pytest.importorskip("ignite.engine")
DeterministicEngine = pytest.importorskip(
    "ignite.engine.deterministic"
).DeterministicEngine
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def run(kind: Any, load_s: float = 0.0, step_s: float = 0.0, **settings: Any) -> Any:
    """Run an engine; return it, what it saw and its states by iteration."""
    batches: list[list[int]] = []
    states = {}

    def step(engine: Any, batch: Any) -> None:
        time.sleep(step_s)
        batches.append(batch[1].tolist())
        states[engine.state.iteration] = dict(engine.state_dict())

    engine = kind(step)
    if "state" in settings:
        engine.load_state_dict(settings["state"])
    torch.manual_seed(5)
    data = settings["data"]() if "data" in settings else loader(load_s)
    engine.run(data, max_epochs=3)
    return engine, batches, states


@pytest.mark.parametrize("kind", ["Engine", "DeterministicEngine"])
def test_an_engine_trains_and_the_verdict_is_true(kind: str) -> None:
    kinds = {"Engine": ignite.Engine, "DeterministicEngine": DeterministicEngine}
    for load_s, step_s in ((0.005, 0.0), (0.0, 0.05)):
        engine, batches, _ = run(kinds[kind], load_s, step_s)
        assert len(batches) == 3 * STEPS
        assert all(whole(batches[n : n + STEPS]) for n in (0, STEPS, 2 * STEPS))
        assert type(engine.state.dataloader) is DataLoader
        verdict(engine.state.dataloader, loading=load_s > 0)


def resumed(kind: Any, **settings: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return what a run saw from the middle of an epoch on, and a resumed one."""
    data = partial(kind, Slow(), BATCH, shuffle=True, **settings)
    _, batches, states = run(DeterministicEngine, data=data)
    _, again, _ = run(DeterministicEngine, data=data, state=states[STEPS + 7])
    return batches[STEPS + 7 :], again


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}], ids=["none", "two"])
def test_the_deterministic_engine_resumes_within_an_epoch_as_with_torch(
    settings: dict[str, int],
) -> None:
    rest, again = resumed(DataLoader, **settings)
    assert (rest, again) == resumed(torchs.DataLoader, **settings)
    # Without workers the order is drawn at the first batch. By then, Ignite has
    # restored the generators as they were in the middle of the epoch.
    assert (again == rest) == bool(settings)
