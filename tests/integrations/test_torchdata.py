"""Torchdata's protocol and samplers, and agreement of its loader with ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from support.framework_data import BATCH, Slow, loader, whole

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_loader_counts_as_stateful() -> None:
    assert isinstance(loader(), stateful.Stateful)


@pytest.mark.parametrize("taken", [0, 3, 20])
def test_the_rest_after_a_state_is_that_of_torchdata(taken: int) -> None:
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


def test_a_torchdata_sampler_keeps_its_place() -> None:
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


class Place:
    """An iterator with a state."""

    def __init__(self, items: Sequence[int]) -> None:
        self.items, self.at = items, 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> int:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shares(torch.utils.data.IterableDataset[int]):
    """Each worker reads its share; pickling leaves out what the dataset has cached."""

    def __init__(self) -> None:
        self.cached = list(range(LENGTH))

    def __getstate__(self) -> dict[str, list[int]]:
        return {"cached": list(range(LENGTH))}

    def __iter__(self) -> Place:
        info = torch.utils.data.get_worker_info()
        at, step = (info.id, info.num_workers) if info else (0, 1)
        return Place(self.cached[at::step])


def piped() -> Any:
    return IterableWrapper(list(range(LENGTH))).shuffle(buffer_size=7).sharding_filter()


LENGTH = 24
DATA: dict[str, tuple[Callable[[], Any], bool]] = {
    "map-style": (lambda: list(range(LENGTH)), True),
    "iterable": (Shares, False),
    "pipe": (piped, True),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("taken", [0, 3])
def test_persistent_workers_resume_a_later_epoch_as_torchdatas_do(
    kind: str, workers: int, taken: int
) -> None:
    make, shuffle = DATA[kind]
    settings: dict[str, Any] = {"shuffle": True} if shuffle else {}
    settings |= {"num_workers": workers, "persistent_workers": workers > 0}

    def rests(loader_of: Any) -> list[list[list[int]]]:
        torch.manual_seed(5)
        first = loader_of(make(), 3, **settings)
        list(first)
        batches = iter(first)
        for _ in range(taken):
            next(batches)
        state = first.state_dict()
        torch.manual_seed(77)
        second = loader_of(make(), 3, **settings)
        second.load_state_dict(state)
        return [[batch.tolist() for batch in loop] for loop in (batches, second)]

    rest, resumed = rests(type(loader()))
    assert rest == resumed
    theirs, _ = rests(stateful.StatefulDataLoader)  # it resumes no shuffled pipes
    assert sorted(map(len, rest)) == sorted(map(len, theirs))
    if not shuffle:
        assert rest == theirs
