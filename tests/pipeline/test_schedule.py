"""Schedules: curves, policy strings, couplings, and their preview."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.engine.plan import Place
from penstock.engine.plan.plan import Timeline
from penstock.pipeline.schedule import Curve, as_curve
from support import warm

LENGTH = 1000


def place(samples: int, step: int = 0) -> Place:
    epoch, position = divmod(samples, LENGTH)
    return Place(epoch, position, step, LENGTH)


def settings(schedule: Any, world: int = 1, epochs: int = 3) -> list[Any]:
    """Return the settings of each batch, as the timeline walks over them."""
    resolved = schedule.resolve(world)
    timeline = Timeline(resolved, LENGTH, drop_last=False)
    return [
        resolved.at(timeline.place(epoch, batch))
        for epoch in range(epochs)
        for batch in range(timeline.steps_in(epoch))
    ]


CURVES = [
    (ps.schedule.constant(3), {0: 3, 5000: 3}),
    (ps.schedule.steps({0: 1, 1: 2, 2.5: 4}), {0: 1, 999: 1, 2499: 2, 2500: 4}),
    (ps.schedule.steps({0: 1, 70: 2}, "samples"), {69: 1, 70: 2, 10**9: 2}),
    (ps.schedule.linear(0, 10, end=2), {0: 0, 500: 2.5, 2000: 10, 9000: 10}),
    (ps.schedule.linear(10, 0, begin=1, end=2), {0: 10, 1000: 10, 1500: 5, 2000: 0}),
    (ps.schedule.cosine(0, 1, end=2), {0: 0, 1000: 0.5, 500: 0.5 - math.sqrt(0.125)}),
    (ps.schedule.linear(128, 224, end=1, multiple_of=32), {0: 128, 333: 128, 334: 160}),
    (ps.schedule.function(lambda epoch: epoch**2), {0: 0, 1999: 1, 3000: 9}),
]


@pytest.mark.parametrize(("curve", "values"), CURVES)
def test_a_curve_has_its_value_at_each_place(
    curve: Curve, values: dict[int, float]
) -> None:
    for samples, value in values.items():
        assert curve.at(place(samples)) == pytest.approx(value)


def test_steps_are_counted_as_steps() -> None:
    curve = ps.schedule.steps({0: 1, 30: 2}, "steps")
    assert [curve.at(place(0, step)) for step in (0, 29, 30)] == [1, 1, 2]


@given(
    first=st.integers(1, 300),
    last=st.integers(1, 300),
    end=st.floats(0.01, 3),
    multiple_of=st.integers(1, 50),
    unit=st.sampled_from(["epochs", "samples", "steps"]),
)
def test_a_ramp_announces_each_change_of_its_value_and_no_other(
    first: int, last: int, end: float, multiple_of: int, unit: Any
) -> None:
    until = end if unit == "epochs" else end * LENGTH
    curve = ps.schedule.linear(
        first, last, end=until, multiple_of=multiple_of, unit=unit
    )

    def at(n: int) -> Place:
        return place(n, n)

    now = 0
    while (change := curve.next_change(at(now))) is not None:
        assert change.value > now
        value = curve.at(at(now))
        assert curve.at(at(change.value - 1)) == value
        assert curve.at(at(change.value)) != value
        now = change.value
    assert curve.at(at(now)) == curve.at(at(10**7))


def test_a_policy_string_is_read_as_moxing_writes_it() -> None:
    schedule = ps.schedule.policy("1:128-100, 2:224-100,3:288-50")
    steps = settings(schedule, world=2)
    sizes = [(s.global_size, s.image_size) for s in steps]
    assert sizes == [(200, 128)] * 5 + [(200, 224)] * 5 + [(100, 288)] * 10


def test_a_policy_accepts_tables_for_the_learning_rate_and_the_momentum() -> None:
    schedule = ps.schedule.policy(
        "2:128-100,4:224-50",
        coupling="linear",
        lr_mult=ps.schedule.steps({0: 1.0, 3: 0.1}),
        momentum=ps.schedule.steps({0: 0.85, 2: 0.9}),
    )
    lines = schedule.preview(LENGTH, world=2).splitlines()[1:-1]
    rows = [line.split() for line in lines]
    assert [(row[0], row[4], row[5]) for row in rows] == [
        ("0", "1", "0.85"),
        ("2", "0.5", "0.9"),
        ("3", "0.05", "0.9"),
    ]


@pytest.mark.parametrize("text", ["", "20:128", "20:128-0", "20:1-2,20:1-2", "a:b-c"])
def test_a_mistake_in_a_policy_string_is_an_error_that_shows_an_example(
    text: str,
) -> None:
    with pytest.raises(ps.SpecError, match="END_EPOCH:IMAGE-BATCH"):
        ps.schedule.policy(text)


@pytest.mark.parametrize(
    ("coupling", "factors"),
    [("none", [1, 1]), ("linear", [1, 4]), ("sqrt", [1, 2]), (0.75, [1, 4**0.75])],
)
def test_the_learning_rate_is_coupled_to_the_batch_size(
    coupling: Any, factors: list[float]
) -> None:
    batches = ps.schedule.steps({0: 50, 1: 200})
    schedule = ps.schedule.of(batch_size=batches, coupling=coupling)
    steps = settings(schedule, world=3)
    assert [steps[0].lr_mult, steps[-1].lr_mult] == pytest.approx(factors)
    halved = ps.schedule.of(batch_size=batches, coupling="linear", base_batch=100)
    assert settings(halved)[0].lr_mult == 0.5


@pytest.mark.parametrize(
    "sizes",
    [
        lambda n: ps.schedule.steps({0: n, 1: 4 * n}),
        lambda n: ps.schedule.linear(n, 4 * n, end=2, multiple_of=n),
    ],
)
def test_a_description_holds_global_sizes_only(sizes: Any) -> None:
    def told(size: int, world: int) -> Any:
        schedule = ps.schedule.of(sizes(size), coupling="sqrt", base_batch=2 * size)
        return schedule.resolve(world).describe(), settings(schedule, world)

    assert told(8, 4) == told(16, 2) == told(32, 1)
    assert told(8, 4) != told(8, 2)


def test_a_row_of_a_table_of_stages_inherits_what_it_leaves_out() -> None:
    schedule = ps.schedule.stages(
        {"until": 1, "batch_size": 100, "momentum": 0.8, "strength": 1},
        {"until": 2, "momentum": 0.9},
        {"until": 3, "batch_size": 200, "strength": 2},
    )
    steps = settings(schedule)
    values = [(s.global_size, s.momentum, s.strength) for s in steps]
    assert values[0] == (100, 0.8, 1)
    assert values[10] == (100, 0.9, 1)
    assert values[-1] == (200, 0.9, 2)
    with pytest.raises(ps.SpecError, match="must set `momentum`"):
        ps.schedule.stages({"until": 1, "batch_size": 1}, {"until": 2, "momentum": 1})


def test_the_preview_says_what_is_in_force_from_when_on() -> None:
    schedule = ps.schedule.policy("2:128-100,4:224-50", coupling="linear")
    lines = schedule.preview(LENGTH, world=2).splitlines()
    assert lines[0].split()[:4] == ["epoch", "step", "batch", "image"]
    assert lines[1].split() == ["0", "0", "200", "128", "1", "-", "-"]
    assert lines[2].split() == ["2", "10", "100", "224", "0.5", "-", "-"]
    assert lines[3] == "30 steps in 4 epochs of 1000 samples"
    fewer = schedule.preview(LENGTH, world=2, epochs=2).splitlines()
    assert fewer == [*lines[:2], "10 steps in 2 epochs of 1000 samples"]


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (ps.schedule.steps({0: 96, 30: 128}), [(0, 0), (30, 300)]),
        (ps.schedule.steps({0: 96, 1.25: 128}), [(0, 0), (1.3, 13)]),
        (ps.schedule.steps({0: 96, 1234: 128}, "samples"), [(0, 0), (1.3, 13)]),
        (ps.schedule.steps({0: 96, 13: 128}, "steps"), [(0, 0), (1.3, 13)]),
        (
            ps.schedule.linear(96, 128, end=1, multiple_of=16),
            [(0, 0), (0.5, 5), (1, 10)],
        ),
        (
            ps.schedule.function(lambda e: 32 * (e + 3), until=2),
            [(0, 0), (1, 10), (2, 20)],
        ),
    ],
)
def test_the_preview_shows_each_change_of_any_value(
    curve: Curve, expected: list[tuple[float, int]]
) -> None:
    preview = ps.schedule.of(100, image_size=curve).preview(LENGTH)
    _, *rows, end = (line.split() for line in preview.splitlines())
    assert [(float(row[0]), int(row[1])) for row in rows] == expected
    assert int(end[3]) == int(expected[-1][0]) + 1  # epochs


def test_the_preview_of_a_ramp_shows_its_epochs_and_where_it_ends() -> None:
    ramp = ps.schedule.cosine(1.0, 0.0, end=2.5)
    rows = ps.schedule.of(100, lr_mult=ramp).preview(LENGTH).splitlines()[1:-1]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "2.5"]


def eight(epoch: int) -> int:
    return 8


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (ps.schedule.of, "needs `batch_size`"),
        (lambda: ps.schedule.of(8, global_batch_size=8), "needs `batch_size`"),
        (lambda: ps.schedule.of("8"), "must be a number"),  # type: ignore[arg-type]
        (lambda: ps.schedule.of(8, coupling="cubic"), "`coupling` must be"),  # type: ignore[arg-type]
        (lambda: ps.schedule.steps({1: 8}), "must begin at 0"),
        (lambda: ps.schedule.steps({0: 8}, "days"), "`unit` must be"),  # type: ignore[arg-type]
        (lambda: ps.schedule.linear(1, 2, end=0), "must end after it begins"),
        (lambda: settings(ps.schedule.of(ps.schedule.linear(1, 9, end=1))), "multiple"),
        (
            lambda: settings(ps.schedule.of(as_curve("b", eight))),
            "needs `until=`",
        ),
    ],
)
def test_a_mistake_is_an_error_with_the_cure(wrong: Any, told: str) -> None:
    with pytest.raises(ps.SpecError, match=told):
        wrong()


def test_a_function_may_give_the_batch_size_up_to_an_epoch() -> None:
    curve = ps.schedule.function(lambda epoch: 100 * (epoch + 1), until=2)
    sizes = [s.global_size for s in settings(ps.schedule.of(curve), epochs=4)]
    assert sizes == [100] * 10 + [200] * 5 + [300] * 4 + [300] * 4


DESCRIBED = """
import penstock as ps
def rate(epoch):
    def decay(base): return base ** epoch
    return decay(0.9) if str(epoch) in {"1", "2", "3", "5", "8"} else 1.0
print(ps.schedule.function(rate).describe())
"""


@pytest.mark.long
def test_a_function_is_described_alike_in_all_processes() -> None:
    command = [sys.executable, "-P", "-c", DESCRIBED]
    described = {
        warm.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, brief=True).stdout
        for seed in "12"
    }
    assert len(described) == 1
    assert "'name': 'rate'" in described.pop()
