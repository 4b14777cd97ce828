"""Twenty thousand epochs: nothing grows."""

from __future__ import annotations

import gc

import psutil
import pytest

import penstock as ps
from support.datasets import KINDS, Numbers
from support.leaks import Footprint, children, leaks_since

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EPOCHS = 20_000
WARM = 2_000
"""Epochs after which everything made only once exists."""
GROWTH = 3 << 20
"""Bytes by which the allocator may vary by chance: 175 an epoch. Pages have 2 MiB."""


def held_bytes() -> int:
    """Return the memory that belongs to this process and its children alone."""
    gc.collect()
    family = [psutil.Process(), *children(recursive=True)]
    return sum(process.memory_full_info().uss for process in family)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows_over_twenty_thousand_epochs(kind: str) -> None:
    source = ps.Pipeline.from_dataset(Numbers(8), **KINDS[kind])
    with source.shuffle(seed=1).batch(4) as pipe:
        for epoch in range(EPOCHS):
            assert sum(1 for _ in pipe) == 2
            if epoch == WARM:
                before, bytes_before = Footprint.now(), held_bytes()
        assert leaks_since(before) == []
        assert held_bytes() - bytes_before < GROWTH
