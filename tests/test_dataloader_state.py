"""`DataLoader`: states, in the engine and where torch's own workers load."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.utils.data as torchs
from torch.utils.data.datapipes.iter import IterableWrapper

import penstock as ps
from penstock import DataLoader
from support.torch_datasets import Drawing
from support.torch_loaders import BATCH, LENGTH, same, seeded, sum_of

# The engine


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"sample_seeding": True}, 0),
        ({"sample_seeding": True}, 4),
        ({"sample_seeding": True}, 11),
        ({}, 0),
        ({}, 1),
        ({}, 11),
    ],
)
def test_a_state_resumes_where_it_was_taken(settings: Any, taken: int) -> None:
    def loader(workers: int = 0) -> DataLoader[Any]:
        return DataLoader(
            Drawing(LENGTH), BATCH, shuffle=True, num_workers=workers, **settings
        )

    torch.manual_seed(3)
    first = loader()
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    rest = list(batches)
    assert len(rest) == 11 - taken
    torch.manual_seed(4)
    second = loader(2 if settings else 0)
    second.load_state_dict(state)
    assert second.state_dict() == state
    again = list(second)
    # Without workers torch loads in the trainer, where two of the generators go on.
    columns = slice(None) if settings else slice(2, None)
    assert same([b[columns] for b in rest], [b[columns] for b in again])
    assert len(list(second)) == len(second) == 11


@pytest.mark.parametrize("settings", [{}, {"num_workers": 0}, {"num_workers": 2}])
@pytest.mark.parametrize("generator", [None, 7])
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_state_knows_an_order_that_is_drawn_after_the_loop_began(
    settings: dict[str, int], generator: int | None, taken: int, *, tuned: bool
) -> None:
    ps.set_enable_autotune(tuned)

    def loader() -> DataLoader[Any]:
        own = None if generator is None else torch.Generator().manual_seed(generator)
        data = range(LENGTH)
        return DataLoader(data, BATCH, shuffle=True, generator=own, **settings)  # type: ignore[arg-type]

    torch.manual_seed(3)
    first = loader()
    list(first)
    batches = iter(first)
    torch.manual_seed(4)
    start = [next(batches) for _ in range(taken)]
    state = json.loads(json.dumps(first.state_dict()))
    torch.manual_seed(5)
    rest = list(batches)
    second = loader()
    second.load_state_dict(state)
    assert same(rest, list(second))
    assert sorted(torch.cat(start + rest).tolist()) == list(range(LENGTH))


class OwnIterator:
    """A sampler of batches that is its own iterator; `iter` begins it again."""

    def __iter__(self) -> Self:
        order = torch.randperm(LENGTH)
        self.batches = iter(order.split(BATCH))
        return self

    def __next__(self) -> list[int]:
        return next(self.batches).tolist()


@pytest.mark.parametrize("tuned", [False, True])
def test_a_state_before_the_first_batch_does_not_begin_the_order_again(
    *, tuned: bool
) -> None:
    ps.set_enable_autotune(tuned)
    data: Any = range(LENGTH)
    loader: Any = DataLoader(data, batch_sampler=OwnIterator(), num_workers=0)
    batches = iter(loader)
    loader.state_dict()
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(LENGTH))


class Refusing(torchs.Sampler[int]):
    """A sampler that cannot begin."""

    def __iter__(self) -> Iterator[int]:
        raise ValueError("no order today")
        yield


class RefusingOnce(torchs.Sampler[int]):
    """A sampler that cannot begin the first time."""

    begun = False

    def __iter__(self) -> Iterator[int]:
        begun, self.begun = self.begun, True
        if not begun:
            raise ValueError("no order yet")
        yield from range(LENGTH)


@pytest.mark.parametrize("settings", [{}, {"sample_seeding": True}])
def test_a_loop_that_fails_to_begin_uses_up_no_state(settings: dict[str, Any]) -> None:
    first = DataLoader(range(LENGTH), BATCH, **settings)  # type: ignore[arg-type]
    batches = iter(first)
    state = [first.state_dict() for _ in range(3) if len(next(batches))][-1]
    second = DataLoader(range(LENGTH), BATCH, sampler=RefusingOnce(), **settings)  # type: ignore[arg-type]
    second.load_state_dict(state)
    with pytest.raises(ValueError, match="no order yet"):
        iter(second)
    assert second.state_dict() == state
    assert same([list(batches)], [list(second)])


@pytest.mark.parametrize("tuned", [False, True])
def test_a_state_hides_nothing_that_a_sampler_raises(*, tuned: bool) -> None:
    ps.set_enable_autotune(tuned)
    data: Any = range(LENGTH)
    loader: Any = DataLoader(data, BATCH, sampler=Refusing(), num_workers=0)
    batches = iter(loader)
    loader.state_dict()
    with pytest.raises(ValueError, match="no order today"):
        next(batches)


def test_what_nobody_seeds_resumes_with_the_programs_generators() -> None:
    ps.set_enable_autotune(True)

    def loader() -> DataLoader[Any]:
        return DataLoader(Drawing(LENGTH), BATCH, shuffle=True, num_workers=0)

    first = loader()
    batches = iter(first)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 the global one
    rest = list(batches)
    torch.manual_seed(4)
    second = loader()
    second.load_state_dict(state)
    random.setstate(generators[0])
    np.random.set_state(generators[1])  # noqa: NPY002 the global one
    torch.set_rng_state(generators[2])
    assert same(rest, list(second))


def test_a_state_includes_the_loaders_own_generator() -> None:
    def loader() -> DataLoader[Any]:
        own = torch.Generator().manual_seed(5)
        return DataLoader(
            Drawing(LENGTH), BATCH, shuffle=True, generator=own, sample_seeding=True
        )

    first = loader()
    list(first)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    rest = list(batches) + list(first)
    second = loader()
    second.load_state_dict(state)
    assert same(rest, list(second) + list(second))


@pytest.mark.parametrize("settings", [{}, {"sample_seeding": True}])
@pytest.mark.parametrize("taken", [0, 4, 11])
def test_epochs_after_a_resumed_one_are_those_of_an_uncut_run(
    settings: dict[str, Any], taken: int
) -> None:
    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(range(LENGTH), BATCH, shuffle=True, **settings)

    first = loader()
    list(
        first
    )  # the resumed epoch differs from the one that a fresh program would draw
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    state = first.state_dict()
    rest = [*batches, *first, *first]
    second = loader()
    second.load_state_dict(state)
    assert same([rest], [[*second, *second, *second]])


def test_a_generator_that_the_program_restored_itself_is_left_alone() -> None:
    first = seeded(0)
    next(batches := iter(first))
    torch.rand(1)  # the trainer draws, too
    state, generator = first.state_dict(), torch.get_rng_state()
    rest = [*batches, *first]
    torch.manual_seed(9)
    torch.set_rng_state(generator)
    second = seeded(0)
    second.load_state_dict(state)
    assert same(rest, [*second, *second])


KEPT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "shuffle": True}


@pytest.mark.parametrize(
    ("settings", "epoch", "taken", "same_loader"),
    [  # all pairs
        ({}, 0, 4, False),
        ({}, 1, 0, True),
        ({}, 2, 4, True),
        ({"sample_seeding": True}, 0, 0, True),
        ({"sample_seeding": True}, 1, 4, False),
        ({"sample_seeding": True}, 2, 0, False),
    ],
)
def test_a_state_of_any_epoch_of_persistent_workers_resumes(
    settings: dict[str, Any],
    epoch: int,
    taken: int,
    same_loader: bool,  # noqa: FBT001
) -> None:
    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(range(LENGTH), BATCH, **KEPT, **settings)

    first = loader()
    for _ in range(epoch):
        list(first)
    between = first.state_dict()
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    state = first.state_dict() if taken else between
    rest = [*batches, *first]
    second = first if same_loader else loader()
    second.load_state_dict(state)
    assert same([rest], [[*second, *second]])
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "else"}, "not a DataLoader's state"),
        ({"version": 9}, "must be 1, got 9"),
        ({"batch": -1}, "`batch` must be an int >= 0"),
        ({"torch": "AAAA"}, "not a torch generator's state"),
    ],
)
def test_a_damaged_state_is_an_error(change: dict[str, object], told: str) -> None:
    loader = seeded(0)
    next(iter(loader))
    with pytest.raises(ps.StateError, match=told):
        loader.load_state_dict({**loader.state_dict(), **change})
    loader.load_state_dict({})


@pytest.mark.parametrize("settings", [{"sample_seeding": True}, {}, {"num_workers": 2}])
def test_a_state_taken_after_a_batch_that_raised_skips_that_batch(
    settings: dict[str, Any],
) -> None:
    def loader() -> DataLoader[Any]:
        data = [1, 2, 3, "four", 5, 6, 7, 8]
        return DataLoader(data, 2, collate_fn=sum_of, **settings)

    first = loader()
    batches = iter(first)
    next(batches)
    with pytest.raises(TypeError):
        next(batches)
    assert next(batches) == 11
    second = loader()
    second.load_state_dict(first.state_dict())
    assert list(second) == [15]


# Torch's own workers


def test_a_sampler_that_fails_in_a_resumed_loop_says_so() -> None:
    first = DataLoader(Drawing(LENGTH), BATCH)
    batches = iter(first)
    state = [first.state_dict() for _ in range(3) if next(batches)][-1]
    second = DataLoader(Drawing(LENGTH), BATCH, sampler=Refusing())
    second.load_state_dict(state)
    with pytest.raises(ValueError, match="no order today"):
        iter(second)


class Late(list[int]):
    """Samples that come once an event is set."""

    event: Any

    def __getitem__(self, index: Any) -> Any:
        self.event.wait()
        return super().__getitem__(index)


def test_a_batch_that_a_late_worker_still_makes_does_not_count() -> None:
    data = Late(range(8))
    data.event = multiprocessing.Event()
    loader = DataLoader(data, 2, num_workers=1, timeout=0.01)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match="timed out"):
        next(batches)
    assert loader.state_dict()["batch"] == 0
    data.event.set()


def test_a_loop_that_has_ended_does_not_end_again() -> None:
    loader = DataLoader(Drawing(20), 5)
    batches = iter(loader)
    assert len(list(batches)) == 4
    later = iter(loader)
    next(later)
    assert list(batches) == []
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 1)


class Place(Iterator[int]):
    """Counts or draws, and knows its position."""

    def __init__(self, samples: list[int], *, draws: bool = False) -> None:
        self.samples = samples
        self.draws = draws
        self.at = 0

    def __next__(self) -> int:
        if self.at >= len(self.samples):
            raise StopIteration
        at = torch.randint(len(self.samples), ()).item() if self.draws else self.at
        self.at += 1
        return self.samples[int(at)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "torch": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


class Shares(torchs.IterableDataset[int]):
    """Has a share for each worker, the first an empty one; its iterator has a state."""

    def __init__(self, sizes: list[int], *, draws: bool = False) -> None:
        self.sizes = sizes
        self.draws = draws

    def __iter__(self) -> Iterator[int]:
        info = torchs.get_worker_info()
        if info is None:
            return Place(list(range(sum(self.sizes))), draws=self.draws)
        start = sum(self.sizes[: info.id])
        return Place(list(range(start, start + self.sizes[info.id])), draws=self.draws)


class Itself(Place, torchs.IterableDataset[int]):
    """A dataset that is its own iterator."""

    def __iter__(self) -> Self:
        return self


class BegunFirst(torchs.IterableDataset[int]):
    """The same, with a position from its first `__iter__` on."""

    place: Place

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Self:
        self.place = Place(list(range(self.length)))
        return self

    def __next__(self) -> int:
        return next(self.place)

    def state_dict(self) -> dict[str, Any]:
        return self.place.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place.load_state_dict(state)


class Generates(torchs.IterableDataset[int]):
    """Has a state itself, but its generator has none."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.begin = self.begin, 0
        while self.at < self.length:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class Counts(torchs.IterableDataset[int]):
    """Yields other samples each epoch, and counts epochs itself."""

    def __init__(self, *, places: bool = False) -> None:
        self.epoch = 0
        self.places = places

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        samples = list(range(100 * self.epoch, 100 * self.epoch + 10))
        return Place(samples) if self.places else iter(samples)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_the_state_between_two_epochs_holds_that_of_the_iterable(
    epochs: int,
    places: bool,  # noqa: FBT001
) -> None:
    first = iterated(Counts(places=places), 4, 0)
    for _ in range(epochs):
        list(first)
    state = json.loads(json.dumps(first.state_dict()))
    rest = list(first) + list(first)
    second = iterated(Counts(places=places), 4, 0)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert list(second) + list(second) == rest


def test_the_state_within_an_epoch_holds_those_of_iterable_and_iterator() -> None:
    first = iterated(Counts(places=True), 4, 0)
    list(first)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    rest = list(batches) + list(first)
    second = iterated(Counts(places=True), 4, 0)
    second.load_state_dict(state)
    assert list(second) + list(second) == rest


def test_a_state_of_an_iterable_read_without_workers_is_refused_with_workers() -> None:
    first = iterated(Counts(), 4, 0)
    list(first)
    second = iterated(Counts(), 4, 2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ps.StateError, match="num_workers=0"):
        iter(second)


def identity(samples: Any) -> Any:
    return samples


EVERYWHERE = [*itertools.product([None, 7], [0, 1, 10])]
"""Sizes of batches, and how many are taken before the state."""
ITERABLES = [
    (lambda: Shares([0, 60, 17]), 0, EVERYWHERE),
    (lambda: Shares([0, 60, 17], draws=True), 0, EVERYWHERE),
    (lambda: Itself(list(range(70)), draws=True), 0, EVERYWHERE),
    (lambda: BegunFirst(70), 0, EVERYWHERE),
    (lambda: Generates(70), 0, EVERYWHERE),
    # After ten batches of seven, a worker with samples is done, too.
    (lambda: Shares([0, 60, 17]), 3, [(None, 1), (7, 10)]),
    (lambda: Shares([0, 60, 17], draws=True), 3, [(None, 10), (7, 0)]),
]


@pytest.mark.parametrize(("data", "workers", "places"), ITERABLES)
def test_an_iterable_resumes_where_its_state_was_taken(
    data: Any, workers: int, places: list[tuple[int | None, int]]
) -> None:
    for size, steps in places:
        torch.manual_seed(3)
        first = iterated(data(), size, workers)
        batches = iter(first)
        for _ in range(steps):
            next(batches)
        state = json.loads(json.dumps(first.state_dict()))
        rest = list(batches)
        torch.manual_seed(4)
        second = iterated(data(), size, workers)
        second.load_state_dict(state)
        assert list(second) == rest, (size, steps)


def iterated(data: Any, size: int | None, workers: int) -> DataLoader[Any]:
    return DataLoader(data, size, num_workers=workers, collate_fn=identity)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_torch_datapipe_is_shuffled_differently_each_epoch(workers: int) -> None:
    orders = []
    for kind in (torchs.DataLoader, DataLoader):
        torch.manual_seed(3)
        pipe = IterableWrapper(list(range(40))).shuffle(buffer_size=40)
        loader: Any = kind(
            pipe.sharding_filter(),
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        orders.append([[int(x) for x in loader] for _ in range(3)])
        del loader
    assert orders[1] == orders[0]
    assert orders[1][1] != orders[1][2]


def test_nothing_is_read_twice_where_the_dataset_keeps_the_place() -> None:
    first = iterated(Generates(70), 7, 0)
    batches = iter(first)
    for _ in range(4):
        next(batches)
    data = Generates(70)
    second = iterated(data, 7, 0)
    second.load_state_dict(first.state_dict())
    assert next(iter(second))[0] == data.at - 7 == 28


def test_an_iterables_state_for_another_number_of_workers_names_both() -> None:
    first = iterated(Shares([0, 60, 17]), 7, 0)
    next(iter(first))
    second = iterated(Shares([0, 60, 17]), 7, 3)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ps.StateError, match=r"num_workers=0,.* has 3"):
        iter(second)


def test_a_state_taken_between_two_epochs_resumes_with_the_next() -> None:
    first = DataLoader(Drawing(LENGTH), BATCH, shuffle=True)
    list(first)
    state = first.state_dict()
    after = list(first)
    torch.manual_seed(8)
    second = DataLoader(Drawing(LENGTH), BATCH, shuffle=True, sample_seeding=True)
    second.load_state_dict(state)
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(after, second, strict=True))


def test_any_number_of_torchs_workers_accepts_a_map_style_state() -> None:
    first = DataLoader(Drawing(LENGTH), BATCH, shuffle=True)
    batches = iter(first)
    next(batches)
    second = DataLoader(Drawing(LENGTH), BATCH, shuffle=True, num_workers=2)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(batches, second, strict=True))


def nothing(samples: Any) -> None:
    """Return None as every batch."""


def test_batches_that_are_none_count_like_others() -> None:
    first = DataLoader(Drawing(40), 10, collate_fn=nothing)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    second = DataLoader(Drawing(40), 10, collate_fn=nothing)
    second.load_state_dict(first.state_dict())
    assert list(second) == [None]


@pytest.mark.parametrize("tuned", [False, True])
def test_a_state_within_an_epoch_of_unordered_batches_is_refused(
    *, tuned: bool
) -> None:
    ps.set_enable_autotune(tuned)
    loader = DataLoader(Drawing(20), 5, num_workers=2, in_order=False)
    batches = iter(loader)
    loader.state_dict()  # nothing is consumed
    next(batches)
    with pytest.raises(ps.StateError, match="in_order=False: which 1 batches"):
        loader.state_dict()
    assert len(list(batches)) == 3
    assert loader.state_dict()["epoch"] == 1


def test_a_single_worker_keeps_the_order() -> None:
    loader = DataLoader(Drawing(20), 5, num_workers=1, in_order=False)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["batch"] == 1
    del batches
