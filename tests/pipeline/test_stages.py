"""Stages check themselves when they are made, and print as the code that makes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.engine.plan import Shard
from penstock.errors import SpecError
from penstock.pipeline.stages import (
    BatchStage,
    DeviceStage,
    FilterStage,
    MapStage,
    RepeatStage,
    SelectStage,
    ShuffleStage,
    SourceStage,
    Stage,
    TakeStage,
    check_place,
    check_sized,
    name_of,
)


def decode(sample: Any) -> Any:
    return sample


SOURCE = SourceStage([1, 2, 3])
STREAM = SourceStage(iter([1]), iterable=True)
ANY: Any = None

# The call, the value that the error shows, the rule, and the cure.
REFUSED: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "unknown executor": (
        lambda: MapStage(decode, executor="threads"),  # type: ignore[arg-type]
        "got 'threads'",
        "`executor` must be one of",
        "auto, inline, thread, process",
    ),
    "no workers": (
        lambda: MapStage(decode, num_parallel_workers=0),
        "got 0",
        "`num_parallel_workers` must be >= 1",
        'use executor="inline"',
    ),
    "negative workers": (
        lambda: FilterStage(decode, num_parallel_workers=-2),
        "got -2",
        "`num_parallel_workers` must be >= 1",
        'use executor="inline"',
    ),
    "workers that are no number": (
        lambda: SourceStage([1], num_parallel_workers="4"),  # type: ignore[arg-type]
        "got '4'",
        "`num_parallel_workers` must be >= 1",
        'use executor="inline"',
    ),
    "three bounds": (
        lambda: MapStage(decode, num_parallel_workers=(1, 2, 3)),  # type: ignore[arg-type]
        "got (1, 2, 3)",
        "must be n or",
        "(lo, hi)",
    ),
    "bounds the wrong way": (
        lambda: MapStage(decode, num_parallel_workers=(4, 2)),
        "got (4, 2)",
        "must have lo <= hi",
        "(lo, hi)",
    ),
    "a lower bound of nothing": (
        lambda: MapStage(decode, num_parallel_workers=(0, 2)),
        "got (0, 2)",
        "must be >= 1",
        'use executor="inline"',
    ),
    "inline workers": (
        lambda: MapStage(decode, num_parallel_workers=3, executor="inline"),
        "num_parallel_workers=3",
        'executor="inline" has one worker',
        'use executor="thread"',
    ),
    "several readers of an iterable": (
        lambda: SourceStage(iter([1]), iterable=True, num_parallel_workers=2),
        "num_parallel_workers=2",
        "is read by one worker",
        "give it to the map()",
    ),
    "several readers of an iterable, shared out": (
        lambda: SourceStage(iter([1]), iterable=True, num_parallel_workers=(1, 2)),
        "num_parallel_workers=(1, 2)",
        "is read by one worker",
        "read it with penstock.DataLoader(dataset, num_workers=n)",
    ),
    "an iterable in processes": (
        lambda: SourceStage(iter([1]), iterable=True, executor="process"),
        'executor="process"',
        "is read in the trainer's process",
        "is for its map()",
    ),
    "an empty dataset": (
        lambda: SourceStage([]),
        "dataset list is empty",
        "must hold at least",
        "one sample",
    ),
    "no function": (
        lambda: MapStage("decode"),  # type: ignore[arg-type]
        "got 'decode'",
        "Pipeline.map() needs a function",
        "of one sample",
    ),
    "no predicate": (
        lambda: FilterStage(None),  # type: ignore[arg-type]
        "got None",
        "Pipeline.filter() needs a function",
        "of one sample",
    ),
    "a seed that is none": (
        lambda: ShuffleStage(-1),
        "got -1",
        "`seed` must be an int",
        "from 0 to 2**64 - 1",
    ),
    "no batch size": (
        lambda: check_sized(BatchStage(), scheduled=False),
        "got []",
        "Pipeline.batch() needs one size",
        "batch(global_size=n)",
    ),
    "two batch sizes": (
        lambda: check_sized(BatchStage(4, global_size=8), scheduled=False),
        "got [4, 8]",
        "batch(n), samples a rank",
        "batch(global_size=n)",
    ),
    "a batch size beside a schedule": (
        lambda: check_sized(BatchStage(4), scheduled=True),
        "got [4]",
        "has a schedule",
        "call .batch() without a size",
    ),
    "batch size 0": (
        lambda: BatchStage(0),
        "got 0",
        "the batch size must be an int",
        ">= 1",
    ),
    "a schedule for a batch size": (
        lambda: BatchStage(ps.schedule.of(batch_size=8)),  # type: ignore[arg-type]
        "got schedule.of",
        "the batch size must be an int",
        "a schedule is given where the pipeline begins",
    ),
    "a broken batch size": (
        lambda: BatchStage(global_size=2.5),  # type: ignore[arg-type]
        "got 2.5",
        "the batch size must be an int",
        ">= 1",
    ),
    "an unknown tail": (
        lambda: BatchStage(4, tail="drop"),  # type: ignore[arg-type]
        "got 'drop'",
        "`tail` must be",
        "'pad_mask' or 'pad_repeat'",
    ),
    "an unknown treatment of errors": (
        lambda: BatchStage(4, on_error="skip"),  # type: ignore[arg-type]
        "got 'skip'",
        "`on_error` must be",
        "'raise' or 'substitute'",
    ),
    "an error budget beyond all": (
        lambda: BatchStage(4, error_budget=5),
        "got 5",
        "is the share of an epoch's samples",
        "from 0 to 1",
    ),
    "an unknown device": (
        lambda: DeviceStage.of("gpu"),
        "got 'gpu'",
        "`device` must be one such as",
        '"cpu" or "cuda:0"',
    ),
    "a device before batches": (
        lambda: check_place((SOURCE,), DeviceStage.of("cpu")),
        "to_device('cpu')",
        "copies batches",
        "put it after .batch(n)",
    ),
    "a filter after batches": (
        lambda: check_place((SOURCE, BatchStage(4)), FilterStage(decode)),
        "filter(decode)",
        "cannot come after .batch()",
        "store samples before it",
    ),
    "two batches": (
        lambda: check_place((SOURCE, BatchStage(4)), BatchStage(2)),
        "batch(2)",
        "cannot come after .batch()",
        "store samples before it",
    ),
    "an iterable shuffled": (
        lambda: check_place((STREAM,), ShuffleStage(0)),
        "shuffle(seed=0)",
        "an iterable dataset does not have",
        "use a map-style one",
    ),
    "an iterable selected from": (
        lambda: check_place((STREAM, MapStage(decode)), SelectStage([0])),
        "select([0])",
        "needs samples with an index",
        "use a map-style one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_impossible_stage_is_refused_by_value_rule_and_cure(case: str) -> None:
    make, value, rule, cure = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        make()
    for part in (value, rule, cure):
        assert part in str(caught.value)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has what is refused"
)
def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SpecError, match=re.escape('use to_device("cpu")')):
        DeviceStage.of("cuda")


@pytest.mark.parametrize("bounds", [(None, 4), (2, None)])
def test_bounds_must_be_numbers(bounds: Any) -> None:
    with pytest.raises(SpecError, match="num_parallel_workers"):
        MapStage(decode, num_parallel_workers=bounds)


@pytest.mark.parametrize(
    "make",
    [lambda: BatchStage(True), lambda: MapStage(decode, num_parallel_workers=True)],  # noqa: FBT003
)
def test_a_bool_is_not_a_number(make: Callable[[], Any]) -> None:
    with pytest.raises(SpecError):
        make()


class Photos(list[int]):
    """A dataset with a class of its own."""


class Augment:
    """A function that is an object."""

    def __call__(self, sample: Any) -> Any:
        return sample


PRINTED: list[tuple[Stage, str]] = [
    (SourceStage(Photos([1])), "Pipeline.from_dataset(<Photos>)"),
    (
        SourceStage(Photos([1]), num_parallel_workers=2, thread_safe=False, name="n"),
        (
            "Pipeline.from_dataset(<Photos>, num_parallel_workers=2, name='n', "
            "thread_safe=False)"
        ),
    ),
    (MapStage(decode), ".map(decode)"),
    (
        MapStage(
            decode, num_parallel_workers=(1, 4), executor="thread", name="d", tune=False
        ),
        (
            ".map(decode, num_parallel_workers=(1, 4), executor='thread', name='d', "
            "tune=False)"
        ),
    ),
    (
        FilterStage(Augment(), num_parallel_workers=3),
        ".filter(Augment, num_parallel_workers=3)",
    ),
    (SelectStage([3, 1]), ".select([3, 1])"),
    (SelectStage(range(9)), ".select([0, 1, 2, ...])"),
    (ShuffleStage(7), ".shuffle(seed=7)"),
    (TakeStage(5), ".take(5)"),
    (RepeatStage(2), ".repeat(2)"),
    (BatchStage(64), ".batch(64)"),
    (
        BatchStage(global_size=64, drop_last=True, on_error="substitute"),
        ".batch(global_size=64, drop_last=True, on_error='substitute')",
    ),
    (DeviceStage.of("cpu"), ".to_device('cpu')"),
]


@pytest.mark.parametrize(("stage", "code"), PRINTED, ids=[code for _, code in PRINTED])
def test_a_stage_prints_as_the_code_that_makes_it(stage: Stage, code: str) -> None:
    assert repr(stage) == code


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (decode, "decode"),
        (lambda sample: sample, "lambda"),
        (Augment(), "Augment"),
        (str.upper, "upper"),
        (int, "int"),
    ],
)
def test_a_function_has_the_name_that_the_user_gave_it(
    function: Any, name: str
) -> None:
    assert name_of(function) == name
    assert MapStage(function).label == name
    assert MapStage(function, name="mine").label == "mine"


def test_stages_are_equal_if_their_arguments_are() -> None:
    assert (
        MapStage(decode, num_parallel_workers=2)
        == MapStage(decode, num_parallel_workers=2)
        != MapStage(decode, num_parallel_workers=3)
    )
    assert Shard(0, 1) == Shard.single()


def test_stages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        TakeStage(1).count = 2  # type: ignore[misc]
