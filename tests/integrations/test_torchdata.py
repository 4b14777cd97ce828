"""torchdata: its protocol, its samplers, and that its loader and ours agree."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from support.framework_data import BATCH, Slow, loader, whole

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_loader_is_stateful() -> None:
    assert isinstance(loader(), stateful.Stateful)


@pytest.mark.parametrize("taken", [0, 3, 20])
def test_what_is_left_after_a_state_is_what_torchdata_leaves(taken: int) -> None:
    def rest(kind: Any, **settings: Any) -> list[list[int]]:
        def made() -> Any:
            generator = torch.Generator().manual_seed(4)
            sampler = torch.utils.data.RandomSampler(Slow(), generator=generator)
            return kind(Slow(), BATCH, sampler=sampler, generator=generator, **settings)

        first = made()
        batches = iter(first)
        for _ in range(taken):
            next(batches)
        second = made()
        second.load_state_dict(first.state_dict())
        return [indices.tolist() for _, indices in second]

    ours = rest(type(loader()), snapshot_every_n_steps=1)
    theirs = rest(stateful.StatefulDataLoader)
    assert ours == theirs
    assert len(ours) == 20 - taken


def test_a_sampler_of_torchdatas_keeps_its_place() -> None:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def made() -> Any:
        sampler = StatefulDistributedSampler(Slow(), num_replicas=2, rank=1, seed=3)
        return type(loader())(Slow(), BATCH, sampler=sampler)

    first = made()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    rest = [indices.tolist() for _, indices in batches]
    second = made()
    second.load_state_dict(state)
    assert [indices.tolist() for _, indices in second] == rest
    assert not whole(rest)
