"""One worker that was asked for stays alone if others would not do the same."""

from __future__ import annotations

import io
from typing import Any

import pytest

from penstock.pipeline.compile.segments import MAX_WORKERS
from penstock.pipeline.stages import BatchStage, MapStage, SourceStage
from support.recipes import DATA, compiled, decode

FILE = io.BytesIO(b"of the function")


def reads(sample: Any, file: io.BytesIO = FILE) -> Any:
    """Read from an open file, which has one position."""
    return file.read(sample)


@pytest.mark.parametrize(
    ("function", "asked", "bounds"),
    [
        (reads, 1, (1, 1)),
        (reads, 2, (1, MAX_WORKERS)),
        (decode, 1, (1, MAX_WORKERS)),
    ],
)
def test_one_worker_of_a_function_with_a_place_of_its_own_is_never_joined(
    function: Any, asked: int, bounds: tuple[int, int]
) -> None:
    stage = MapStage(function, num_parallel_workers=asked)
    segment = compiled(DATA, stage, BatchStage(1)).segments[-1]
    assert (segment.num_parallel_workers, segment.bounds) == (asked, bounds)


def test_one_worker_of_such_a_dataset_is_never_joined_either() -> None:
    source = SourceStage([FILE], num_parallel_workers=1)
    (segment,) = compiled(source, BatchStage(1)).segments
    assert (segment.num_parallel_workers, segment.bounds) == (1, (1, 1))
