"""Pipelines whose batches hold samples of about the same length."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import penstock as ps

N = 600
LENGTHS = np.random.default_rng(0).integers(1, 90, N)
PADDING = -1


class Texts:
    """Sample i is its own number, repeated over its length."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((int(LENGTHS[index]),), index)


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=PADDING)


def texts(shard: ps.Shard | None = None, executor: Any = "auto") -> ps.Pipeline:
    return ps.Pipeline.from_dataset(Texts(), executor=executor, shard=shard).shuffle(
        seed=1
    )


def by_tokens(shard: ps.Shard | None = None, executor: Any = "auto") -> ps.Pipeline:
    return texts(shard, executor).batch(
        global_max_tokens=1000, lengths=LENGTHS, window=5, collate_fn=pad
    )


def samples(pipe: ps.Pipeline, batch: torch.Tensor) -> list[int]:
    """Return the samples of a batch without padding."""
    assert pipe.plan is not None
    indices: list[int] = batch[: pipe.plan.n_local, 0].tolist()
    return indices


def together(dealt: list[list[list[int]]]) -> list[list[int]]:
    """Return the global batches that the ranks' batches make up."""
    return [[*chain(*parts)] for parts in zip(*dealt, strict=True)]


@pytest.mark.parametrize("executor", ["thread", "process", "auto"])
def test_any_workers_make_the_batches_of_the_trainer_alone(
    executor: str,
) -> None:
    with by_tokens(executor="inline") as alone, by_tokens(executor=executor) as pipe:
        for _ in range(2):
            assert len(alone) == len(pipe)
            batches = list(pipe)
            assert len(batches) == len(alone)
            for batch, expected in zip(batches, alone, strict=True):
                assert torch.equal(batch, expected)
                assert expected.numel() <= 1000


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_share_the_batches_of_a_single_rank(world: int) -> None:
    with by_tokens() as alone:
        expected = [samples(alone, batch) for batch in alone]
    dealt: list[list[list[int]]] = []
    for rank in range(world):
        with by_tokens(ps.Shard(rank, world)) as pipe:
            dealt.append([samples(pipe, batch) for batch in pipe])
    assert together(dealt) == expected


def test_a_run_resumes_in_another_world() -> None:
    with by_tokens() as alone:
        expected = [[samples(alone, batch) for batch in alone] for _ in range(2)]
        flat = expected[0] + expected[1]
    state, batches = None, []
    for world, steps in ((1, 5), (3, 17), (2, 8), (8, 3), (1, 1000)):
        dealt: list[list[list[int]]] = []
        for rank in range(world):
            with by_tokens(ps.Shard(rank, world)) as pipe:
                if state is not None:
                    pipe.load_state_dict(json.loads(json.dumps(state)))
                mine: list[list[int]] = []
                while len(mine) < steps and len(batches) + len(mine) < len(flat):
                    for batch in pipe:
                        mine.append(samples(pipe, batch))
                        if len(mine) == steps:
                            break
                dealt.append(mine)
                after = pipe.state_dict()
        state = after
        batches += together(dealt)
    assert batches == flat


def test_batches_of_a_fixed_size_are_sorted_too() -> None:
    lengths = LENGTHS.tolist()
    with texts().batch(16, lengths=lengths, collate_fn=pad) as pipe:
        batches = list(pipe)
    assert [len(batch) for batch in batches] == [16] * 37 + [8]
    assert sorted(chain(*(b[:, 0].tolist() for b in batches))) == [*range(N)]
    true = sum(int((batch != PADDING).sum()) for batch in batches)
    assert 1 - true / sum(batch.numel() for batch in batches) < 0.06


def test_a_selection_uses_the_lengths_of_the_dataset() -> None:
    selection = np.flatnonzero(LENGTHS < 20)
    pipe = ps.Pipeline.from_dataset(Texts()).select(selection.tolist()).shuffle(seed=0)
    with pipe.batch(max_tokens=200, lengths=LENGTHS, collate_fn=pad) as batches:
        tensors = list(batches)
    assert max(batch.shape[1] for batch in tensors) == LENGTHS[selection].max()
    assert all(batch.numel() <= 200 for batch in tensors)


def even(sample: torch.Tensor) -> bool:
    return len(sample) % 2 == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: texts().batch(max_tokens=9), "needs `lengths`"),
        (lambda: texts().batch(8, max_tokens=99, lengths=LENGTHS), "needs one size"),
        (
            lambda: texts().batch(max_tokens=99, lengths=LENGTHS, drop_last=True),
            "leave out `drop_last` and `microbatches`",
        ),
        (lambda: texts().batch(max_tokens=0, lengths=LENGTHS), "must be an int >= 1"),
        (lambda: texts().batch(max_tokens=50, lengths=LENGTHS), "raise the number"),
        (lambda: texts().batch(8, lengths=LENGTHS[:5]), "got 5 for 600 samples"),
        (lambda: texts().filter(even).batch(8, lengths=LENGTHS), "use select"),
    ],
)
def test_impossible_plans_are_refused(
    make: Callable[[], ps.Pipeline], message: str
) -> None:
    with pytest.raises(ps.SpecError, match=message), make() as pipe:
        next(iter(pipe))


def test_batches_by_length_print_as_they_are_written() -> None:
    code = "batch(global_max_tokens=1000, lengths=<600 lengths>, window=5)"
    assert code in str(by_tokens())
    assert by_tokens()._stages[-1] == by_tokens()._stages[-1]  # noqa: SLF001
