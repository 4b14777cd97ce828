"""Batches that the trainer makes by itself, from datasets that draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import pytest
import torch

import penstock as ps

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: float(torch.rand(())),
}
LENGTH, SIZE = 20, 4


class Counting:
    """Counts its samples, so none may be made twice, and draws from some on."""

    def __init__(self, draw: Callable[[], float], first: int) -> None:
        self.draw, self.first = draw, first
        self.calls = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.calls += 1
        return self.calls, self.draw() if index >= self.first else 0.0


@pytest.fixture(autouse=True)
def tuned() -> Iterator[None]:
    """Let the loaders be ours, not torch's."""
    ps.set_enable_autotune(True)
    yield
    ps.set_enable_autotune(False)


def drawn(
    dataset: Counting, trainer: Callable[[], float]
) -> tuple[list[float], list[list[float]]]:
    """Return what the trainer draws after each batch, and what the samples drew."""
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    loader = ps.DataLoader(dataset, SIZE)
    draws = [(trainer(), batch[1].tolist()) for batch in loader]
    assert dataset.calls == LENGTH  # each sample was made once
    return [own for own, _ in draws], [samples for _, samples in draws]


@pytest.mark.parametrize("library", DRAWS)
def test_samples_neither_disturb_the_trainers_draws_nor_repeat_them(
    library: str,
) -> None:
    draw = DRAWS[library]
    undisturbed, _ = drawn(Counting(lambda: 0.0, 0), draw)
    own, samples = drawn(Counting(draw, 0), draw)
    assert own == undisturbed
    assert len({*own, *chain(*samples)}) == LENGTH // SIZE + LENGTH


def test_draws_that_begin_late_repeat_the_trainers_in_their_first_batch_alone() -> None:
    """A sample that may not be made twice has drawn before that is known."""
    draw = DRAWS["random"]
    undisturbed, _ = drawn(Counting(lambda: 0.0, 0), draw)
    own, samples = drawn(Counting(draw, 2 * SIZE), draw)
    assert own == undisturbed
    assert samples[:2] == [[0.0] * SIZE] * 2
    assert [draws[0] in own for draws in samples] == [False, False, True, False, False]
    assert len(set(chain(*samples[2:]))) == 3 * SIZE
