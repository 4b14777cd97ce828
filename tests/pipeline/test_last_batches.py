"""The stamp of an epoch's last batch says so: frameworks may stop there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

import penstock as ps

DATA = list(range(22))
THREADS = {"num_workers": 2, "thread_safe": True}
KINDS: dict[str, dict[str, Any]] = {"trainer": {"num_workers": 0}, "threads": THREADS}


class Unsized:
    """A sampler whose length nobody knows before its end."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(SequentialSampler(DATA), 5, drop_last=False))


WAYS: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 5, "shuffle": True},
    "whole batches only": {"batch_size": 5, "drop_last": True},
    "unsized": {"batch_sampler": Unsized()},
}


@pytest.fixture(autouse=True)
def tuned() -> Iterator[None]:
    """Let the loaders be ours, not torch's."""
    ps.set_enable_autotune(True)
    yield
    ps.set_enable_autotune(False)


# Where the trainer makes batches, nothing is drawn ahead of them: the end of such a
# sampler is known too late.
@pytest.mark.parametrize(
    ("kind", "way"),
    [pair for pair in product(KINDS, WAYS) if pair != ("trainer", "unsized")],
)
def test_only_the_last_batch_of_an_epoch_is_stamped_as_the_last(
    kind: str, way: str
) -> None:
    loader = ps.DataLoader(DATA, **WAYS[way], **KINDS[kind])
    for _ in range(2):
        are_last = [loader.plan is not None and loader.plan.last for _ in loader]
        whole = len(DATA) // 5 if way == "whole batches only" else 5
        assert are_last == [False] * (whole - 1) + [True]
