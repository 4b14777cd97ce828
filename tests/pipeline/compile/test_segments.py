"""Stages become segments, fused where nothing forbids it and named as in the log."""

from __future__ import annotations

import io
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.program.program import Filter, Map, Operation, Read, ReadOn
from penstock.engine.recipe import Recipe
from penstock.pipeline.compile.segments import MAX_WORKERS
from penstock.pipeline.sources.folder import Folder
from penstock.pipeline.stages import (
    BatchStage,
    FilterStage,
    MapStage,
    RepeatStage,
    SelectStage,
    ShuffleStage,
    SourceStage,
    Stage,
    TakeStage,
)
from support.recipes import DATA, compiled, decode, flip, wanted

READ = "Dataset(ID:0) data > Dataset(ID:0) data"


def segments(*stages: Stage) -> list[str]:
    """Return `name > queue name` of each segment of these stages and a batch stage."""
    return [
        f"{segment.name} > {segment.queue_name}"
        for segment in compiled(*stages, BatchStage(4)).segments
    ]


def stages_of(recipe: Recipe) -> list[list[str]]:
    return [
        [operation.stage for operation in segment.program.operations]
        for segment in recipe.segments
    ]


@pytest.fixture
def photos(tmp_path: Path) -> SourceStage:
    """A folder of one class with one image."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").touch()
    return SourceStage(Folder.scan(tmp_path))


def test_adjacent_stages_without_options_become_one_segment() -> None:
    recipe = compiled(DATA, MapStage(decode), MapStage(flip), BatchStage(4))
    assert stages_of(recipe) == [
        ["Dataset(ID:0) data", "Map(ID:1) decode", "Map(ID:2) flip"]
    ]
    (segment,) = recipe.segments
    assert segment.name == "Map(ID:1) decode"
    assert segment.queue_name == "Batch(ID:3)"
    assert segment.program.places
    assert segment.executor == "auto"
    assert segment.num_parallel_workers == 3
    assert segment.bounds == (1, MAX_WORKERS)
    assert segment.prefetch_size == 2


def test_a_segment_is_named_after_what_the_user_does_in_it() -> None:
    assert segments(DATA) == ["Dataset(ID:0) data > Batch(ID:1)"]
    assert segments(DATA, ShuffleStage(0), MapStage(decode)) == [
        "Map(ID:2) decode > Batch(ID:3)"
    ]
    assert segments(DATA, MapStage(decode, name="my own")) == [
        "Map(ID:1) my own > Batch(ID:2)"
    ]
    assert segments(SourceStage([1])) == ["Dataset(ID:0) list > Batch(ID:1)"]


def test_ids_count_all_stages_as_the_user_wrote_them() -> None:
    recipe = compiled(
        DATA,
        SelectStage([1, 2, 3]),
        MapStage(decode),
        TakeStage(2),
        FilterStage(wanted),
        BatchStage(1),
    )
    assert stages_of(recipe) == [
        ["Dataset(ID:0) data", "Map(ID:2) decode", "Filter(ID:4) wanted"]
    ]
    assert recipe.buffers.stage == "Batch(ID:5)"


BORDERS: dict[str, tuple[list[Stage], list[str]]] = {
    "workers of its own": (
        [DATA, MapStage(decode, num_parallel_workers=3)],
        [READ, "Map(ID:1) decode > Batch(ID:2)"],
    ),
    "the same number said twice": (
        [
            DATA,
            MapStage(decode, num_parallel_workers=2),
            MapStage(flip, num_parallel_workers=2),
        ],
        [
            READ,
            "Map(ID:1) decode > Map(ID:1) decode",
            "Map(ID:2) flip > Batch(ID:3)",
        ],
    ),
    "another executor": (
        [DATA, MapStage(decode), MapStage(flip, executor="thread")],
        ["Map(ID:1) decode > Map(ID:1) decode", "Map(ID:2) flip > Batch(ID:3)"],
    ),
    "none: processes make samples from the start": (
        [
            DATA,
            MapStage(decode, num_parallel_workers=2),
            MapStage(flip, executor="process"),
        ],
        ["Map(ID:2) flip > Batch(ID:3)"],
    ),
    "processes before others": (
        [DATA, MapStage(decode, executor="process"), MapStage(flip)],
        ["Map(ID:1) decode > Map(ID:1) decode", "Map(ID:2) flip > Batch(ID:3)"],
    ),
    "tuned or not": (
        [DATA, MapStage(decode), MapStage(flip, tune=False)],
        ["Map(ID:1) decode > Map(ID:1) decode", "Map(ID:2) flip > Batch(ID:3)"],
    ),
    "another limit of time": (
        [
            DATA,
            MapStage(decode, timeout=1.0),
            MapStage(flip),
            MapStage(abs, timeout=2.0),
        ],
        ["Map(ID:1) decode > Map(ID:2) flip", "Map(ID:3) abs > Batch(ID:4)"],
    ),
    "another limit of time than the source's": (
        [SourceStage([1], timeout=2.0, name="data"), MapStage(decode, timeout=1.0)],
        [READ, "Map(ID:1) decode > Batch(ID:2)"],
    ),
    "none: one limit of time for all that follows the source": (
        [DATA, MapStage(decode, timeout=2.0), MapStage(flip, timeout=2.0)],
        ["Map(ID:1) decode > Batch(ID:3)"],
    ),
    "workers of the source's own": (
        [SourceStage([1], num_parallel_workers=2, name="data"), MapStage(decode)],
        [READ, "Map(ID:1) decode > Batch(ID:2)"],
    ),
    "an iterable": (
        [SourceStage(iter([1]), iterable=True, name="data"), MapStage(decode)],
        [READ, "Map(ID:1) decode > Batch(ID:2)"],
    ),
    "none: the same executor said twice": (
        [DATA, MapStage(decode, executor="thread"), MapStage(flip, executor="thread")],
        [READ, "Map(ID:1) decode > Batch(ID:3)"],
    ),
    "none: a source is tuned with what follows": (
        [DATA, MapStage(decode, tune=False)],
        ["Map(ID:1) decode > Batch(ID:2)"],
    ),
    "none: what only says the order": (
        [DATA, ShuffleStage(1), RepeatStage(2), MapStage(decode), TakeStage(5)],
        ["Map(ID:3) decode > Batch(ID:5)"],
    ),
}


@pytest.mark.parametrize("border", BORDERS)
def test_segments_end_only_at_borders(border: str) -> None:
    stages, expected = BORDERS[border]
    assert segments(*stages) == expected


def test_reading_a_folder_is_a_segment_apart_from_computing(
    photos: SourceStage,
) -> None:
    recipe = compiled(photos, MapStage(decode), BatchStage(1))
    assert stages_of(recipe) == [["Folder(ID:0) read"], ["Map(ID:1) decode"]]
    assert [segment.executor for segment in recipe.segments] == ["thread", "auto"]
    places = [segment.program.places for segment in recipe.segments]
    assert places == ["", "Batch(ID:2)"]


EXECUTORS: dict[str, tuple[list[Stage], list[str]]] = {
    "nothing said": ([DATA, MapStage(decode)], ["auto"]),
    "said": ([DATA, MapStage(decode, executor="inline")], ["auto", "inline"]),
    "workers said": (
        [DATA, MapStage(decode, num_parallel_workers=2)],
        ["auto", "thread"],
    ),
    "not thread-safe": (
        [SourceStage([1], thread_safe=False), MapStage(decode)],
        ["process"],
    ),
    "not thread-safe, but said": (
        [SourceStage([1], thread_safe=False, executor="inline")],
        ["inline"],
    ),
    "thread-safe": ([SourceStage([1], thread_safe=True)], ["auto"]),
    "a limit of time": ([DATA, MapStage(decode, timeout=2.0)], ["process"]),
    "a limit of time and workers": (
        [DATA, MapStage(decode, num_parallel_workers=2, timeout=2.0)],
        ["auto", "process"],
    ),
    "iterable": (
        [SourceStage(iter([1]), iterable=True), MapStage(decode)],
        ["thread", "auto"],
    ),
}


@pytest.mark.parametrize("case", EXECUTORS)
def test_the_executor_is_the_one_requested_or_one_that_suits_the_source(
    case: str,
) -> None:
    stages, executors = EXECUTORS[case]
    recipe = compiled(*stages, BatchStage(1))
    assert [segment.executor for segment in recipe.segments] == executors


OPEN = [io.BytesIO(b"of the data")]
"""A dataset that threads must not share."""


def reads(sample: Any, file: io.BytesIO = OPEN[0]) -> Any:
    """Read from an open file."""
    return file.read(sample)


SHARING: dict[str, tuple[list[Stage], list[tuple[str, bool]]]] = {
    "an unsafe dataset": ([SourceStage(OPEN)], [("inline", False)]),
    "an unsafe dataset, workers asked for": (
        [SourceStage(OPEN, num_parallel_workers=2)],
        [("process", False)],
    ),
    "declared": ([SourceStage(OPEN, thread_safe=True)], [("auto", True)]),
    "declared not to be": ([SourceStage([1], thread_safe=False)], [("process", False)]),
    "an unsafe function": ([DATA, MapStage(reads)], [("inline", False)]),
    "an unsafe predicate": (
        [DATA, MapStage(decode, num_parallel_workers=2), FilterStage(reads)],
        [("auto", True), ("thread", True), ("inline", False)],
    ),
    "processes said": ([SourceStage(OPEN, executor="process")], [("process", False)]),
    "processes said, safe": (
        [SourceStage([1], executor="process")],
        [("process", True)],
    ),
    "threads said": ([SourceStage(OPEN, executor="thread")], [("thread", False)]),
    "inline said": ([SourceStage(OPEN, executor="inline")], [("inline", True)]),
    "an iterable": (
        [SourceStage(io.BytesIO(b"lines"), iterable=True), MapStage(decode)],
        [("thread", True), ("auto", True)],
    ),
}


@pytest.mark.parametrize("case", SHARING)
def test_threads_share_no_object_that_is_known_to_be_unsafe(case: str) -> None:
    stages, expected = SHARING[case]
    recipe = compiled(*stages, BatchStage(1))
    pairs = [(segment.executor, segment.thread_safe) for segment in recipe.segments]
    assert pairs == expected


def told(caplog: pytest.LogCaptureFixture, *stages: Stage) -> list[tuple[str, str]]:
    """Return the logger and the level of each line, and check what it names."""
    with caplog.at_level(logging.INFO, "penstock"):
        compiled(*stages, BatchStage(1))
    for record in caplog.records:
        assert "`dataset[0]` (a _io.BytesIO) has one position" in record.getMessage()
        assert record.getMessage().startswith("Dataset(ID:0) list: ")
    return [(record.name, record.levelname) for record in caplog.records]


def test_the_log_says_why_processes_were_chosen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert told(caplog, SourceStage(OPEN)) == [("penstock.autotune", "INFO")]


def test_requested_threads_are_kept_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = SourceStage(OPEN, executor="thread")
    assert told(caplog, stage) == [("penstock", "WARNING")]
    assert "thread_safe=True" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "stage",
    [
        SourceStage([1]),
        SourceStage(OPEN, executor="process"),
        SourceStage(OPEN, executor="inline"),
        SourceStage(OPEN, thread_safe=True, executor="thread"),
        SourceStage([1], thread_safe=False),
    ],
    ids=repr,
)
def test_the_log_is_silent_where_nothing_is_surprising(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(caplog, stage) == []


@pytest.mark.parametrize(
    ("stage", "start", "bounds"),
    [
        (MapStage(decode), 3, (1, MAX_WORKERS)),
        (MapStage(decode, num_parallel_workers=7), 7, (1, MAX_WORKERS)),
        (MapStage(decode, num_parallel_workers=200), 200, (1, 200)),
        (MapStage(decode, num_parallel_workers=(2, 9)), 2, (2, 9)),
        (MapStage(decode, executor="inline"), 1, (1, 1)),
    ],
    ids=repr,
)
def test_workers_start_where_the_user_says(
    stage: Stage, start: int, bounds: tuple[int, int]
) -> None:
    segment = compiled(DATA, stage, BatchStage(1)).segments[-1]
    assert (segment.num_parallel_workers, segment.bounds) == (start, bounds)


def test_an_iterable_is_read_by_one_worker() -> None:
    stream = SourceStage(iter([1]), iterable=True)
    first = compiled(stream, MapStage(decode), BatchStage(1)).segments[0]
    assert (first.num_parallel_workers, first.bounds) == (1, (1, 1))


def test_a_stage_that_the_user_excludes_is_not_tuned() -> None:
    recipe = compiled(
        DATA,
        MapStage(decode, num_parallel_workers=2),
        MapStage(flip, tune=False),
        BatchStage(1),
    )
    assert [segment.tunable for segment in recipe.segments] == [True, True, False]


class Many:
    """A dataset that reads several samples at once."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def operation(stage: Stage, source: SourceStage = DATA) -> Operation:
    return compiled(source, stage, BatchStage(1)).segments[-1].program.operations[-1]


def test_a_dataset_that_reads_many_at_once_is_asked_for_many() -> None:
    for source, many in ((SourceStage(Many()), [1, 2]), (DATA, None)):
        first = compiled(source, BatchStage(1)).segments[0].program.operations[0]
        assert isinstance(first, Read)
        assert (first.get_many and first.get_many([1, 2])) == many


def test_iterables_and_filters_have_operations_of_their_own() -> None:
    stream = SourceStage(iter([1]), iterable=True)
    first = compiled(stream, BatchStage(1)).segments[0].program.operations[0]
    assert isinstance(first, ReadOn)
    assert isinstance(operation(FilterStage(wanted)), Filter)


class Augment:
    """A function that is an object, and asks for both `rng` and `ctx`."""

    def __call__(self, sample: Any, *, ctx: Any, rng: Any) -> Any:
        return sample


@pytest.mark.parametrize(
    ("function", "wants_rng", "wants_ctx"),
    [
        (decode, False, False),
        (flip, True, False),
        (Augment(), True, True),
        (partial(flip, rng=None), True, False),
        (lambda rng: rng, False, False),
        (lambda sample, context: sample, False, False),
        (int, False, False),
        (np.negative, False, False),
        (torch.nn.Identity(), False, False),
    ],
)
def test_a_functions_parameter_names_say_what_it_asks_for(
    function: Any,
    wants_rng: bool,  # noqa: FBT001
    wants_ctx: bool,  # noqa: FBT001
) -> None:
    map_operation = operation(MapStage(function))
    assert isinstance(map_operation, Map)
    assert (map_operation.wants_rng, map_operation.wants_ctx) == (wants_rng, wants_ctx)
    assert map_operation.number == 1
