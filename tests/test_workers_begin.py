"""Workers that have not delivered anything yet are told apart from slow ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from support.waiting import until


class Gated:
    """No sample can be read before a file exists."""

    def __init__(self, opened: Path) -> None:
        self.opened = opened

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        until(self.opened.exists)
        return index


def beginning(pipe: ps.Pipeline) -> int:
    stats = pipe.stats()
    assert stats is not None
    return stats.segments[-1].beginning


ONE_CORE = ps.config.budget().cpu_cores < 2


@pytest.mark.parametrize(
    "executor",
    [
        pytest.param(
            "process",
            marks=pytest.mark.skipif(ONE_CORE, reason="one process of workers"),
        ),
        "thread",
    ],
)
def test_workers_count_as_beginning_until_they_have_settled_a_lease(
    executor: str, tmp_path: Path
) -> None:
    opened = tmp_path / "open"
    workers: Any = {"executor": executor, "num_parallel_workers": 2}
    source = ps.Pipeline.from_dataset(Gated(opened), thread_safe=True, **workers)
    with source.batch(8) as pipe:
        loop = iter(pipe)
        assert until(lambda: beginning(pipe) == 2)
        opened.touch()
        next(loop)
        assert until(lambda: beginning(pipe) == 0)
        list(loop)
