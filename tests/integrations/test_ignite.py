"""Ignite's engines, including the one that rebuilds loaders."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from penstock import DataLoader
from support.framework_data import STEPS, loader, verdict, whole

ignite = pytest.importorskip("ignite.engine")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def run(kind: Any, load_s: float = 0.0, step_s: float = 0.0, **settings: Any) -> Any:
    """Run an engine; return it, what it saw and its states by iteration."""
    seen: list[list[int]] = []
    states = {}

    def step(engine: Any, batch: Any) -> None:
        time.sleep(step_s)
        seen.append(batch[1].tolist())
        states[engine.state.iteration] = dict(engine.state_dict())

    engine = kind(step)
    if "state" in settings:
        engine.load_state_dict(settings["state"])
    torch.manual_seed(5)
    engine.run(loader(load_s), max_epochs=3)
    return engine, seen, states


@pytest.mark.parametrize("kind", ["Engine", "DeterministicEngine"])
def test_an_engine_trains_and_the_verdict_is_true(kind: str) -> None:
    from ignite.engine.deterministic import DeterministicEngine

    kinds = {"Engine": ignite.Engine, "DeterministicEngine": DeterministicEngine}
    for load_s, step_s in ((0.005, 0.0), (0.0, 0.05)):
        engine, seen, _ = run(kinds[kind], load_s, step_s)
        assert len(seen) == 3 * STEPS
        assert all(whole(seen[n : n + STEPS]) for n in (0, STEPS, 2 * STEPS))
        assert type(engine.state.dataloader) is DataLoader
        verdict(engine.state.dataloader, loading=load_s > 0)


def test_the_deterministic_engine_resumes_within_an_epoch_exactly() -> None:
    from ignite.engine.deterministic import DeterministicEngine

    _, seen, states = run(DeterministicEngine)
    _, again, _ = run(DeterministicEngine, state=states[STEPS + 7])
    assert again == seen[STEPS + 7 :]
