"""Batches are the same to the byte, whichever workers make them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

import penstock as ps
from support.datasets import WORKERS, Numbers
from support.forked import End, forked
from support.functions import augment, digest, indices, waits


def augmented(first: Mapping[str, Any], second: Mapping[str, Any]) -> ps.Pipeline:
    return (
        ps.Pipeline.from_dataset(Numbers(50), **first)
        .shuffle(seed=3)
        .map(augment, **second)
        .batch(8)
    )


def two_epochs(pipe: ps.Pipeline) -> str:
    with pipe:
        return digest([*pipe, *pipe])


@pytest.fixture(scope="module")
def expected() -> str:
    return two_epochs(augmented(WORKERS["inline"], WORKERS["inline"]))


@pytest.mark.parametrize("workers", [*WORKERS, "auto"])
def test_two_epochs_are_byte_identical_under_all_workers(
    workers: str, expected: str
) -> None:
    chosen = WORKERS.get(workers, {})
    assert two_epochs(augmented(chosen, chosen)) == expected


def test_workers_have_enough_to_do_while_the_trainer_computes() -> None:
    """The trainer reads nothing between two calls of `next`: each must read ahead."""
    began = [threading.Event() for _ in range(1000)]

    def note(sample: tuple[Any, int]) -> tuple[Any, int]:
        began[sample[1]].set()
        return sample

    source = ps.Pipeline.from_dataset(Numbers(1000), **WORKERS["inline"])
    with source.map(note, **WORKERS["2 threads"]).batch(8) as pipe:
        for number, _ in zip(range(100), pipe, strict=False):
            assert began[8 * (number + 1)].wait(timeout=60)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("inline", "2 threads"),
        ("2 threads", "inline"),
        ("2 threads", "3 processes"),
        ("3 processes", "inline"),
        ("16 threads", "1 thread"),
    ],
)
def test_stages_with_different_workers_pass_on_the_same_bytes(
    first: str, second: str, expected: str
) -> None:
    assert two_epochs(augmented(WORKERS[first], WORKERS[second])) == expected


@pytest.mark.parametrize("prefetch", [1, 7])
def test_the_prefetch_size_changes_no_byte(
    prefetch: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ps.config, "current", ps.config.current)
    ps.set_prefetch_size(prefetch)
    assert two_epochs(augmented(WORKERS["2 threads"], {})) == expected


@pytest.mark.parametrize("seed", [4, 2**64 - 1])
def test_another_seed_gives_another_order_and_other_draws(
    seed: int, expected: str
) -> None:
    pipe = (
        ps.Pipeline.from_dataset(Numbers(50)).shuffle(seed=seed).map(augment).batch(8)
    )
    assert two_epochs(pipe) != expected


def test_epochs_differ_in_order_and_in_draws() -> None:
    with augmented({}, {}) as pipe:
        first, second = list(pipe), list(pipe)
    noise = [
        {i: v for b in epoch for i, v in zip(b[1].tolist(), b[0].tolist(), strict=True)}
        for epoch in (first, second)
    ]
    assert list(indices(first)) != list(indices(second))
    assert not any(noise[0][index] == noise[1][index] for index in range(50))


@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
def test_samples_of_unequal_duration_come_in_order(workers: str) -> None:
    def uneven(sample: Any, rng: Any) -> Any:
        return waits(sample, wait_s=0.003 * float(rng.random()) ** 4)

    pipe = ps.Pipeline.from_dataset(Numbers(200)).map(uneven, **WORKERS[workers])
    with pipe.batch(8) as pipe:
        samples = [index for batch in indices(pipe) for index in batch]
    assert samples == list(range(200))


@pytest.mark.usefixtures("two_cores")
def test_a_slow_function_starts_inline_and_moves_to_threads() -> None:
    slow = partial(waits, wait_s=0.001)
    with ps.Pipeline.from_dataset(Numbers(96)).map(slow).batch(8) as pipe:
        for batch, expected in zip(pipe, range(0, 96, 8), strict=True):
            assert batch[1].tolist() == list(range(expected, expected + 8))
        stats = pipe.stats()
    assert stats is not None
    assert stats.segments[0].executor == "thread"


class Late:
    """One sample waits until another one, many batches later, has been read."""

    def __init__(self, length: int, waits: int, until: int) -> None:
        self._length, self._waits, self._until = length, waits, until
        self._reached = threading.Event()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if index == self._until:
            self._reached.set()
        if index == self._waits:
            assert self._reached.wait(60)
        return index


def test_a_batch_may_wait_for_one_row_while_many_after_it_are_filled() -> None:
    ps.set_prefetch_size(32)
    data = Late(length=400, waits=8 * 20 + 4, until=8 * 40)
    pipe = ps.Pipeline.from_dataset(data, executor="thread", num_parallel_workers=4)
    pipe = pipe.map(same_sample, executor="thread", num_parallel_workers=2).batch(8)
    with pipe:
        rows = [row for batch in pipe for row in batch.tolist()]
    assert rows == list(range(400))


def same_sample(sample: int) -> int:
    return sample


@pytest.mark.parametrize("host", ["trainer", "process"])
def test_a_batch_that_a_forked_child_holds_stays_as_it_was(host: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(800, 64), **WORKERS["3 processes"]).batch(8)
    with pipe.options(host=host) as pipe:
        loop = iter(pipe)
        batches = [next(loop) for _ in range(4)][-1:]

        def look(end: End) -> None:
            end.tell(digest(batches))
            end.hear()
            end.tell(digest(batches))

        with forked(look) as child:
            before = child.hear()
            assert before == digest(batches)
            batches.clear()
            for later in loop:
                del later
            child.tell("look again")
            assert child.hear() == before


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_samples_of_any_dtype_come_from_worker_processes() -> None:
    dtypes = (
        torch.uint16,
        torch.uint64,
        torch.float8_e5m2,
        torch.complex32,
        torch.bfloat16,
    )
    sample = [torch.arange(16, dtype=torch.uint8).view(dtype) for dtype in dtypes]
    pipe = ps.Pipeline.from_dataset([sample] * 12, **WORKERS["3 processes"]).batch(4)
    with pipe:
        batches = list(pipe)
    assert len(batches) == 3
    for batch in batches:
        assert [part.dtype for part in batch] == list(dtypes)
        for part in batch:
            assert torch.equal(part.view(torch.uint8), torch.arange(16).repeat(4, 1))
