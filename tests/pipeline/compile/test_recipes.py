"""Stages become a recipe of order, seed and batches, or are refused with a cure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.engine.plan import Shard
from penstock.errors import SpecError
from penstock.pipeline.stages import (
    BatchStage,
    DeviceStage,
    FilterStage,
    RepeatStage,
    SelectStage,
    ShuffleStage,
    SourceStage,
    Stage,
    TakeStage,
)
from support.recipes import DATA, compiled, wanted


def test_the_order_applies_the_stages_in_the_order_they_are_written() -> None:
    recipe = compiled(
        DATA, SelectStage([9, 8, 7, 6]), TakeStage(3), RepeatStage(2), BatchStage(6)
    )
    plan = recipe.plan
    assert plan.rows(plan.batch(0)).indices.tolist() == [9, 8, 7, 9, 8, 7]


@pytest.mark.parametrize(
    ("stages", "seed"),
    [((), 11), ((ShuffleStage(5),), 5), ((ShuffleStage(5), ShuffleStage(6)), 6)],
)
def test_random_functions_take_the_seed_of_the_last_shuffle(
    stages: Sequence[Stage], seed: int
) -> None:
    assert compiled(DATA, *stages, BatchStage(1)).seed == seed


@pytest.mark.parametrize(
    ("batch", "n_global"), [(BatchStage(2), 4), (BatchStage(global_size=6), 6)]
)
def test_a_size_is_per_rank_and_a_global_size_over_all_ranks(
    batch: BatchStage, n_global: int
) -> None:
    plan = compiled(DATA, batch, shard=Shard(1, 2)).plan.batch(0)
    assert plan.n_global == n_global
    assert plan.n_rows == n_global // 2


def test_batches_after_a_filter_are_formed_from_what_it_keeps() -> None:
    plain = compiled(DATA, BatchStage(4, drop_last=True))
    filtered = compiled(DATA, FilterStage(wanted), BatchStage(4, drop_last=True))
    assert (plain.repack, plain.plan.steps_in(0), plain.buffers.keep) == (
        False,
        2,
        False,
    )
    assert (filtered.repack, filtered.plan.steps_in(0)) == (True, 3)
    assert filtered.buffers.keep


def test_the_batch_stage_says_how_batches_are_made() -> None:
    recipe = compiled(
        DATA,
        BatchStage(2, collate_fn=list, on_error="substitute"),
        DeviceStage.of("meta"),
    )
    assert recipe.buffers.collate is list
    assert recipe.buffers.substitute
    assert recipe.device == DeviceStage.of("meta")
    assert compiled(DATA, BatchStage(2)).device is None


REFUSED: dict[str, tuple[list[Stage], int, tuple[str, ...]]] = {
    "no batch size": ([DATA], 1, ("has no batch size", "end it with .batch(n)")),
    "a filter over ranks": (
        [DATA, FilterStage(wanted), BatchStage(2)],
        4,
        ("one rank, got 4 ranks", "use select()"),
    ),
    "an iterable over ranks": (
        [SourceStage(iter([1]), iterable=True), BatchStage(2)],
        2,
        ("one rank, got 2 ranks", "use select()"),
    ),
    "take nothing": (
        [DATA, TakeStage(0), BatchStage(2)],
        1,
        ("`count` must be an int >= 1, got 0", "keeps at least one sample"),
    ),
    "repeat nothing": (
        [DATA, RepeatStage(0), BatchStage(2)],
        1,
        ("`count` must be an int >= 1, got 0", "repeat(1)"),
    ),
    "select nothing": (
        [DATA, SelectStage([]), BatchStage(2)],
        1,
        ("`indices` must not be empty", "select at least one"),
    ),
    "select what is not there": (
        [DATA, SelectStage([3, 10]), BatchStage(2)],
        1,
        ("must be >= 0 and < 10", "got 10 at place 1", "leave out"),
    ),
    "a batch larger than the epoch": (
        [DATA, BatchStage(11, drop_last=True)],
        1,
        ("11", "10"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_stages_that_make_no_pipeline_are_refused_by_value_rule_and_cure(
    case: str,
) -> None:
    stages, ranks, parts = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        compiled(*stages, shard=Shard(0, ranks))
    for part in parts:
        assert part in str(caught.value)
