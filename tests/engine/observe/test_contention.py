"""The engine pauses now and then to find what loading costs the trainer."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from penstock.engine.observe import contention
from penstock.engine.observe.contention import (
    CYCLE,
    CYCLES,
    WARM_STEPS,
    ContentionMeter,
    compare,
)
from penstock.engine.observe.observation import ContentionObservation


def found(
    loading: float, paused: float, noise: float, seed: int = 0
) -> ContentionObservation:
    dice = random.Random(seed)
    cycles = []
    for _ in range(CYCLES):
        gaps = [g * dice.gauss(1, noise) for g in (*[loading] * 3, paused)]
        cycles.append((sum(gaps) / 4, gaps[-1]))
    return compare(cycles)


def test_a_gap_that_grows_gives_certainty() -> None:
    contention = found(0.0072, 0.005, 0.05)
    assert contention.certain
    assert 0.25 < contention.growth < 0.4


def test_noise_alone_is_hardly_ever_mistaken_for_a_cost() -> None:
    seen = [found(0.005, 0.005, 0.05, seed) for seed in range(200)]
    assert sum(each.certain and each.growth >= 0.05 for each in seen) <= 4


def test_a_few_slow_steps_do_not_make_a_finding() -> None:
    cycles = [(0.005, 0.005)] * 8 + [(0.5, 0.005)] * 4
    assert not compare(cycles).certain


class Engine:
    """Counts its pauses; the test says whether it is steady and resting."""

    def __init__(self) -> None:
        self.steady = self.resting = True
        self.paused = 0
        self.pauses = 0

    def pause(self) -> None:
        self.paused += 1
        self.pauses += 1

    def resume(self) -> None:
        self.paused -= 1


def train(meter: ContentionMeter, engine: Engine, steps: int) -> None:
    """Take `steps` steps, each 3 ms longer while the engine loads."""
    for _ in range(steps):
        meter.asked(0.005 if engine.paused else 0.008)
        meter.given(engine)


ENOUGH = 2 * WARM_STEPS + (CYCLE + 1) * CYCLES


def test_the_meter_pauses_the_engine_once_a_cycle_and_then_rests() -> None:
    meter, engine = ContentionMeter(), Engine()
    meter.armed = True
    train(meter, engine, ENOUGH)
    assert meter.found is not None
    assert meter.found.certain
    assert meter.found.growth > 0.2
    assert (engine.pauses, engine.paused) == (CYCLES, 0)
    train(meter, engine, ENOUGH)
    assert engine.pauses == CYCLES


def test_each_pause_between_findings_is_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, engine, found_s = ContentionMeter(), Engine(), []
    meter.armed = True
    for second in range(1000):
        monkeypatch.setattr(contention.time, "monotonic", lambda at=second: float(at))
        pauses = engine.pauses
        for _ in range(CYCLES * CYCLE + WARM_STEPS):
            meter.asked(0.005)
            meter.given(engine)
        if engine.pauses > pauses:
            found_s.append(second)
    gaps = [b - a for a, b in pairwise(found_s) if b > a + 2]
    assert [round(gap / 60) for gap in gaps] == [1, 2, 4, 8]


@pytest.mark.parametrize("missing", ["armed", "steady", "resting"])
def test_the_meter_finds_nothing_where_it_may_not_or_cannot_look(missing: str) -> None:
    meter, engine = ContentionMeter(), Engine()
    meter.armed = missing != "armed"
    engine.steady, engine.resting = missing != "steady", missing != "resting"
    train(meter, engine, ENOUGH)
    assert meter.found is None
    meter.reset()
    assert engine.paused == 0


def test_no_engine_stays_paused_after_the_trainer_leaves_its_loop() -> None:
    meter, engine = ContentionMeter(), Engine()
    meter.armed = True
    while not engine.paused:
        train(meter, engine, 1)
    meter.reset()
    assert engine.paused == 0
