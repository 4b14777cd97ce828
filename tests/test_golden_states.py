"""States that earlier releases wrote still go on where they were taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps

GOLDEN = Path(__file__).parent / "golden"
BATCHES = 3
"""After these each state was taken."""


def pipeline() -> ps.Pipeline:
    return ps.Pipeline.from_dataset(np.arange(50)).shuffle(seed=7).batch(8)


def scheduled() -> ps.Pipeline:
    schedule = ps.schedule.of(
        global_batch_size=ps.schedule.steps({0: 8, 0.5: 4}),
        image_size=ps.schedule.linear(32, 64, end=1, multiple_of=32),
    )
    data = np.arange(50)
    return ps.Pipeline.from_dataset(data, schedule=schedule).shuffle(seed=7).batch()


def loader() -> ps.DataLoader[Any]:
    torch.manual_seed(7)
    data = list(range(50))
    return ps.DataLoader(data, 8, shuffle=True, sample_seeding=True)


MADE = {"pipeline": pipeline, "scheduled": scheduled, "loader": loader}


def ids(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("name", MADE)
def test_a_state_of_version_1_goes_on(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}_v1.json").read_text())
    loader = MADE[name]()
    loader.load_state_dict(golden["state"])
    assert ids(loader) == golden["rest"]
    whole = ids(MADE[name]())
    assert whole[BATCHES:] == golden["rest"]


def write() -> None:
    """Write the files again: for a new version, beside those of the old ones."""
    for name, make in MADE.items():
        loader = make()
        batches = iter(loader)
        for _ in range(BATCHES):
            next(batches)
        golden = {"state": loader.state_dict(), "rest": ids(batches)}
        (GOLDEN / f"{name}_v1.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    write()
