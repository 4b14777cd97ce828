"""`DataLoader`: torch's loader to every caller, tuned underneath."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.utils.data as torchs
from torch.autograd.profiler import profile  # torch.profiler loads a compiler

import penstock as ps
from penstock import DataLoader
from support.torch_datasets import Deadly, Drawing, Plain, Streamed
from support.torch_loaders import BATCH, LENGTH, epochs, same, seeded, sum_of
from support.waiting import until_collected


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    ps.set_enable_autotune(False)


# Torch's behaviour, as long as nobody asks for more


@pytest.mark.parametrize("workers", [0, 2])
def test_without_autotune_its_batches_are_torchs_to_the_byte(workers: int) -> None:
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "shuffle": True,
        "num_workers": workers,
    }
    ours = epochs(DataLoader(Drawing(LENGTH), **settings))
    theirs = epochs(torchs.DataLoader(Drawing(LENGTH), **settings))
    assert same(ours, theirs)


def test_a_loader_is_a_torch_loader_with_its_attributes_and_errors() -> None:
    loader = DataLoader(Plain(20), 4, num_workers=2)
    plain = torchs.DataLoader(Plain(20), 4, num_workers=2)
    assert isinstance(loader, torchs.DataLoader)
    assert len(loader) == len(plain) == 5
    public = {name for name in vars(loader) if not name.startswith("_")}
    own = {"name", "sample_seeding", "snapshot_every_n_steps", "thread_safe"}
    assert public == {n for n in vars(plain) if not n.startswith("_")} | own
    with pytest.raises(ValueError, match="num_workers"):
        DataLoader(Plain(20), num_workers=-1)
    with pytest.raises(ps.SpecError, match="sample_seeding"):
        DataLoader(Plain(20), sample_seeding="yes")  # type: ignore[arg-type]


def test_an_iterator_has_the_attributes_of_torchs() -> None:
    loader = DataLoader(Plain(20), 4, num_workers=1)
    batches = iter(loader)
    assert len(batches) == 5
    assert len(batches._workers) == 1  # noqa: SLF001 as frameworks do
    assert [batch.tolist() for batch in batches][-1] == [16, 17, 18, 19]


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"thread_safe": True}])
def test_what_nobody_seeds_draws_from_the_programs_streams(
    settings: dict[str, Any],
) -> None:
    ps.set_enable_autotune(True)
    ours = epochs(DataLoader(Drawing(LENGTH), BATCH, shuffle=True, **settings))
    settings.pop("thread_safe", None)
    theirs = epochs(torchs.DataLoader(Drawing(LENGTH), BATCH, shuffle=True, **settings))
    assert same(ours, theirs)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 0}])
def test_loops_in_step_draw_their_orders_as_torchs_do(settings: dict[str, Any]) -> None:
    def orders(kind: Any) -> list[Any]:
        torch.manual_seed(7)
        pair = [kind(range(20), 4, shuffle=True, **settings) for _ in range(2)]
        batches = [
            (one.tolist(), other.tolist())
            for _ in range(2)
            for one, other in zip(*pair, strict=True)
        ]
        loop = iter(pair[0])
        return [*batches, torch.rand(()).item(), *(batch.tolist() for batch in loop)]

    ps.set_enable_autotune(True)
    assert orders(DataLoader) == orders(torchs.DataLoader)


class Stopping:
    """Raises in a sample what ends a loop."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise StopIteration
        return index


def test_a_sample_ends_no_epoch_unless_it_would_with_torch() -> None:
    ps.set_enable_autotune(True)
    data: Any = Stopping()
    with pytest.raises(ps.SampleError, match="StopIteration"):
        list(DataLoader(data, 2))
    assert len(list(DataLoader(data, 2, num_workers=0))) == 2


class Batched:
    """Returns what a batch sampler yielded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Any) -> Any:
        return [indices]


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_a_dataset_gets_what_a_batch_sampler_yielded(form: Any) -> None:
    ps.set_enable_autotune(True)
    batches: Any = [form([1, 2]), form([3])]
    data: Any = Batched()
    lists = list(DataLoader(data, batch_sampler=batches, collate_fn=lambda rows: rows))
    assert [type(rows) for (rows,) in lists] == [type(batches[0])] * 2
    assert all(rows is batch for (rows,), batch in zip(lists, batches, strict=True))


# Sample seeding: the same for any number of workers


def test_bytes_are_the_same_for_any_number_of_workers() -> None:
    alone = epochs(seeded(0))
    assert same(alone, epochs(seeded(4)))
    persistent = epochs(seeded(1, persistent_workers=True))
    assert same(persistent, epochs(seeded(4, persistent_workers=True)))
    assert not same(alone[:11], alone[11:])
    assert not same(alone, epochs(seeded(0), seed=8))


class Tally:
    """Draws, and returns how often it has been read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[int]:
        random.random()
        self.reads += 1
        return [self.reads] * len(indices)


class TallyEach(Tally):
    """Offers no way to read several samples at once."""

    __getitems__ = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> int:
        return Tally.__getitems__(self, [index])[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_draws_and_keeps_a_count_is_read_once(workers: int) -> None:
    cases: list[tuple[Any, list[list[int]]]] = [
        (Tally(), [[1] * 4, [2] * 4]),
        (torchs.Subset(TallyEach(), range(8)), [[1, 2, 3, 4], [5, 6, 7, 8]]),  # type: ignore[arg-type]
    ]
    for data, expected in cases:
        loader = DataLoader(data, 4, num_workers=workers, sample_seeding=True)
        assert [batch.tolist() for batch in loader] == expected


@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_bytes_are_the_same_however_workers_start(method: str) -> None:
    workers = 1 if method == "spawn" else 2  # an interpreter each, which imports torch
    elsewhere = seeded(workers, multiprocessing_context=method)
    assert same(epochs(seeded(0), 1), epochs(elsewhere, 1))


def test_the_order_is_the_one_that_torch_draws() -> None:
    ours = epochs(seeded(2), 1)
    theirs = epochs(torchs.DataLoader(Drawing(LENGTH), BATCH, shuffle=True), 1)
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({}, False),
        ({}, True),
        ({"num_workers": 2, "persistent_workers": True}, False),
        ({"num_workers": 2, "persistent_workers": True}, True),
    ],
)
def test_the_order_of_every_epoch_is_the_one_that_torch_draws(
    settings: dict[str, Any],
    own: bool,  # noqa: FBT001
) -> None:
    def orders(kind: Any, **more: Any) -> list[list[int]]:
        generator = torch.Generator().manual_seed(5) if own else None
        loader = kind(
            range(30), 4, shuffle=True, generator=generator, **settings, **more
        )
        torch.manual_seed(7)
        return [torch.cat(list(loader)).tolist() for _ in range(3)]

    theirs = orders(torchs.DataLoader)
    assert orders(DataLoader, sample_seeding=True) == theirs
    assert len({tuple(order) for order in theirs}) == 3


class Eager(torchs.Sampler[int]):
    """Draws when a loop begins, and is its own iterator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Self:
        self.order = torch.randperm(self.length).tolist()
        return self

    def __next__(self) -> list[int]:
        if not self.order:
            raise StopIteration
        return [self.order.pop()]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_eager_sampler_draws_as_often_as_for_torch(workers: int) -> None:
    def orders(kind: Any, **more: Any) -> list[list[int]]:
        loader = kind(range(9), batch_sampler=Eager(9), num_workers=workers, **more)
        torch.manual_seed(7)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    assert orders(DataLoader, sample_seeding=True) == orders(torchs.DataLoader)


@pytest.mark.parametrize("settings", [{}, {"sample_seeding": True}])
def test_a_sampler_that_is_its_own_iterator_resumes_where_it_was(
    settings: dict[str, Any],
) -> None:
    first = DataLoader(range(9), batch_sampler=Eager(9), **settings)
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    second = DataLoader(range(9), batch_sampler=Eager(9), **settings)
    second.load_state_dict(state)
    assert torch.equal(torch.cat(list(second)), torch.cat(list(batches)))


def test_the_truth_of_settings_is_judged_as_torch_judges_it() -> None:
    loader = DataLoader([1, 2], persistent_workers=0, sample_seeding=True)  # type: ignore[arg-type]
    assert len(list(loader)) == 2


@pytest.mark.parametrize(
    ("workers", "kept", "step"),
    [(0, False, 1), (0, True, 2), (2, False, 2), (2, True, 1)],
)
def test_a_peek_leaves_the_surrounding_loop_alone(
    workers: int,
    kept: bool,  # noqa: FBT001
    step: int,
) -> None:
    loader = DataLoader(range(12), 4, num_workers=workers, sample_seeding=True)
    for _ in range(2):
        batches: list[list[int]] = []
        peek: Any = None
        for number, batch in enumerate(loader):
            batches.append(batch.tolist())
            if number == step:
                peek = iter(loader)
                assert next(peek).tolist() == [0, 1, 2, 3]
                peek = peek if kept else None
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert peek is None or len(list(peek)) == 2
    loader.close()


@pytest.mark.parametrize("settings", [{}, {"sample_seeding": True}])
@pytest.mark.parametrize("further", [0, 2])
def test_a_state_after_a_peek_is_that_of_the_surrounding_loop(
    settings: dict[str, Any], further: int
) -> None:
    loader = DataLoader(range(40), 4, **settings)
    for number, _ in enumerate(loader):
        if number == 3:
            next(iter(loader))
        if number == 3 + further:
            state = loader.state_dict()
            break
    assert loader.state_dict()["batch"] == state["batch"] == 4 + further
    resumed = DataLoader(range(40), 4, **settings)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == list(
        range(16 + 4 * further, 20 + 4 * further)
    )


def test_all_three_generators_are_seeded_and_the_trainers_left_alone() -> None:
    batches = iter(seeded(0))
    next(batches)  # for which the order was drawn
    states = random.getstate(), torch.get_rng_state()
    legacy = np.random.get_state()[2]  # noqa: NPY002 the global one
    batch = next(batches)
    assert random.getstate() == states[0]
    assert np.random.get_state()[2] == legacy  # noqa: NPY002 the global one
    assert torch.equal(torch.get_rng_state(), states[1])
    assert all(len(values.unique()) == BATCH for values in batch[:3])


def test_a_sample_drawn_twice_in_an_epoch_has_new_draws() -> None:
    sampler = torchs.RandomSampler(range(3), replacement=True, num_samples=60)
    loader = DataLoader(Drawing(3), batch_size=60, sampler=sampler, sample_seeding=True)
    (batch,) = loader
    assert len(batch[0].unique()) == 60


def test_a_killed_worker_loses_and_repeats_nothing(tmp_path: Path) -> None:
    data = Deadly(LENGTH, tmp_path / "mark")
    loader = DataLoader(data, BATCH, num_workers=2, sample_seeding=True)
    assert torch.cat(list(loader)).tolist() == list(range(LENGTH))


# Autotune


def test_with_autotune_batches_are_those_of_sample_seeding() -> None:
    alone = epochs(seeded(0))
    ps.set_enable_autotune(True)
    tuned = DataLoader(Drawing(LENGTH), batch_size=BATCH, shuffle=True)
    assert same(alone, epochs(tuned))
    assert tuned.num_workers == 0
    assert tuned.explain().stages[0].items_per_s > 0
    assert tuned.stats() is not None


@pytest.mark.parametrize(
    ("why", "loader"),
    [
        ("iterable", lambda: DataLoader(Streamed(8), 4)),
        ("single samples", lambda: DataLoader(Plain(8), batch_size=None)),
        (
            "worker_init_fn",
            lambda: DataLoader(Plain(8), 4, worker_init_fn=print, thread_safe=True),
        ),
        ("sample_seeding", lambda: DataLoader(Plain(8), 4, sample_seeding=False)),
    ],
)
def test_torchs_own_workers_do_what_only_they_can_and_the_log_says_so_once(
    why: str, loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="penstock.autotune")
    ps.set_enable_autotune(True)
    data_loader = loader()
    assert (
        [len(list(data_loader)) for _ in range(2)] == [2, 2]
        if why != "single samples"
        else list(data_loader)
    )
    lines = [m for m in caplog.messages if "torch's own workers load, untuned" in m]
    assert len(lines) == 1
    assert why in lines[0]


# Samplers


class Counting(torchs.Sampler[list[int]]):
    """Yields other indices each epoch, and counts how often it is iterated."""

    def __init__(self) -> None:
        self.asked = 0
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.asked += 1
        yield from [[self.epoch, 1], [2], [3, 4, 5]]

    def __len__(self) -> int:
        return 3


def test_the_order_is_taken_when_a_loop_begins_and_never_before() -> None:
    sampler = Counting()
    loader = DataLoader(Plain(8), batch_sampler=sampler, sample_seeding=True)
    for epoch in (6, 7):
        sampler.epoch = epoch
        assert [b.tolist() for b in loader] == [[epoch, 1], [2], [3, 4, 5]]
    assert sampler.asked == 2


def test_an_endless_sampler_is_drawn_only_as_far_as_needed() -> None:
    def forever() -> Iterator[list[int]]:
        while True:
            yield [1, 2]

    class Endless:
        def __iter__(self) -> Iterator[list[int]]:
            return forever()

    loader = DataLoader(Plain(8), batch_sampler=Endless(), sample_seeding=True)  # type: ignore[arg-type]
    assert [b.tolist() for _, b in zip(range(300), loader, strict=False)] == [
        [1, 2]
    ] * 300


def test_distributed_samplers_follow_set_epoch() -> None:
    def order(kind: Any, **settings: Any) -> list[list[int]]:
        data = Plain(20)
        sampler: Any = torchs.DistributedSampler(data, num_replicas=2, rank=1)
        loader = kind(data, 5, sampler=sampler, **settings)
        batches = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            batches += [batch.tolist() for batch in loader]
        return batches

    assert order(DataLoader, sample_seeding=True) == order(torchs.DataLoader)


def test_set_epoch_between_iter_and_the_first_batch_takes_effect() -> None:
    def order(kind: Any, **settings: Any) -> list[list[int]]:
        data = Plain(20)
        sampler: Any = torchs.DistributedSampler(data, num_replicas=2, rank=1)
        batches = iter(kind(data, 5, sampler=sampler, **settings))
        sampler.set_epoch(3)
        return [batch.tolist() for batch in batches]

    assert order(DataLoader, sample_seeding=True) == order(torchs.DataLoader)


class Told(Plain):
    """Yields the epoch that was set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("seeding", [True, False])
def test_set_epoch_reaches_data_in_persistent_workers(*, seeding: bool) -> None:
    loader = DataLoader(
        Told(8), 8, num_workers=1, persistent_workers=True, sample_seeding=seeding
    )
    for epoch in (0, 4, 5):
        loader.set_epoch(epoch)
        (batch,) = loader
        assert set(batch.tolist()) == {epoch}


@pytest.mark.parametrize(("workers", "drop_last"), [(0, True), (2, False)])
def test_an_empty_dataset_gives_an_empty_loop_as_with_torch(
    workers: int, *, drop_last: bool
) -> None:
    options: Any = {"num_workers": workers, "drop_last": drop_last}
    loader = DataLoader([], 4, sample_seeding=True, **options)  # type: ignore[var-annotated]
    assert [list(loader), list(loader)] == [[], []]


def test_a_dataset_without_a_length_is_read_by_the_samplers_indices() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index * 10

    loader = DataLoader(Endless(), batch_sampler=[[3, 1], [7]], sample_seeding=True)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[30, 10], [70]]


def test_an_empty_batch_is_what_the_collate_fn_makes_of_it() -> None:
    sampler: Any = [[1, 2], [], [3]]
    loader = DataLoader(Plain(8), batch_sampler=sampler, collate_fn=list)
    ps.set_enable_autotune(True)
    assert list(loader) == [[1, 2], [], [3]]


def test_workers_refuse_an_empty_batch_by_name() -> None:
    sampler: Any = [[1], []]
    loader = DataLoader(Plain(8), batch_sampler=sampler, num_workers=1)
    ps.set_enable_autotune(True)
    with pytest.raises(ps.SpecError, match="batch 1 of the batch sampler is empty"):
        list(loader)


# Loops


def test_each_of_several_loops_at_once_gets_everything() -> None:
    loader = DataLoader(Plain(LENGTH), BATCH, num_workers=1, sample_seeding=True)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 11
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_loop_that_is_left_leaves_no_process_behind() -> None:
    loader = DataLoader(Plain(LENGTH), BATCH, num_workers=2, sample_seeding=True)
    for _ in range(2):
        for _ in loader:
            break
    assert until_collected(lambda: loader.stats() is None)
    assert len(list(loader)) == 11


def test_an_error_in_the_dataset_keeps_its_type_and_the_loop_goes_on() -> None:
    loader = DataLoader(
        [1, 2, 3, "four", 5, 6], 2, sample_seeding=True, collate_fn=sum_of
    )
    batches = iter(loader)
    assert next(batches) == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        next(batches)
    assert next(batches) == 11


def test_a_collate_fn_assigned_later_is_used_from_the_next_loop_on() -> None:
    loader = DataLoader([1, 2, 3, 4], 2, sample_seeding=True)
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
    loader.collate_fn = sum_of
    assert list(loader) == [3, 7]


def test_copies_and_pickles_start_from_the_beginning() -> None:
    loader = seeded(0, drop_last=True)
    whole = epochs(loader, 1)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):  # noqa: S301
        assert same(whole, epochs(other, 1))


def test_profilers_find_loading_by_torchs_name() -> None:
    loader = DataLoader(Plain(8), 4, sample_seeding=True)
    with profile() as profiler:
        list(loader)
    names = [event.key for event in profiler.key_averages()]
    assert any(
        name.startswith("enumerate(DataLoader)#") and name.endswith(".__next__")
        for name in names
    )


def test_the_stamp_says_which_batch_it_was() -> None:
    loader = DataLoader(Plain(8), 4, sample_seeding=True)
    plans = [(loader.plan.batch, loader.plan.n_rows) for _ in loader if loader.plan]
    assert plans == [(0, 4), (1, 4)]


def test_data_that_draws_nothing_is_read_once() -> None:
    data = Plain(LENGTH)
    assert len(list(DataLoader(data, BATCH, sample_seeding=True))) == 11
    assert data.reads == LENGTH
    assert data.pids == {os.getpid()}


def test_autotune_turned_on_later_takes_effect_at_the_next_loop() -> None:
    loader = DataLoader(Plain(LENGTH), BATCH, sample_seeding=True)
    list(loader)
    assert loader.explain().stages[0].executor == "inline"
    assert loader.stats().segments[0].moves == ()  # type: ignore[union-attr]
    ps.set_enable_autotune(True)
    list(loader)
    (move,) = loader.stats().segments[0].moves  # type: ignore[union-attr]
    assert (move.old, move.outcome) == ("inline", "stays")


def test_a_loader_keeps_the_order_under_a_torch_without_in_order() -> None:
    ps.set_enable_autotune(True)
    loader = DataLoader(list(range(8)), 4)
    del vars(loader)["in_order"]  # torch before 2.6
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.state_dict()["epoch"] == 1
    loader.close()
