"""What becomes of a recipe's segments if all work is in worker processes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.in_children import in_children
from penstock.engine.plan import AssignedPlan
from penstock.engine.recipe import Recipe, SegmentRecipe
from penstock.pipeline.stages import BatchStage, FilterStage, MapStage, SourceStage
from support.recipes import DATA, compiled, decode, flip, wanted


async def fetch(sample: Any) -> Any:
    """Be a coroutine function."""
    return sample


def shown(segments: tuple[SegmentRecipe, ...]) -> list[tuple[str, list[str]]]:
    """Return the executor and the stages of each segment."""
    return [
        (segment.executor, [step.stage for step in segment.program.operations])
        for segment in segments
    ]


def within(recipe: Recipe) -> list[tuple[str, list[str]]]:
    """Return the same of what runs in each worker process."""
    return shown(recipe.elsewhere(0).segments)


def test_all_that_makes_samples_is_one_segment_of_processes() -> None:
    before = compiled(
        DATA,
        MapStage(decode, num_parallel_workers=5),
        MapStage(flip, executor="thread"),
        BatchStage(4),
    )
    assert [segment.num_parallel_workers for segment in before.segments] == [3, 5, 3]
    after = in_children(before, 2)
    stages = ["Dataset(ID:0) data", "Map(ID:1) decode", "Map(ID:2) flip"]
    assert shown(after.segments) == [("process", stages)]
    (far,) = after.segments
    assert (far.name, far.num_parallel_workers, far.children) == (
        "Map(ID:2) flip",
        5,
        2,
    )
    assert far.stages == (*stages, "Batch(ID:3)")
    assert within(after) == [("inline", stages)]


def test_processes_that_the_user_asked_for_are_as_many_as_there_are_cores() -> None:
    stage = MapStage(decode, executor="process", num_parallel_workers=2)
    (far,) = in_children(compiled(DATA, stage, BatchStage(4)), 1).segments
    assert (far.children, far.num_parallel_workers) == (None, 2)


def test_coroutines_stay_coroutines_there() -> None:
    source = SourceStage(list(range(10)), name="data")
    recipe = compiled(source, MapStage(fetch), MapStage(decode), BatchStage(4))
    after = in_children(recipe)
    assert [kind for kind, _ in within(after)] == ["inline", "async", "inline"]
    assert [segment.executor for segment in after.segments] == ["process"]


@pytest.mark.parametrize(
    ("executor", "goes"), [("auto", True), ("process", True), ("thread", False)]
)
def test_maps_of_whole_batches_go_along_unless_the_user_placed_them(
    executor: Any,
    goes: bool,  # noqa: FBT001
) -> None:
    behind = MapStage(decode, executor=executor)
    before = compiled(DATA, BatchStage(4, collate_fn=list), behind)
    after = in_children(before)
    assert len(after.segments) == (1 if goes else 3)
    assert after.late_work is goes
    assert not before.late_work
    names = ("Dataset(ID:0) data", "Batch(ID:1)")
    more = ("Batch(ID:1)", "Map(ID:2) decode") if goes else ()
    assert after.segments[0].stages == names + more
    kinds = [segment.per_batch for segment in after.elsewhere(0).segments]
    assert kinds == ([False, True, True] if goes else [False])


def test_after_a_filter_the_feed_works_on_whole_batches() -> None:
    recipe = compiled(DATA, FilterStage(wanted), BatchStage(4), MapStage(decode))
    assert not in_children(recipe).late_work


def test_a_process_gets_no_plan_no_cache_and_nothing_of_the_device() -> None:
    recipe = in_children(compiled(DATA, MapStage(decode), BatchStage(4))).elsewhere(0)
    assert isinstance(recipe.plan, AssignedPlan)
    assert (recipe.caches, recipe.device, recipe.buffers.pin) == ((), None, None)
    (segment,) = recipe.segments
    assert (segment.subjects, segment.program.doubtful) == ((), ())
