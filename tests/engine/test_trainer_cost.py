"""Loading rests now and then to find what it costs the trainer."""

from __future__ import annotations

import random

import pytest

from penstock.engine import trainer_cost
from penstock.engine.plan import BatchPlan, Shard
from penstock.engine.trainer_cost import (
    KNOWN,
    MIN_BESIDE,
    RARE_S,
    SHARE,
    WARM_STEPS,
    ContentionMeter,
    compare,
)

MARGIN = 0.05
"""Growth that is worth acting on."""
PLAN = BatchPlan(
    epoch=0,
    step=0,
    batch=0,
    start=0,
    last=False,
    n_global=8,
    n_rows=8,
    n_local=8,
    loss_weight=1.0,
    image_size=None,
    lr_mult=1.0,
    momentum=None,
)
STEP_S, SLOWED_S = 0.005, 0.008
"""The trainer's own part of a step, alone and beside loading."""


def noisy(step_s: float, count: int, dice: random.Random) -> list[float]:
    return [step_s * dice.gauss(1, 0.05) for _ in range(count)]


def test_a_step_that_grows_gives_certainty() -> None:
    dice = random.Random(0)
    comparison = compare(noisy(0.0072, 30, dice), noisy(0.005, 3, dice))
    assert comparison is not None
    assert comparison.certain
    assert 0.35 < comparison.growth < 0.55


@pytest.mark.parametrize("alone", [1, 2, 3, 8])
def test_noise_alone_is_hardly_ever_mistaken_for_a_cost(alone: int) -> None:
    mistaken = 0
    for seed in range(200):
        dice = random.Random(seed)
        comparison = compare(noisy(0.005, 30, dice), noisy(0.005, alone, dice))
        assert comparison is not None
        mistaken += comparison.certain and comparison.growth >= 0.05
    assert mistaken <= 10


def test_a_few_slow_steps_do_not_make_a_finding() -> None:
    comparison = compare([0.005] * 20 + [0.5] * 10, [0.005] * 8)
    assert comparison is not None
    assert comparison.growth == 0.0


def test_steps_that_are_long_in_phases_are_compared_by_their_means() -> None:
    beside, alone = [0.005] * 30 + [0.057] * 30, [0.0052] * 7
    comparison = compare(beside, alone)
    assert comparison is not None
    assert comparison.certain
    assert comparison.growth == pytest.approx(0.031 / 0.0052 - 1.0)
    few = compare(beside, alone[:5])
    assert few is not None
    assert not few.certain  # they may all be short by chance
    odd = compare(beside, alone, uneven=True)
    assert odd is not None
    assert not odd.certain


def test_a_few_steps_say_nothing() -> None:
    assert compare([0.005] * (MIN_BESIDE - 1), [0.005] * 8) is None
    assert compare([0.005] * MIN_BESIDE, []) is None
    few = compare([0.0055] * MIN_BESIDE, [0.005, 0.005])
    assert few is not None
    assert not few.certain  # it would be, of three


class World:
    """A clock, an engine that comes to rest in time, and a trainer that it slows."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, one_by_one: bool = True
    ) -> None:
        self.now_s = 100.0
        self.ready_s = 0.0
        """When the batch of the second step is there."""
        self.beside: bool | None = True
        self.step_s, self.slowed = STEP_S, SLOWED_S / STEP_S
        self.absorbs = False
        """Whether the trainer's steps wait for a device that works on in `next()`."""
        self.rests_after_s = 0.001
        self.paused_s: float | None = None
        self.paused_for_s = 0.0
        self.rested_s = 0.0
        self.until_ns = 0
        self.pauses = 0
        monkeypatch.setattr(trainer_cost, "time", self)
        self.meter = ContentionMeter(one_by_one=one_by_one)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.rested_s += seconds

    @property
    def resting(self) -> bool:
        paused_s = self.paused_s
        return paused_s is not None and self.now_s - paused_s >= self.rests_after_s

    @property
    def ready(self) -> bool:
        return self.now_s >= self.ready_s

    fed = False

    def pause(self, until_ns: int) -> None:
        assert self.paused_s is None
        alone = self.fed or not self.meter._one_by_one  # noqa: SLF001 its setting
        assert self.ready or alone
        self.paused_s, self.until_ns = self.now_s, until_ns
        self.pauses += 1

    def resume(self) -> None:
        assert self.paused_s is not None
        self.paused_for_s += self.now_s - self.paused_s
        self.paused_s = None

    def own_s(self) -> float:
        """Return what the trainer's own part of the present step takes."""
        if self.absorbs:
            return self.step_s - self.rested_s
        alone = self.paused_s is not None or not self.beside
        return self.step_s if alone else self.slowed * self.step_s

    def train(self, steps: int, wait_s: float = 0.005, plan: BatchPlan = PLAN) -> None:
        """Take some steps, each longer while the engine loads beside it."""
        for _ in range(steps):
            gap_s = self.own_s()
            self.rested_s = 0.0
            self.now_s += gap_s
            self.meter.asked(gap_s)
            self.now_s += wait_s
            self.meter.given(self if self.beside is not None else None, plan)

    def look(self) -> None:
        """Train until a look begins."""
        while self.paused_s is None:
            self.train(1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_looks_find_what_loading_costs_and_take_a_bounded_share(world: World) -> None:
    begun_s = world.now_s
    world.train(2000)
    comparison = world.meter.comparison
    assert comparison is not None
    assert comparison.certain
    assert (comparison.beside_s, comparison.alone_s) == (SLOWED_S, STEP_S)
    assert world.pauses >= 3
    assert world.paused_for_s <= SHARE * (world.now_s - begun_s)


def test_ranks_in_step_share_what_looks_may_take(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_cost.Shard, "found", lambda: Shard(0, 4))
    begun_s = world.now_s
    world.train(8000)
    assert world.pauses >= 3
    assert world.paused_for_s <= SHARE / 4 * (world.now_s - begun_s)


def test_looks_are_rare_once_enough_is_known(world: World) -> None:
    while world.pauses < KNOWN:
        world.train(1)
    known_s = world.now_s
    while world.pauses == KNOWN:
        world.train(1)
    assert world.now_s - known_s >= RARE_S - 1


def test_looks_come_one_by_one_after_a_long_rest(world: World) -> None:
    world.train(100)
    world.meter.reset()
    world.now_s += 3600.0
    world.meter.asked(0.0)
    pauses = world.pauses
    world.train(5 * MIN_BESIDE)
    assert world.pauses - pauses <= 5


def test_steps_of_a_trainer_that_makes_its_batches_itself_are_alone(
    world: World,
) -> None:
    world.beside = None
    world.train(WARM_STEPS + 3 + 2)
    assert world.meter.comparison is None
    world.beside = True
    world.train(MIN_BESIDE + 1)
    assert world.pauses == 0
    comparison = world.meter.comparison
    assert comparison is not None
    assert comparison.growth == pytest.approx(0.6)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("rests_after_s", [0.0015, 0.004])
def test_a_trainer_that_waits_for_a_device_is_not_called_slowed(
    monkeypatch: pytest.MonkeyPatch,
    rests_after_s: float,
    one_by_one: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(trainer_cost, "waits_for_others", lambda: True)
    world = World(monkeypatch, one_by_one=one_by_one)
    world.absorbs, world.step_s, world.rests_after_s = True, 0.02, rests_after_s
    world.train(4000)
    comparison = world.meter.comparison
    assert world.pauses >= 3
    assert comparison is not None
    assert comparison.growth == pytest.approx(0.0, abs=0.02)


def test_a_trainer_with_other_work_is_not_compared_with_what_it_was(
    world: World,
) -> None:
    world.slowed = 1.0
    world.train(2000)
    world.step_s *= 1.6  # more layers are trained now, for instance
    world.train(2 * trainer_cost.KEPT)
    comparison = world.meter.comparison
    assert comparison is None or not comparison.certain


@pytest.mark.parametrize("slowed", [1.0, 1.02])
@pytest.mark.parametrize("steps", [(1, 4), (1, 1, 2.5), (1, 1, 4), (1, 1, 1, 2.9)])
def test_a_trainer_whose_own_steps_differ_is_not_called_slowed(
    steps: tuple[float, ...], slowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken = 0
    for phase in range(3 * len(steps)):
        world = World(monkeypatch)
        world.train(phase)
        world.slowed = slowed
        for at in range(20_000):
            world.step_s = STEP_S * steps[at % len(steps)]
            world.train(1)
        comparison = world.meter.comparison
        mistaken += (
            comparison is not None and comparison.certain and comparison.growth > MARGIN
        )
    assert mistaken == 0


def test_an_engine_that_does_not_rest_is_asked_ever_more_seldom(world: World) -> None:
    world.rests_after_s = 1e9
    pauses = []
    for _ in range(5):
        world.train(20_000)
        pauses.append(world.pauses)
    assert world.paused_s is None
    assert world.meter.comparison is None
    assert 1 <= pauses[0] < 8
    assert pauses[4] - pauses[3] <= 1
    assert world.paused_for_s <= SHARE * (world.now_s - 100.0)


def test_children_go_on_by_themselves_if_the_step_is_a_long_one(world: World) -> None:
    world.look()
    left_s = world.until_ns / 1e9 - world.now_s
    assert 2 * SLOWED_S < left_s < 10 * SLOWED_S
    pauses = world.pauses
    world.train(1)
    world.now_s += 60.0
    world.meter.asked(60.0)  # it validated, for instance
    assert world.paused_s is None
    assert world.meter.comparison is None
    world.train(2000)
    assert world.pauses > pauses


@pytest.mark.parametrize("missing", ["armed", "beside"])
def test_no_look_is_taken_where_it_may_not_or_would_show_nothing(
    world: World, missing: str
) -> None:
    if missing == "armed":
        world.meter.armed = False
    else:
        world.beside = False
    world.train(2000)
    assert world.pauses == 0


def test_the_trainer_waits_until_two_steps_can_be_made(world: World) -> None:
    world.look()
    world.train(2)
    assert world.paused_s is None
    pauses = world.pauses
    while world.pauses == pauses:
        world.ready_s = world.now_s + 0.07
        world.train(1)
    assert world.ready_s - world.now_s < 0.01


def test_a_batch_that_does_not_come_is_not_waited_for(world: World) -> None:
    world.ready_s = 1e9
    begun_s = world.now_s
    world.train(5000)
    assert world.pauses == 0
    assert world.now_s - begun_s < 5000 * 0.014 + 8 * trainer_cost.HOLD_S


def test_the_trainer_does_not_wait_for_workers_that_it_feeds(world: World) -> None:
    world.fed, world.ready_s = True, 1e9
    begun_s = world.now_s
    world.train(2000)
    assert world.pauses >= 3
    assert world.now_s - begun_s < 2000 * 0.0135
    comparison = world.meter.comparison
    assert comparison is not None
    assert comparison.certain


def test_a_look_of_two_steps_ends_after_one_if_the_batch_is_gone(world: World) -> None:
    world.look()
    world.ready_s = 1e9
    world.train(1)
    assert world.paused_s is None
    assert not world.meter._looks  # noqa: SLF001 the first step alone does not count


def test_the_last_batch_and_batches_of_other_sizes_are_left_out(world: World) -> None:
    small = PLAN._replace(n_rows=3, n_local=3)
    for _ in range(200):
        world.train(1, plan=PLAN)
        world.train(1, plan=small)
    assert world.pauses == 0
    last = PLAN._replace(last=True)
    world.train(2000, plan=last)
    assert world.pauses == 0


def test_no_engine_stays_paused_after_the_trainer_leaves_its_loop(
    world: World,
) -> None:
    world.look()
    world.meter.reset()
    assert world.paused_s is None


def test_what_was_measured_is_dropped_once_it_has_changed(world: World) -> None:
    world.train(2000)
    world.meter.forget()
    assert world.meter.comparison is None
    world.train(MIN_BESIDE + 1)
    assert world.meter.comparison is not None
    world.meter.renew()
    world.train(MIN_BESIDE - 1)
    assert world.meter.comparison is None


@pytest.mark.parametrize("drops", ["forget", "renew"])
def test_what_another_thread_drops_during_a_look_harms_nothing(
    world: World, drops: str
) -> None:
    world.look()
    getattr(world.meter, drops)()
    world.train(2)
    assert world.paused_s is None
    assert not world.meter._looks  # noqa: SLF001 of a setting that is no more


def test_nothing_is_said_of_loading_that_has_come_home(world: World) -> None:
    world.train(2000)
    assert world.meter.comparison is not None
    world.beside = False
    world.train(1)
    assert world.meter.comparison is None


def test_a_look_that_is_interrupted_ends_with_the_next_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(World, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.train(2000)
    assert world.paused_s is not None
    world.meter.asked(0.0)
    assert world.paused_s is None
