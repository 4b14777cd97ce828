"""Batches found in O(log) are those that a walk over every step finds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.engine.plan import Change, ConstantSchedule, Place, Setting
from penstock.engine.plan.plan import Timeline
from penstock.errors import SpecError


@dataclass(frozen=True)
class Stages:
    """Global sizes by samples or steps as (start, size), the first from 0."""

    unit: Literal["samples", "steps"]
    table: tuple[tuple[int, int], ...]

    def _now(self, place: Place) -> int:
        return place.samples if self.unit == "samples" else place.step

    def at(self, place: Place) -> Setting:
        sizes = [size for start, size in self.table if start <= self._now(place)]
        return Setting(sizes[-1])

    def next_change(self, place: Place) -> Change | None:
        ahead = [start for start, _ in self.table if start > self._now(place)]
        return Change(self.unit, ahead[0]) if ahead else None

    def describe(self) -> dict[str, object]:
        return {"kind": "stages", "unit": self.unit, "table": self.table}


def walk(
    schedule: Stages, length: int, *, drop_last: bool
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield (step, epoch, batch, position, stop, size) of every batch, one by one."""
    step = 0
    for epoch in range(10**9):
        position = batch = 0
        while position < length:
            size = schedule.at(Place(epoch, position, step, length)).global_size
            stop = position + size
            if stop > length and drop_last:
                break
            yield step, epoch, batch, position, min(stop, length), size
            step, batch, position = step + 1, batch + 1, stop


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Stages, int]:
    length = draw(st.integers(1, 40))
    starts = sorted(draw(st.sets(st.integers(1, 150), max_size=4)))
    sizes = draw(
        st.lists(
            st.integers(1, length),
            min_size=len(starts) + 1,
            max_size=len(starts) + 1,
        )
    )
    units: tuple[Literal["samples", "steps"], ...] = ("samples", "steps")
    unit = draw(st.sampled_from(units))
    return Stages(unit, tuple(zip([0, *starts], sizes, strict=True))), length


PAST_THE_END = Stages("samples", ((0, 4), (9, 3)))
"""For ten samples: the next batch after the change would begin at the twelfth."""


@given(schedules(), st.booleans())
@example((PAST_THE_END, 10), False)  # noqa: FBT003 - drawn
@example((PAST_THE_END, 10), True)  # noqa: FBT003 - drawn
def test_every_batch_is_where_a_walk_finds_it(
    case: tuple[Stages, int],
    drop_last: bool,  # noqa: FBT001 - drawn
) -> None:
    schedule, length = case
    timeline = Timeline(schedule, length, drop_last=drop_last)
    batches = walk(schedule, length, drop_last=drop_last)
    steps_in: dict[int, int] = {}
    for step, epoch, batch, position, stop, size in batches:
        span = timeline.span(epoch, batch)
        assert timeline.find(step) == (span, batch)
        assert span.place == Place(epoch, position, step, length)
        assert (span.stop, span.size) == (stop, size)
        assert timeline.place(epoch, batch + 1).step == step + 1
        assert timeline.place(epoch, batch + 1).position == stop
        if batch == 0:
            assert timeline.place(epoch, 0).step == step
        steps_in[epoch] = batch + 1
        if step >= 200 or epoch >= 200:
            steps_in.pop(epoch)
            break
    assert {e: timeline.steps_in(e) for e in steps_in} == steps_in


def test_far_epochs_are_found_without_a_walk() -> None:
    timeline = Timeline(ConstantSchedule(Setting(3)), 10**12, drop_last=True)
    span, batch = timeline.find(10**30)
    assert (span.place.epoch, batch) == divmod(10**30, 333333333333)
    assert timeline.place(10**18, 5) == Place(
        10**18, 15, 10**18 * 333333333333 + 5, 10**12
    )


def test_a_smaller_size_may_still_use_what_a_larger_one_would_drop() -> None:
    schedule = Stages("steps", ((0, 64), (1, 16)))
    timeline = Timeline(schedule, 100, drop_last=True)
    assert timeline.steps_in(0) == 1 + 2
    assert timeline.span(0, 1).place.position == 64
    schedule = Stages("steps", ((0, 30), (2, 25), (3, 10)))
    timeline = Timeline(schedule, 100, drop_last=True)
    assert timeline.steps_in(0) == 2 + 1 + 1
    assert timeline.span(0, 3).place.position == 85


def test_a_change_within_a_batch_waits_for_the_next() -> None:
    timeline = Timeline(Stages("samples", ((0, 10), (25, 5))), 100, drop_last=False)
    assert [timeline.span(0, b).size for b in range(5)] == [10, 10, 10, 5, 5]


@pytest.mark.parametrize("table", [((0, 64),), ((0, 2), (25, 64))])
def test_an_epoch_without_a_batch_is_refused_with_its_cure(
    table: tuple[tuple[int, int], ...],
) -> None:
    message = r"drop_last=True .*10 samples has no batch of 64 .*lower the batch size"
    with pytest.raises(SpecError, match=message):
        Timeline(Stages("samples", table), 10, drop_last=True)


def test_a_schedule_that_never_changes_again_is_refused() -> None:
    class Standing(Stages):
        def next_change(self, place: Place) -> Change:
            return Change("steps", place.step)

    with pytest.raises(SpecError, match="`next_change` must lie beyond 0 steps, got 0"):
        Timeline(Standing("steps", ((0, 1),)), 10, drop_last=False)
